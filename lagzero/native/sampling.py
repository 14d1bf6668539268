"""Draw tokens by the C library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lagzero.native.library import library
from lagzero.native.structures import TYPES


def draw(
    logits: torch.Tensor, temperatures: Sequence[float], uniform: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return ids [B] and log-probs [B] in nats of tokens drawn from logits [B, V].

    They are float32 or bfloat16. A token is the first whose cumulative probability exceeds the
    row's ``uniform`` number; at temperature 0 it is the likeliest, and its log-prob that of
    temperature 1. An id of -1 marks a row that holds NaN, +inf or nothing but -inf. A row's result
    depends on that row alone.
    """
    logits, num = logits.contiguous(), len(logits)
    ids, logprobs = np.empty(num, np.int64), np.empty(num, np.float32)
    cold = np.asarray(temperatures, np.float32)
    uniform = np.ascontiguousarray(uniform, np.float64)
    library().draw(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_long(TYPES[logits.dtype]),
        ctypes.c_long(num),
        ctypes.c_long(logits.shape[1]),
        *(ctypes.c_void_p(each.ctypes.data) for each in (cold, uniform)),
        ctypes.c_long(torch.get_num_threads()),
        *(ctypes.c_void_p(each.ctypes.data) for each in (ids, logprobs)),
    )
    return ids, logprobs
