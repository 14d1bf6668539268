"""Attention whose result for a query depends on its own keys alone, bit for bit.

What is fixed, whatever the batch: scores and sums are float32; keys stand at their position in the
sequence and are padded to whole blocks of BLOCK; the values of one block are summed in one product,
and the blocks are added in order. A padded key has weight 0 and adds nothing.

Letters: N matrices (a sequence's key/value head each), R query rows (of the heads that share a
key head), L keys, D head size.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lagzero.numerics.exact import BLOCK, cover

_BACKWARD_ROWS = 1024  # whose scores are in memory at once


def attend_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    counts: Sequence[int],
) -> torch.Tensor:
    """Return [B, Q, H, D] float32 of B sequences: query heads that share a key head are one matrix.

    query [B, Q, H, D]; key and value [B, K, L, D]; seen [B, Q, L] bool; see ``attend_blocks``.
    """
    (batch, num, num_heads, size), kv_heads = query.shape, key.shape[1]
    shared = num_heads // kv_heads
    rows = query.reshape(batch, num, kv_heads, shared, size).transpose(1, 2)
    out = attend_blocks(
        rows.reshape(batch * kv_heads, num * shared, size).float(),
        key.flatten(0, 1).float(),
        value.flatten(0, 1).float(),
        seen.repeat_interleave(shared, 1),
        scale,
        counts,
    )
    out = out.view(batch, kv_heads, num, shared, -1).transpose(1, 2)
    return out.reshape(batch, num, num_heads, -1)


def attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    counts: Sequence[int],
) -> torch.Tensor:
    """Return softmax(scale query key^T) value, [N, R, D] float32, differentiable.

    Args:
        query: [N, R, D] float32.
        key, value: [N, L, D] float32, L a multiple of BLOCK. Padded values must be finite.
        seen: [B, R, L] bool, N a multiple of B; at least one True a row. Matrices of one sequence
            follow each other.
        scale: of the scores.
        counts: numbers of query rows that give the same rows, ascending.
    """
    assert key.shape[1] % BLOCK == 0, f"{key.shape[1]} keys are no whole blocks"
    if not torch.is_grad_enabled():
        return _forward(query, key, value, seen, scale, counts)
    return _Attention.apply(query, key, value, seen, scale, counts)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    counts: Sequence[int],
) -> torch.Tensor:
    num = query.shape[1]
    parts = cover(num, counts)
    missing = sum(parts) - num
    if missing:
        query = torch.nn.functional.pad(query, (0, 0, 0, missing))
        seen = torch.nn.functional.pad(seen, (0, 0, 0, missing), value=True)
    outs: list[torch.Tensor] = []
    for q, s in zip(query.split(parts, 1), seen.split(parts, 1), strict=True):
        weights = _weights(q.contiguous(), key, s, scale)
        out = torch.bmm(weights[..., :BLOCK], value[:, :BLOCK])
        for start in range(BLOCK, key.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            out += torch.bmm(weights[..., block], value[:, block])
        outs.append(out)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 1))[:, :num]


def _weights(
    query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the softmax [N, R, L]."""
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    by_sequence = scores.view(len(seen), -1, *scores.shape[1:])
    by_sequence.masked_fill_(~seen.unsqueeze(1), -torch.inf)
    return scores.softmax(-1)


class _Attention(torch.autograd.Function):
    """The weights are computed again in the backward pass, whose own sums need not be exact."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seen: torch.Tensor,
        scale: float,
        counts: Sequence[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, seen)
        ctx.scale = scale
        return _forward(query, key, value, seen, scale, counts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, seen = ctx.saved_tensors
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key), torch.zeros_like(value)
        for start in range(0, query.shape[1], _BACKWARD_ROWS):
            rows = slice(start, start + _BACKWARD_ROWS)
            q, grad = query[:, rows], grads[0][:, rows].contiguous()
            weights = _weights(q, key, seen[:, rows], ctx.scale)
            to_value.baddbmm_(weights.transpose(1, 2), grad)
            slope = torch.bmm(grad, value.transpose(1, 2))
            # d softmax: w (g - sum w g), over the keys
            slope.sub_((slope * weights).sum(-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
            to_query[:, rows] = torch.bmm(slope, key)
            to_key.baddbmm_(slope.transpose(1, 2), q)
        return to_query, to_key, to_value, None, None, None
