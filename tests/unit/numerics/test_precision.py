"""Names of types become types."""

from __future__ import annotations

import pytest
import torch

from lagzero.numerics import precision
from lagzero.numerics.precision import pick_dtype


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_name_is_its_type(name: str):
    assert pick_dtype(name, torch.device("cpu")) == getattr(torch, name)


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_what_the_device_multiplies_in(
    fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: fast)
    assert pick_dtype("auto", torch.device("cpu")) == dtype
