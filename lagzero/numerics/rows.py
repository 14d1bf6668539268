"""A trainer's forward pass through the functions that the engine decodes by, with gradients.

Which functions, says a set of ``Kernels``: the C library's on a CPU, Triton's on a GPU. A row of
their results depends on that row alone, so the forward pass gives the engine's bits. The backward
pass is the kernels' own where they have one, else torch's ordinary one; nobody repeats gradients,
so neither keeps to the order of another. What is elementwise in a model (residual sums, on a GPU
rotary products) is left to its own modules: one rounded operation a number has one result.

A matrix that has a float32 gradient already (of its own, or ``main_grad``, which an optimiser keeps
for smaller types) gets its part added there in place, and autograd none: so nothing as large as the
weights is made for each row, and none twice for a tied embedding.

Letters: T tokens of the row, S segments, H query heads, G key/value heads, E head size.
"""

# torch's and transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lagzero.numerics.attention import AttentionPlan
from lagzero.numerics.exact import Gradients, Kernels, Places, linear_gradients
from lagzero.numerics.packed import PackedPlan
from lagzero.numerics.precision import has_fast_bfloat16
from lagzero.types import Array

MAIN_GRAD = "main_grad"  # attribute of a weight of a smaller type: its gradient in float32


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 gradient that a weight has already, or that an optimiser keeps for it."""
    if not weight.is_leaf:
        return None
    grad = weight.grad if weight.dtype == torch.float32 else getattr(weight, MAIN_GRAD, None)
    return grad if grad is not None and grad.dtype == torch.float32 else None


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wide: bool,
        kernels: Kernels,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.weight = weight  # itself: what is saved is another object, which knows no gradient
        ctx.wide, ctx.bias_dtype = wide, None if bias is None else bias.dtype
        ctx.back = None if wide else kernels.back
        return kernels.multiply(inputs, weight, bias, wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants, total = list(ctx.needs_input_grad), _main_grad(ctx.weight)
        if ctx.back is not None and not wants[2] and wants[1] <= (total is not None):
            to_inputs = ctx.back.multiply(grads[0], inputs, weight, total if wants[1] else None)
            if to_inputs is not None:
                return to_inputs, None, None, None, None
        slow = inputs.dtype == torch.bfloat16 and not has_fast_bfloat16(inputs.device)
        alike = grads[0].dtype == inputs.dtype == weight.dtype == torch.float32
        if wants[1] and total is not None and alike:
            total.addmm_(grads[0].flatten(0, -2).t(), inputs.flatten(0, -2))
            wants[1] = False
        widen = ctx.wide or slow
        gradients = linear_gradients(grads[0], inputs, weight, ctx.bias_dtype, wants, widen)
        return *gradients, None, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        total = _main_grad(weight)
        given = torch.zeros_like(weight) if total is None else total
        ids, rows = ids.flatten(), grads[0].flatten(0, -2)
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
        given.index_add_(0, ids, rows.to(given.dtype))
        return None, given if total is None else None, None


class _Normalise(torch.autograd.Function):
    """With u = x / rms(x) and s = grad * weight: dx = (s - u mean(s u)) / rms(x)."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Kernels
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.eps, ctx.back = eps, kernels.back
        return kernels.normalise(inputs, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        if ctx.back is not None:
            wanted = ctx.needs_input_grad[1]
            return *ctx.back.normalise(grads[0], inputs, weight, ctx.eps, wanted), None, None
        rows, grad = inputs.float(), grads[0].float()
        factor = torch.rsqrt(rows.square().mean(-1, keepdim=True) + ctx.eps)
        unit = rows * factor
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        slope = grad * weight.float()
        mean = (slope * unit).mean(-1, keepdim=True)
        to_inputs = slope.sub_(unit.mul_(mean)).mul_(factor)
        return to_inputs.to(inputs.dtype), to_weight, None, None


Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotations = tuple[Rotate, Rotate]
"""Heads [T, H, E], cosines and sines [T, E] to heads turned; and to their gradient, from that."""


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, ups: torch.Tensor, gate: Gate, back: Gradients | None
    ) -> torch.Tensor:
        ctx.save_for_backward(gates, ups)
        ctx.back = back
        return gate(gates, ups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gates, ups = ctx.saved_tensors
        if ctx.back is not None:
            return *ctx.back.gate(grads[0], gates, ups), None, None
        to_gates = torch.ops.aten.silu_backward(grads[0] * ups, gates)
        return to_gates, F.silu(gates).mul_(grads[0]), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], by: Rotations
    ) -> torch.Tensor:
        ctx.angles, ctx.back = angles, by[1]
        return by[0](heads, *angles)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grads[0], *ctx.angles), None, None


Back = Callable[..., tuple[torch.Tensor, ...]]


