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
from typing import Any

import torch

from lagzero.native.library import library
from lagzero.native.structures import TYPES, Layer, Linear, Model, Step
from lagzero.numerics.exact import Kernels, Places


def _at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _long(number: int) -> ctypes.c_long:
    return ctypes.c_long(number)


def _threads() -> ctypes.c_long:
    return ctypes.c_long(torch.get_num_threads())


def multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool = False
) -> torch.Tensor:
    """Return inputs W^T + bias, [..., M], from inputs [..., K], weight [M, K] and bias [M].

    With ``wide`` the result is float32, not rounded to the type of the inputs.
    """
    inputs, weight = inputs.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    outputs, size = weight.shape
    dtype = torch.float32 if wide else inputs.dtype
    rows, out = inputs.float(), torch.empty(*inputs.shape[:-1], outputs)
    linear = Linear(
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None,
        outputs,
        size,
        TYPES[weight.dtype],
    )
    library().multiply_rows(
        ctypes.byref(linear),
        _long(rows.numel() // size),
        _at(rows),
        _at(inputs),
        _at(out),
        _long(TYPES[dtype]),
        _threads(),
    )
    return out.to(dtype)


def normalise(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) of each row x, [..., K]."""
    rows = inputs.contiguous().float()
    out, size = torch.empty_like(rows), rows.shape[-1]
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
    return out.to(inputs.dtype)


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Return silu(gates) * ups, [..., K]."""
    rows, more = gates.contiguous().float(), ups.contiguous().float()
    out, size = torch.empty_like(rows), rows.shape[-1]
    library().gate_rows(
        _at(rows),
        _at(more),
        _long(rows.numel() // size),
        _long(size),
        _long(TYPES[gates.dtype]),
        _at(out),
        _threads(),
    )
    return out.to(gates.dtype)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: Places,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return softmax(scale query key^T) value, [T, H, E], of query [T, H, E].

    key, value [P, G, S, E] are pages of S tokens. With a window w a token sees the last w
    positions, its own included.
    """
    (num, heads, size), dtype = query.shape, query.dtype
    rows, key, value = query.contiguous().float(), key.contiguous(), value.contiguous()
    out, threads = torch.empty_like(rows), torch.get_num_threads()
    width, page_size = places.tables.shape[1], key.shape[2]
    model = Model(
        heads=heads,
        kv_heads=key.shape[1],
        head_size=size,
        page_size=page_size,
        type=TYPES[dtype],
        scale=scale,
    )
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
    scratch = torch.empty(native.attend_floats(ctypes.byref(model), ctypes.byref(step)))
    step.scratch = scratch.data_ptr()
    parts: list[Any] = [ctypes.byref(model), ctypes.byref(layer), ctypes.byref(step)]
    native.attend_rows(*parts, _at(rows), _at(out))
    return out.to(dtype)


def score(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies [N] in nats of softmax(logits / temperature), and normalisers.

    logits [N, V] float32, targets [N] int64. A normaliser is logsumexp(logits / temperature). A
    log-prob is that which ``draw`` gives to the same token. NaN where logits are no numbers.
    """
    logits, targets = logits.contiguous(), targets.contiguous()
    logprobs, entropies, normalisers = (torch.empty(len(logits)) for _ in range(3))
    library().score_tokens(
        _at(logits),
        _long(len(logits)),
        _long(logits.shape[1]),
        ctypes.c_float(temperature),
        _at(targets),
        _threads(),
        *map(_at, (logprobs, entropies, normalisers)),
    )
    return logprobs, entropies, normalisers


KERNELS = Kernels(multiply, normalise, attend, score)
