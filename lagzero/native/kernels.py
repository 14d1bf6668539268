"""Parts of the forward pass by the C library, on rows that the caller holds.

They are the functions that decoding goes through, so their results are the same bits: a row's
depends on that row alone, not on the number of rows or threads. All tensors are on the CPU, those
of a call float32 or bfloat16 alike; sums are float32, rounded where torch rounds.

Letters: T tokens, N rows, K inputs, M outputs, V vocabulary, H query heads, G key/value heads, E
head size.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from lagzero.native.gradients import GRADIENTS
from lagzero.native.library import library
from lagzero.native.structures import TILED, TYPES, Layer, Linear, Model, Step
from lagzero.numerics.exact import Kernels, Places, ProductType
from lagzero.numerics.memory import empty, lazy_zeros


def _at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _long(number: int) -> ctypes.c_long:
    return ctypes.c_long(number)


def _threads() -> ctypes.c_long:
    return ctypes.c_long(torch.get_num_threads())


_CHUNK = 256  # numbers that share a step, as in the library
_WIDTH = 32  # rows of a weight, of which the library packs 16 or 32 together


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [M, K] as the library reads it, rows filled up with zeros.

    Of 16-bit integers q: it stands for q times a step for each 256 of its q. Of bfloat16: the
    weight's own numbers, in tiles.
    """

    numbers: torch.Tensor  # int16 or bfloat16
    steps: torch.Tensor | None  # float32, of integers


