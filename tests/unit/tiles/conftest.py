"""Where there is no GPU, Triton interprets its kernels on the CPU; then a tile's product is mended.

On a GPU a row of a tile's product does not depend on where it stands in the tile. numpy's product,
by which the interpreter computes it, is a BLAS whose last bits do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _floats(handle: Any) -> Any:
    import triton.language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle.data.astype(np.float32)
    return (handle.data.astype(np.uint32) << 16).view(np.float32)  # held as its bits


def _dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    left, right, out = _floats(a), _floats(b), total.data.copy()
    for k in range(left.shape[1]):
        out += left[:, k : k + 1] * right[k : k + 1]
    return TensorHandle(out, total.dtype.scalar)


@pytest.fixture(autouse=True)
def _rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


@pytest.fixture
def device() -> torch.device:
    """Where kernels run."""
    return DEVICE
