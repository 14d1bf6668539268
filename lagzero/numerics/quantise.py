"""Linear layers whose weights are stored in 8 bits, with one scale for each output.

A weight w [M, K] becomes q [M, K] and s [M], and stands for q s::

    int8:  s_m = max_k |w_mk| / 127    q_mk = round(w_mk / s_m)    |w - q s| <= s / 2
    fp8:   s_m = max_k |w_mk| / 448    q_mk = w_mk / s_m in e4m3   |w - q s| <= |w| / 16 + s / 1024

Both are symmetric: there is no zero point. 448 is the largest number of e4m3, whose normal numbers
have 4 bits of significand, so that rounding moves them by 1/16 of themselves at most; the spacing
of those below is 2^-9. Activations keep their type.

Letters: N rows, K inputs, M outputs.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

Kind = Literal["int8", "fp8"]
STORED: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}
_TINY = 1e-30  # of a row's largest weight: a row of zeros has a scale too


def quantise(weight: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [M, K] and s [M] float32 of a weight [M, K]. Computed in float32.

    NaN or infinity in a row is found again in its scale.
    """
    largest = _LARGEST[kind]
    scale = weight.abs().amax(-1).float().clamp_min_(_TINY).div_(largest)
    steps = weight.float() / scale.unsqueeze(-1)  # a copy, so that the rest may be done in place
    if kind == "int8":
        steps.round_()
    return steps.clamp_(-largest, largest).to(STORED[kind]), scale


def dequantise(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return q s [M, K], multiplied in float32 and rounded to ``dtype`` once."""
    return stored.float().mul_(scale.unsqueeze(-1)).to(dtype)


def rounded(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return what a weight [M, K] stands for once it has been quantised, in its own type."""
    return dequantise(*quantise(weight, kind), weight.dtype)


def multiply(
    inputs: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x (q s)^T + b [..., M] of inputs [..., K], in the inputs' type.

    The weight is widened anew in each call: no wide copy of it is kept. On CUDA devices with
    products of fp8 the inputs are quantised too, one scale a row.
    """
    if stored.dtype == torch.float8_e4m3fn and _has_fp8_products(inputs, stored):
        return _fp8_product(inputs, stored, scale, bias)
    if inputs.dtype != torch.float32:
        return F.linear(inputs, dequantise(stored, scale, inputs.dtype), bias)
    out = F.linear(inputs, stored.float()).mul_(scale)  # M numbers a row, not M x K
    return out if bias is None else out.add_(bias)


def _has_fp8_products(inputs: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether ``torch._scaled_mm`` takes them: Ada or Hopper, bfloat16 results, whole tiles."""
    return (
        inputs.is_cuda
        and inputs.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(inputs.device) >= (8, 9)
        and stored.shape[0] % 16 == 0
        and stored.shape[1] % 16 == 0
    )


def _fp8_product(
    inputs: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    small, steps = quantise(rows, "fp8")
    out = torch._scaled_mm(  # pyright: ignore  (it has no public name)
        small,
        stored.t(),
        scale_a=steps.unsqueeze(1),
        scale_b=scale.unsqueeze(0),
        out_dtype=inputs.dtype,
    )
    out = out.view(*inputs.shape[:-1], -1)
    return out if bias is None else out + bias


class QuantisedLinear(torch.nn.Module):
    """``torch.nn.Linear`` for sampling: ``weight`` [M, K] of 8 bits, ``scale`` [M] float32.

    They are parameters, without gradients, because weights reach an engine by its parameters.
    """

    def __init__(self, linear: torch.nn.Linear, kind: Kind):
        """Quantise a layer."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        stored, scale = quantise(linear.weight.detach(), kind)
        self.weight = torch.nn.Parameter(stored, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        bias: Any = linear.bias  # torch's annotation forgets that it may be None
        if bias is not None:
            bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [..., M] of inputs [..., K]."""
        return multiply(inputs, self.weight, self.scale, self.bias)


class _RoundedLinear(torch.autograd.Function):
    """F.linear with ``rounded`` weights, and the gradient as if rounding were the identity."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: Kind,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)  # not the rounded weight: it is made again
        ctx.kind = kind
        return F.linear(inputs, rounded(weight, kind), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        grad, wants = grads[0], ctx.needs_input_grad
        to_inputs = grad @ rounded(weight, ctx.kind) if wants[0] else None
        flat = grad.reshape(-1, grad.shape[-1])
        to_weight = flat.t() @ inputs.reshape(-1, inputs.shape[-1]) if wants[1] else None
        to_bias = flat.sum(0) if wants[2] else None
        return to_inputs, to_weight, to_bias, None


def rounded_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: Kind
) -> torch.Tensor:
    """Return x Q(w)^T + b [..., M] with Q(w) = ``rounded(weight, kind)``, straight through.

    With g the gradient of the result, those of x, w and b are g Q(w), g^T x and the sum of g over
    rows: w is trained as if it were Q(w). Source: Bengio, Leonard & Courville 2013 (the
    straight-through estimator); Jacob et al. 2018 (training with quantised forward passes).
    """
    return _RoundedLinear.apply(inputs, weight, bias, kind)
