"""Backward passes of the parts in C: gradients of products, norms, gates, attention and log-probs.

They are those of the float32 formulas at the inputs as they are, in the type of these, float32 or
bfloat16. Sums are float32 and in one order: neither a second run nor another number of threads
changes a bit. All tensors are on the CPU.

Letters: T tokens, N rows, K inputs, M outputs, V vocabulary, H query heads, G key/value heads, E
head size.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes

import torch

from lagzero.native.library import library
from lagzero.native.structures import TYPES, AttendBack, Linear
from lagzero.numerics.exact import Gradients, Places
from lagzero.numerics.memory import empty


def _told(
    part: torch.Tensor | int | float | None,
) -> ctypes.c_void_p | ctypes.c_long | ctypes.c_float:
    """Return an argument as the library takes it: a tensor by its address."""
    if part is None:
        return ctypes.c_void_p(None)
    if isinstance(part, torch.Tensor):
        return ctypes.c_void_p(part.data_ptr())
    return ctypes.c_float(part) if isinstance(part, float) else ctypes.c_long(part)


def multiply_back(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, total: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient grad W of inputs [..., K] of ``kernels.multiply``, from grad [..., M].

    That of the weight [M, K], grad^T inputs, is added to ``total`` [M, K] float32. All others are
    bfloat16: None where they are not, or the library has no matrix unit; then nothing was added.
    """
    layer = Linear(weight.data_ptr(), None, None, *weight.shape, TYPES[weight.dtype])
    layer, native = ctypes.byref(layer), library()
    if {grad.dtype, inputs.dtype} != {weight.dtype} or not native.has_products_back(layer):
        return None
    grad, inputs = grad.contiguous(), inputs.contiguous()
    num, out = inputs.numel() // inputs.shape[-1], empty(inputs.shape, inputs.dtype)
    native.paired_size.restype = ctypes.c_long
    paired = empty((native.paired_size(layer, _told(num)),), torch.int16)
    parts = num, grad, inputs, paired, out, total, torch.get_num_threads()
    native.multiply_back(layer, *map(_told, parts))
    return out


def normalise_back(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, eps: float, wanted: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of inputs [..., K] and weight [K] of ``kernels.normalise``.

    With u = x / rms(x) and s = grad weight: (s - u mean(s u)) / rms(x), and the sum of grad u over
    rows; None for the weight if it is not ``wanted``.
    """
    grad, inputs, weight = (each.contiguous() for each in (grad, inputs, weight))
    size, native = len(weight), library()
    num, to_inputs = inputs.numel() // size, empty(inputs.shape, inputs.dtype)
    to_weight = empty(weight.shape, weight.dtype) if wanted else None
    native.normalise_back_floats.restype = ctypes.c_long
    scratch = empty((native.normalise_back_floats(_told(num), _told(size)),))
    types = TYPES[inputs.dtype], TYPES[weight.dtype]
    parts = grad, inputs, weight, num, size, eps, *types, to_inputs, to_weight, scratch
    native.normalise_back(*map(_told, (*parts, torch.get_num_threads())))
    return to_inputs, to_weight


def gate_back(
    grad: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gates and ups [..., K] of ``kernels.gate``.

    With s = sigmoid(gates): grad ups s (1 + gates (1 - s)) and grad gates s.
    """
    grad, gates, ups = (each.contiguous() for each in (grad, gates, ups))
    to_gates, to_ups = empty(gates.shape, gates.dtype), empty(ups.shape, ups.dtype)
    sizes = gates.numel(), TYPES[gates.dtype]
    parts = grad, gates, ups, *sizes, to_gates, to_ups, torch.get_num_threads()
    library().gate_back(*map(_told, parts))
    return to_gates, to_ups


def attend_back(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: Places,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query [T, H, E], key and value [T, G, E] of ``kernels.attend``.

    With shares p = softmax(scale query key^T): to value p^T grad; and, of
    s = p (grad value^T - sum(p grad value^T)), scale s key to query and scale s^T query to key.
    Pages are of one token each. E is a multiple of 16.
    """
    inputs = [each.contiguous() for each in (query, key, value)]
    found, grad = [empty(each.shape, each.dtype) for each in inputs], grad.contiguous()
    of = AttendBack(
        *(each.data_ptr() for each in (*inputs, grad, *found)),
        *(each.data_ptr() for each in (places.positions, places.sequences, places.tables)),
        num_tokens=len(query),
        table_width=places.tables.shape[1],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_size=query.shape[2],
        window=window or 0,
        type=TYPES[query.dtype],
        num_threads=torch.get_num_threads(),
        scale=scale,
    )
    native = library()
    native.attend_back_floats.restype = ctypes.c_long
    scratch = empty((native.attend_back_floats(ctypes.byref(of)),))
    of.scratch = scratch.data_ptr()
    native.attend_back(ctypes.byref(of))
    return found[0], found[1], found[2]


def score_back(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    scored: tuple[torch.Tensor, torch.Tensor],
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of logits [N, V] of ``kernels.score``, from those [N] of its results.

    ``scored`` are entropies H and normalisers of z = logits / temperature, p = softmax(z):
    (of_logprobs ([v = target] - p_v) - of_entropies p_v (log p_v + H)) / temperature.
    """
    logits, targets = logits.contiguous(), targets.contiguous()
    out = empty(logits.shape, logits.dtype)
    if of_entropies is None:
        of_entropies = torch.zeros_like(of_logprobs)
    entropies, normalisers = scored
    floats = [each.float().contiguous() for each in (of_logprobs, of_entropies)]
    parts = (
        *(logits, TYPES[logits.dtype], *logits.shape, float(temperature)),
        *(targets, normalisers, entropies, *floats, torch.get_num_threads(), out),
    )
    library().score_back(*map(_told, parts))
    return out


GRADIENTS = Gradients(multiply_back, normalise_back, gate_back, attend_back, score_back)