def pack(weight: torch.Tensor, into: Packed | None = None) -> Packed:
    """Quantise a weight [M, K], K a multiple of 32; ``into`` is what came of one like it before.

    q = round(w / step), where the step of 256 inputs of a row is the least for which |q| <= 32767
    and their norm is at most 46300: so sums of 256 products of two such q fit 32 bits.
    """
    weight = weight.contiguous()
    outputs, size = weight.shape
    if into is None:
        padded = -(-outputs // _WIDTH) * _WIDTH
        integers = torch.empty(padded * size, dtype=torch.int16)
        into = Packed(integers, torch.empty(padded * -(-size // _CHUNK)))
    spare = torch.empty(torch.get_num_threads() * size, dtype=torch.int16)
    library().pack_rows(
        _at(weight),
        _long(TYPES[weight.dtype]),
        _long(outputs),
        _long(size),
        *map(_at, (spare, into.numbers, into.steps)),
        _threads(),
    )
    return into


def takes_tiles(weight: torch.Tensor) -> bool:
    """Whether a decoder multiplies by such a weight in tiles, which ``tile`` lays it in."""
    native = library()
    native.takes_tiled.restype = ctypes.c_long
    return weight.dtype == torch.bfloat16 and bool(native.takes_tiled(_long(weight.shape[1])))


def tile(weight: torch.Tensor, into: Packed | None = None) -> Packed:
    """Lay a weight [M, K] of bfloat16 in tiles, K a multiple of 32; ``into`` as in ``pack``."""
    weight = weight.contiguous()
    outputs, size = map(_long, weight.shape)
    if into is None:
        library().tiled_size.restype = ctypes.c_long
        numbers = library().tiled_size(outputs, size)
        into = Packed(lazy_zeros((numbers,), weight.dtype, weight.device), None)
    library().lay_tiles(_at(weight), outputs, size, _at(into.numbers), _threads())
    return into


def linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    packed: Packed | None = None,
) -> Linear:
    """Return a linear layer's structure, which points into the tensors.

    weight [M, K] is multiplied by as it is, or by what it was packed to.
    """
    stored, kind = weight, TYPES[weight.dtype]
    if packed is not None:
        stored, scale = packed.numbers, packed.steps
        kind = TILED if scale is None else TYPES[stored.dtype]
    return Linear(
        stored.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if scale is None else scale.data_ptr(),
        *weight.shape,
        kind,
    )


def multiply(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wide: bool = False,
    packed: Packed | None = None,
) -> torch.Tensor:
    """Return inputs W^T + bias, [..., M], from inputs [..., K], weight [M, K] and bias [M].

    With ``wide`` the result is float32, not rounded to the type of the inputs. With ``packed``,
    which ``pack`` made of the weight, it is a product of integers; inputs are quantised alike.
    """
    weight = weight.contiguous()
    (outputs, size), dtype = weight.shape, torch.float32 if wide else inputs.dtype
    bias = None if bias is None else bias.to(dtype).contiguous()
    rows, out = inputs.contiguous(), empty((*inputs.shape[:-1], outputs), dtype)
    num = rows.numel() // size
    layer = ctypes.byref(linear(weight, bias, packed=packed))
    types = _long(TYPES[rows.dtype]), _long(TYPES[dtype])
    native = library()
    native.multiply_floats.restype = ctypes.c_long
    space = empty((native.multiply_floats(layer, _long(num), *types),))
    native.multiply_rows(
        layer, _long(num), _at(rows), types[0], _at(space), _at(out), types[1], _threads()
    )
    return out


def normalise(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) of each row x, [..., K]."""
    rows = inputs.contiguous()
    out, size = empty(rows.shape, rows.dtype), rows.shape[-1]
    library().normalise_rows(
        _at(rows),
        _at(weight.contiguous()),
        _long(rows.numel() // size),
        _long(size),
        ctypes.c_float(eps),
        _long(TYPES[inputs.dtype]),
        _at(out),
        _threads(),
    )
    return out


def rotate(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rounded: bool = True
) -> torch.Tensor:
    """Return heads [T, H, E] turned by angles [T, E]: numbers e and e + E/2 are one plane.

    Their two products are ``rounded`` to the type of the heads, as their sum is in any case.
    """
    parts = [each.to(heads.dtype).contiguous() for each in (heads, cosine, sine)]
    out, held = empty(heads.shape, heads.dtype), TYPES[heads.dtype]
    types = held, held if rounded else TYPES[torch.float32]
    sizes = map(_long, (*heads.shape, *types))
    library().rotate_rows(*map(_at, parts), *sizes, _at(out), _threads())
    return out


def rotate_back(grad: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the heads of ``rotate``: what turns them the other way."""
    return rotate(grad, cosine, -sine.roll(sine.shape[-1] // 2, -1), rounded=False)


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Return silu(gates) * ups, [..., K]."""
    rows, more = gates.contiguous(), ups.contiguous()
    out, size = empty(rows.shape, rows.dtype), rows.shape[-1]
    library().gate_rows(
        _at(rows),
        _at(more),
        _long(rows.numel() // size),
        _long(size),
        _long(TYPES[gates.dtype]),
        _at(out),
        _threads(),
    )
    return out


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: Places,
    scale: float,
    window: int | None,
    cache: torch.dtype | None = None,
) -> torch.Tensor:
    """Return softmax(scale query key^T) value, [T, H, E], of query [T, H, E].

    key, value [P, G, S, E] are pages of S tokens. With a window w a token sees the last w
    positions, its own included. With ``cache`` int16, queries, keys and values become integers.
    """
    (num, heads, size), dtype = query.shape, query.dtype
    rows, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, threads = empty(rows.shape, rows.dtype), torch.get_num_threads()
    width, page_size = places.tables.shape[1], key.shape[2]
    model = Model(
        heads=heads,
        kv_heads=key.shape[1],
        head_size=size,
        page_size=page_size,
        type=TYPES[dtype],
        cache=TYPES[cache or dtype],
        scale=scale,
    )
    if cache == torch.int16:
        key, value = (_kept(model, each) for each in (key, value))
    layer = Layer(keys=key.data_ptr(), values=value.data_ptr(), window=window or 0)
    step = Step(
        num_tokens=num,
        table_width=width,
        num_threads=threads,
        longest=width * page_size,
        positions=places.positions.data_ptr(),
        sequences=places.sequences.data_ptr(),
        tables=places.tables.data_ptr(),
    )
    native = library()
    native.attend_floats.restype = ctypes.c_long
    scratch = empty((native.attend_floats(ctypes.byref(model), ctypes.byref(step)),))
    step.scratch = scratch.data_ptr()
    parts: list[Any] = [ctypes.byref(model), ctypes.byref(layer), ctypes.byref(step)]
    native.attend_rows(*parts, _at(rows), _at(out))
    return out


def _kept(model: Model, pages: torch.Tensor) -> torch.Tensor:
    wide, shape = pages.float(), cache_shape(torch.int16, *pages.shape)
    out = torch.empty(shape, dtype=torch.int16)
    library().keep_pages(ctypes.byref(model), _long(len(wide)), _at(wide), _at(out), _threads())
    return out


def cache_shape(dtype: torch.dtype, *shape: int) -> tuple[int, ...]:
    """Return the shape of keys or values [P, G, S, E] in a cache of a type.

    Of int16, S tokens of a head are followed by their S steps in float32.
    """
    *outer, size = shape
    return (*outer, size + 2 if dtype == torch.int16 else size)


def score(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies [N] in nats of softmax(logits / temperature), and normalisers.

    logits [N, V], targets [N] int64. A normaliser is logsumexp(logits / temperature). A
    log-prob is that which ``draw`` gives to the same token. NaN where logits are no numbers.
    """
    logits, targets = logits.contiguous(), targets.contiguous()
    logprobs, entropies, normalisers = (torch.empty(len(logits)) for _ in range(3))
    library().score_tokens(
        _at(logits),
        _long(TYPES[logits.dtype]),
        *map(_long, logits.shape),
        ctypes.c_float(temperature),
        _at(targets),
        _threads(),
        *map(_at, (logprobs, entropies, normalisers)),
    )
    return logprobs, entropies, normalisers


def multiply_int16(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool = False
) -> torch.Tensor:
    """Return ``multiply`` by 16-bit integers; the weight is packed for this call."""
    return multiply(inputs, weight, bias, wide, pack(weight))


KERNELS = Kernels(multiply, normalise, attend, score, GRADIENTS)
attend_int16 = functools.partial(attend, cache=torch.int16)
_INT16_KERNELS = replace(KERNELS, multiply=multiply_int16, attend=attend_int16)


def kernels_of(products: ProductType) -> Kernels:
    """Return the parts of a policy whose ``model.products`` these are."""
    return _INT16_KERNELS if products == "int16" else KERNELS
