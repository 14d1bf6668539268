"""Numerics in which a token's result depends on its own sequence alone, never on its neighbours.

Matrix libraries choose a kernel by the number of rows, so that the same token has another last bit
in a batch of 3 than in one of 300. Here every product is made with row counts of which the
self-check has found that they give the same rows, bit for bit, on this machine; other numbers of
rows are cut into such parts and padded. The rest of a decoder model works row by row anyway, given
whole groups of ROWS; ``exact_attention`` sees to the one part that does not.

Letters: N rows, K inputs, M outputs of a linear layer.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

ROWS = 16
"""Flat rows are padded to multiples of it, so that vectorised loops have no ragged end."""

BLOCK = 64
"""Keys whose weighted values are added up in one product; blocks are added in order."""


@dataclass(frozen=True, slots=True)
class Product:
    """How one shape of linear layer is multiplied.

    ``counts`` are row counts, ascending, that give the same rows. With ``widen`` the product is
    made in float32 and rounded once, for a type that the machine does not multiply in.
    """

    counts: tuple[int, ...]
    widen: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Where the sequences of a row have their keys and values, all int64.

    The key of position p of a sequence is number p % S of page ``tables[sequence, p // S]``, with S
    tokens a page.
    """

    positions: torch.Tensor  # [T]
    sequences: torch.Tensor  # [T] rows of ``tables``
    tables: torch.Tensor  # [sequences, pages of the longest]


ProductType = Literal["same", "int16"]
"""``model.products``: layers and attention multiply in the model's type, or 16-bit integers."""

