"""What the C library is handed: the structures of its headers, field by field."""

from __future__ import annotations

import ctypes

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.int16: 3}
"""How the library calls the types that weights, norms and caches are held in."""

TILED = 4
"""How it calls a bfloat16 weight that lies as its products take it."""

NORMS = ("norm_in", "norm_mlp", "norm_query", "norm_key")
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
_SIZES = (
    "num_layers",
    "hidden",
    "inner",
    "heads",
    "kv_heads",
    "head_size",
    "page_size",
    "type",
    "cache",
    "wide_head",
)
_COUNTS = ("num_tokens", "num_sampled", "table_width", "num_threads", "longest")
_ROW = (
    "ids",
    "positions",
    "sequences",
    "tables",
    "sampled",
    "cosine",
    "sine",
    "scratch",
    "logits",
)
_BACK_SIZES = (
    "num_tokens",
    "table_width",
    "heads",
    "kv_heads",
    "head_size",
    "window",
    "type",
    "num_threads",
    "longest",
)


class Linear(ctypes.Structure):
    """y = x weight^T * scale + bias."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("rows", ctypes.c_long),
        ("inputs", ctypes.c_long),
        ("type", ctypes.c_long),
    )


class Layer(ctypes.Structure):
    """A layer's weights, its cache and its window."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in NORMS),
        *((name, Linear) for name in LINEARS),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("window", ctypes.c_long),
    )


class Model(ctypes.Structure):
    """A policy."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("embedding", ctypes.c_void_p),
        ("norm_final", ctypes.c_void_p),
        ("head", Linear),
        *((name, ctypes.c_long) for name in _SIZES),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class Step(ctypes.Structure):
    """One flat row of tokens."""

    _fields_ = (
        *((name, ctypes.c_long) for name in _COUNTS),
        *((name, ctypes.c_void_p) for name in _ROW),
    )


class AttendBack(ctypes.Structure):
    """One row whose gradients of attention are wanted."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "grad")),
        *((name, ctypes.c_void_p) for name in ("to_query", "to_key", "to_value")),
        *((name, ctypes.c_void_p) for name in ("positions", "sequences", "tables", "scratch")),
        *((name, ctypes.c_int64) for name in _BACK_SIZES),
        ("parts", ctypes.c_int64 * 4 * 9),  # the library's own, as ``longest`` is
        ("scale", ctypes.c_float),
    )