class _Attend(torch.autograd.Function):
    """The backward pass computes scores again; ``back`` gets the gradient and the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        forward: Callable[..., torch.Tensor],
        back: Back,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.back = back
        return forward(query, key, value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.back(grads[0], *ctx.saved_tensors), None, None


class RowPlan:
    """Attention of one packed row as the engine computes it; satisfies ``AttentionPlan``.

    Args:
        kernels: what the engine computes it by.
        position_ids: [T] integers, the place of each token in its sequence.
        segment_ids: [T] integers, non-decreasing from 0.
        parents: [S] integers, the parent segment or -1. A parent has no parent.
        device: where the model is.

    Raises ValueError for ids or parents that do not describe such a row.
    """

    def __init__(
        self,
        kernels: Kernels,
        position_ids: Array,
        segment_ids: Array,
        parents: Array,
        device: torch.device,
    ):
        self._kernels = kernels
        self._plain = PackedPlan(position_ids, segment_ids, parents, device)
        lengths = np.bincount(segment_ids)
        starts = lengths.cumsum() - lengths
        before = np.where(parents >= 0, lengths[parents], 0)
        at = np.arange(len(segment_ids)) - starts[segment_ids] + before[segment_ids]
        if not np.array_equal(at, position_ids):
            raise ValueError("positions must count 0, 1, 2, ... along each sequence, parent first")
        tables = np.zeros((len(parents), int((lengths + before).max())), np.int64)
        for table, start, length, parent in zip(tables, starts, lengths, parents, strict=True):
            ahead = int(before[segment_ids[start]])
            table[:ahead] = np.arange(ahead) + starts[parent]
            table[ahead : ahead + length] = np.arange(length) + start
        self._places = Places(
            *(
                torch.as_tensor(each.astype(np.int64), device=device)
                for each in (at, segment_ids, tables)
            )
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return [T, H, E]; see ``AttentionPlan``. Differentiable."""

        def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            pages = key.unsqueeze(2), value.unsqueeze(2)  # of one token each
            return self._kernels.attend(query, *pages, self._places, scale, window)

        def back(
            grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            by = self._kernels.back
            if by is not None:
                return by.attend(grad, query, key, value, self._places, scale, window)
            query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
            with torch.enable_grad():
                out = self._plain.attend(layer, query, key, value, scale, window)
            return torch.autograd.grad(out, (query, key, value), grad)

        if not torch.is_grad_enabled():
            return forward(query, key, value)
        return _Attend.apply(query, key, value, forward, back)


def linear_forward(module: Any, how: tuple[Kernels, bool], inputs: torch.Tensor) -> torch.Tensor:
    """Run ``torch.nn.Linear``. ``how``: by which kernels, and whether its result is float32."""
    kernels, wide = how
    if not torch.is_grad_enabled():
        return kernels.multiply(inputs, module.weight, module.bias, wide)
    return _Multiply.apply(inputs, module.weight, module.bias, wide, kernels)


def embed_forward(module: Any, _: None, ids: torch.Tensor) -> torch.Tensor:
    """Run ``torch.nn.Embedding``."""
    if not (torch.is_grad_enabled() and module.weight.requires_grad):
        return F.embedding(ids, module.weight)
    return _Embed.apply(ids, module.weight, module.padding_idx)


def norm_forward(module: Any, how: tuple[Kernels, float], inputs: torch.Tensor) -> torch.Tensor:
    """Run a norm by root mean squares. ``how``: by which kernels, and its epsilon."""
    kernels, eps = how
    if not torch.is_grad_enabled():
        return kernels.normalise(inputs, module.weight, eps)
    return _Normalise.apply(inputs, module.weight, eps, kernels)


def mlp_forward(
    module: Any, how: tuple[Gate, Gradients | None], inputs: torch.Tensor
) -> torch.Tensor:
    """Run down(silu(gate(x)) * up(x)).

    ``how``: what returns silu(gates) * ups, and its backward pass, or None.
    """
    gate, back = how
    gates, ups = module.gate_proj(inputs), module.up_proj(inputs)
    if not torch.is_grad_enabled():
        return module.down_proj(gate(gates, ups))
    return module.down_proj(_Gate.apply(gates, ups, gate, back))


def attention_forward(
    module: Any,
    how: tuple[Rotations, int | None],
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_plan: AttentionPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run attention of one row [1, T, D]. ``how``: what turns heads, and the layer's window."""
    rotations, window = how
    query, key, value = (
        project(hidden_states)[0].unflatten(-1, (-1, module.head_dim))
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    angles = position_embeddings[0][0], position_embeddings[1][0]
    query, key = (_Rotate.apply(each, angles, rotations) for each in (query, key))
    out = attention_plan.attend(module.layer_idx, query, key, value, module.scaling, window)
    return module.o_proj(out.flatten(1).unsqueeze(0)), None