Score = Callable[
    [torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]
"""(logits [N, V], targets [N], temperature) to log-probs, entropies and normalisers [N]."""

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """Backward passes, from the gradient of a result and what it was made of, in the types of that.

    multiply(grad [..., M], inputs, weight, total [M, K] float32 or None) gives the gradient of the
    inputs and adds the weight's to ``total``, or it gives None, having added nothing;
    normalise(grad, x, weight, eps, wanted) gives those of x and, where wanted, weight;
    gate(grad, gates, ups) those of silu(gates) * ups; attend(grad, query [T, H, E], key, value
    [T, G, E], places, scale, window) those of query, key and value, whose pages are of one token
    each; score(logits [N, V], targets, temperature, (entropies, normalisers), gradients of
    log-probs [N], of entropies [N] or None) that of logits.
    """

    multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | None]
    normalise: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]
    gate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    attend: Callable[
        [Tensor, Tensor, Tensor, Tensor, Places, float, int | None], tuple[Tensor, Tensor, Tensor]
    ]
    score: Callable[[Tensor, Tensor, float, tuple[Tensor, Tensor], Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Parts of a model's forward pass. A row of a result has the same bits among any others.

    multiply(inputs [..., K], weight [M, K], bias [M] or None, wide) gives inputs W^T + bias
    [..., M], in float32 with ``wide``; normalise(x [..., K], weight [K], eps) gives
    weight * x / sqrt(mean(x^2) + eps); attend(query [T, H, E], keys, values [P, G, S, E], places,
    scale, window) gives softmax(scale query key^T) value [T, H, E] from pages of S tokens.

    Their backward passes are ``back``, or torch's where that is None.
    """

    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor]
    normalise: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    attend: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, Places, float, int | None], torch.Tensor
    ]
    score: Score
    back: Gradients | None = None


@dataclass(frozen=True, slots=True)
class ExactNumerics:
    """How one model is exact on one machine.

    Engine and trainer both compute by ``kernels``, in C or on a GPU; or these are None and
    ``not_native`` says why both run the model's modules, for which the self-check chose the rest.
    ``attention`` are counts of query rows, ascending, that give the same rows in attention.
    """

    kernels: Kernels | None = None
    not_native: str | None = None  # why the kernels are not those in C
    attention: tuple[int, ...] = ()
    num_shapes: int = 0  # of linear layers that were checked
    widened: bool = False  # some products are made in float32 and rounded
    products: ProductType = "same"

    @property
    def native(self) -> bool:
        """Whether engine and trainer compute in C."""
        return self.kernels is not None and self.not_native is None

    def __str__(self) -> str:
        if self.native:
            by = ", by 16-bit integers" if self.products == "int16" else ""
            return f"engine and trainer compute in C{by}"
        if self.kernels is not None:
            return "engine and trainer compute by Triton kernels of fixed tiles"
        return (
            f"engine and trainer run the model's modules, {self.num_shapes} shapes of products "
            f"checked (not in C: {self.not_native})"
        )


def cover(num_rows: int, counts: Sequence[int]) -> list[int]:
    """Return counts whose sum is at least ``num_rows``: few calls, and few rows in vain."""
    parts: list[int] = []
    left = num_rows
    while left > 0:
        above = next((count for count in counts if count >= left), None)
        # One padded call instead of several, while it computes at most a third in vain.
        if above is not None and (above == counts[0] or 3 * above <= 4 * left):
            part = above
        else:
            part = max(count for count in counts if count <= left)
        parts.append(part)
        left -= part
    return parts


def pad_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return [num_rows, ...], with zeros after the rows of ``tensor``."""
    missing = num_rows - len(tensor)
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def whole_rows(num: int) -> int:
    """Return the least multiple of ROWS that is at least ``num``."""
    return -(-num // ROWS) * ROWS


def multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: Product
) -> torch.Tensor:
    """Return inputs W^T + bias, [..., M], from inputs [..., K], weight [M, K] and bias [M]."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    if product.widen:
        rows, weight = rows.float(), weight.float()
    num = len(rows)
    parts = cover(num, product.counts)
    rows = pad_rows(rows, sum(parts)).contiguous()
    if len(parts) == 1:
        out = torch.mm(rows, weight.t())
    else:
        out = rows.new_empty(len(rows), len(weight))
        for x, y in zip(rows.split(parts), out.split(parts), strict=True):
            torch.mm(x, weight.t(), out=y)
    out = out[:num]
    if bias is not None:
        out = out + bias
    return out.to(inputs.dtype).view(*inputs.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    """``multiply``, whose backward pass is the ordinary one: gradients need not be exact."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.widen = product.widen
        ctx.bias_dtype = None if bias is None else bias.dtype
        return multiply(inputs, weight, bias, product)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return *linear_gradients(grads[0], inputs, weight, ctx.bias_dtype, wants, ctx.widen), None


def linear_gradients(
    grad: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias_dtype: torch.dtype | None,
    wants: Sequence[bool],
    widen: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of inputs [..., K], weight [M, K] and bias [M] that are wanted.

    grad [..., M] is that of inputs W^T + bias. With ``widen`` products are made in float32.
    """
    shape, dtypes = inputs.shape, (inputs.dtype, weight.dtype)
    grad, inputs = grad.reshape(-1, len(weight)), inputs.reshape(-1, shape[-1])
    if widen:
        grad, inputs, weight = grad.float(), inputs.float(), weight.float()
    to_inputs = (grad @ weight).to(dtypes[0]).view(shape) if wants[0] else None
    to_weight = (grad.t() @ inputs).to(dtypes[1]) if wants[1] else None
    to_bias = grad.sum(0).to(bias_dtype) if wants[2] else None
    return to_inputs, to_weight, to_bias


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: Product
) -> torch.Tensor:
    """Return ``multiply``, with gradients where they are wanted."""
    if not torch.is_grad_enabled():
        return multiply(inputs, weight, bias, product)
    return _Linear.apply(inputs, weight, bias, product)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the choice of a kernel depends on, besides the number of rows."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    transposed: bool = False  # the weight lies in memory as [K, M]


Products = dict[Shape, Product]


def shape_of(weight: torch.Tensor, dtype: torch.dtype) -> Shape:
    """Return the shape of a product of inputs of ``dtype`` with ``weight`` [M, K]."""
    outputs, inputs = weight.shape
    transposed = weight.stride(0) == 1 and weight.stride(1) != 1
    return Shape(outputs, inputs, dtype, transposed)


class LinearMode(torch.overrides.TorchFunctionMode):
    """Within it, ``F.linear`` of any module is ``linear``."""

    def __init__(self, products: Products):
        super().__init__()
        self._products = products

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        inputs, weight, bias = _linear_arguments(*args, **(kwargs or {}))
        return linear(inputs, weight, bias, self._products[shape_of(weight, inputs.dtype)])


def _linear_arguments(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return input, weight, bias


def linear_forward(module: Any, products: Products, inputs: torch.Tensor) -> torch.Tensor:
    """Run ``torch.nn.Linear``."""
    product = products[shape_of(module.weight, inputs.dtype)]
    return linear(inputs, module.weight, module.bias, product)


def transposed_forward(module: Any, products: Products, inputs: torch.Tensor) -> torch.Tensor:
    """Run ``Conv1D`` of transformers, whose weight is [K, M]."""
    weight = module.weight.t()
    return linear(inputs, weight, module.bias, products[shape_of(weight, inputs.dtype)])


def router_forward(module: Any, products: Products, *args: Any, **kwargs: Any) -> Any:
    """Run a module that multiplies by its own weight, as routers do."""
    with LinearMode(products):
        return type(module).forward(module, *args, **kwargs)


def experts_forward(
    module: Any,
    products: Products,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Run the experts one after the other, each over whole groups of ROWS tokens.

    hidden [N, K]; chosen [N, k] expert numbers and shares [N, k] their weights.
    """
    out = torch.zeros_like(hidden)
    for expert in sorted(set(chosen.flatten().tolist())):
        if expert >= module.num_experts:
            continue
        tokens, slots = torch.where(chosen == expert)
        num = len(tokens)
        padded = F.pad(tokens, (0, whole_rows(num) - num))
        up = module.gate_up_proj[expert]
        state = linear(hidden[padded], up, None, products[shape_of(up, hidden.dtype)])
        state = module._apply_gate(state)
        down = module.down_proj[expert]
        state = linear(state, down, None, products[shape_of(down, hidden.dtype)])[:num]
        state = state * shares[tokens, slots, None]
        out.index_add_(0, tokens, state.to(out.dtype))
    return out


def install(module: torch.nn.Module, forward: Any, how: Any) -> None:
    """Let one module run ``forward(module, how, ...)``."""
    module.forward = functools.partial(forward, module, how)
