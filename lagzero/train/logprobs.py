"""Log-probs and entropies of chosen tokens, with the logits of one chunk at a time in memory.

Letters: N trained tokens, D model width, V vocabulary.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from lagzero.numerics.exact import Kernels

_CACHED_LOGITS = 1 << 18  # 1 MiB of float32

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, D] to logits [n, V]."""

Tail = Literal["fast", "exact"] | Kernels
"""How log-probs are taken from logits; only their last bits differ.

fast: by the shortest way; exact: by ``torch.log_softmax``; or by the kernels that a sampler takes
them by, for the same bits.
"""


def chunked_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    tail: Tail = "fast",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies [N] of the distribution softmax(head(hidden) / temperature).

    With z = logits / temperature and p = softmax(z)::

        logprob_n = z[n, target_n] - logsumexp(z[n])        entropy_n = -sum_v p[n, v] log p[n, v]

    At most ``chunk`` rows of logits exist at a time, in the backward pass too: every chunk but the
    last is computed again there. Values are float32 (float64 for float64 logits).

    Args:
        hidden: [N, D] in the compute type.
        targets: [N] token ids.
        temperature: > 0. For a greedy policy, score at temperature 1.
        chunk: tokens, > 0.
        entropy_gradient: whether entropies carry a gradient; log-probs always do.
        tail: how log-probs are taken from logits.
    """
    if temperature <= 0 or chunk <= 0:
        raise ValueError(f"temperature {temperature} and chunk {chunk} must be > 0")
    targets = targets.long()

    def of_chunk(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _TokenLogprobs.apply(head(rows), ids, temperature, entropy_gradient, tail)

    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    starts = range(0, len(targets), chunk)
    for start in starts:
        rows, ids = hidden[start : start + chunk], targets[start : start + chunk]
        # The backward pass begins with the last chunk, so that one may keep its logits.
        if start == starts[-1] or not torch.is_grad_enabled():
            parts.append(of_chunk(rows, ids))
        else:
            parts.append(
                checkpoint(of_chunk, rows, ids, use_reentrant=False, preserve_rng_state=False)
            )
    if not parts:
        empty = hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
        return empty, empty
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def whole_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slow twin of ``chunked_logprobs``: all [N, V] logits at once, plain autograd."""
    logits = head(hidden)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp = torch.log_softmax(z, -1)
    entropies = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return chosen, entropies if entropy_gradient else entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    """log p[target] and the entropy of softmax(logits / temperature)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
        tail: Tail,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tail, Kernels):
            logprobs, entropies, normaliser = tail.score(logits, targets, temperature)
        else:
            logprobs, entropies, normaliser = _by_torch(logits, targets, temperature, tail)
        ctx.back = tail.back if isinstance(tail, Kernels) else None
        ctx.save_for_backward(logits, targets, normaliser, entropies)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, normaliser, entropies = ctx.saved_tensors
        if ctx.back is not None:
            of = grads[0], grads[1] if ctx.entropy_gradient else None
            given = ctx.back.score(logits, targets, ctx.temperature, (entropies, normaliser), *of)
            return given, None, None, None, None
        grad_logprobs, grad_entropies = (g.unsqueeze(-1) for g in grads)
        out = torch.empty_like(logits)
        for rows in _blocks(logits):
            logp = _scaled(logits[rows], ctx.temperature) - normaliser[rows].unsqueeze(-1)
            slope = logp.exp()
            if ctx.entropy_gradient:
                # d logprob/dz_v = [v = target] - p_v,  dH/dz_v = -p_v (log p_v + H)
                logp.add_(entropies[rows].unsqueeze(-1)).mul_(grad_entropies[rows])
                slope.mul_(logp.add_(grad_logprobs[rows]))
            else:
                slope.mul_(grad_logprobs[rows])
            slope.neg_().scatter_add_(-1, targets[rows].unsqueeze(-1), grad_logprobs[rows])
            torch.div(slope, ctx.temperature, out=out[rows])
        return out, None, None, None, None


def _by_torch(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, tail: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs, entropies and logsumexp(logits / temperature), [N] each."""
    results: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rows in _blocks(logits):
        z = _scaled(logits[rows], temperature)
        given = _exact_logprobs(z, targets[rows]) if tail == "exact" else None
        top = z.amax(-1, keepdim=True)
        z = z.sub_(top) if z.data_ptr() != logits[rows].data_ptr() else z - top
        chosen = z.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
        shares = z.exp()
        total = shares.sum(-1)
        # H = log sum e^z - sum e^z z / sum e^z, with z now below the top logit.
        log_total = total.log()
        entropy = log_total - (shares * z).sum(-1) / total
        logprob = chosen - log_total if given is None else given
        results.append((logprob, entropy, top.squeeze(-1) + log_total))
    logprobs, entropies, normalisers = (torch.cat(parts) for parts in zip(*results, strict=True))
    return logprobs, entropies, normalisers


def _exact_logprobs(scaled: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return scaled.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Cut the rows so that a block stays in a CPU's cache from one operation to the next."""
    size = max(1, _CACHED_LOGITS // logits.shape[1]) if logits.is_cpu else len(logits)
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return z if temperature == 1 else z / temperature
