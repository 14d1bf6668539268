"""The self-check on products whose faults are known."""

from __future__ import annotations

import pytest
import torch

from lagzero.errors import LagzeroError
from lagzero.numerics import self_check
from lagzero.numerics.exact import Shape
from lagzero.numerics.self_check import check_attention, check_product, exact_counts

COUNTS = (16, 32, 64, 128)
ALONE = [torch.get_num_threads()]


def _times(weight: torch.Tensor):
    """A product made number by number: exact in every way."""
    return lambda rows: (rows.unsqueeze(1) * weight).sum(-1)


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(128, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def honest():
    return _times(torch.randn(5, 8, generator=torch.Generator().manual_seed(4)))


def test_an_exact_product_may_have_any_number_of_rows(rows, honest):
    assert exact_counts(honest, rows, COUNTS, ALONE) == COUNTS


def test_counts_whose_rows_differ_in_the_last_bit_are_left_out(rows, honest):
    def product(x: torch.Tensor) -> torch.Tensor:
        out = honest(x)
        return torch.nextafter(out, out + 1) if len(x) == 64 else out

    assert exact_counts(product, rows, COUNTS, ALONE) == (16, 32, 128)


def test_the_standard_is_the_least_count_at_which_a_place_does_not_matter(rows, honest):
    def product(x: torch.Tensor) -> torch.Tensor:
        out = honest(x)
        if len(x) < 64:
            out[-1] = torch.nextafter(out[-1], out[-1] + 1)
        return out

    assert exact_counts(product, rows, COUNTS, ALONE) == (64, 128)


def test_nothing_is_found_where_a_place_always_matters(rows, honest):
    def product(x: torch.Tensor) -> torch.Tensor:
        return honest(x) + torch.arange(len(x))[:, None]

    assert exact_counts(product, rows, COUNTS, ALONE) == ()


def test_counts_that_another_number_of_threads_gives_otherwise_are_left_out(rows, honest):
    before = torch.get_num_threads()

    def product(x: torch.Tensor) -> torch.Tensor:
        return honest(x) * (1 if torch.get_num_threads() == before or len(x) < 64 else 1 + 2**-20)

    assert exact_counts(product, rows, COUNTS, [before, before + 1]) == (16, 32)
    assert torch.get_num_threads() == before


def test_bfloat16_without_products_of_its_own_is_multiplied_in_float32(monkeypatch):
    monkeypatch.setattr(self_check, "has_fast_bfloat16", lambda device: False)
    assert check_product(Shape(40, 24, torch.bfloat16), ALONE).widen
    assert not check_product(Shape(40, 24, torch.float32), ALONE).widen


def test_bfloat16_that_is_not_exact_is_multiplied_in_float32(monkeypatch):
    monkeypatch.setattr(self_check, "has_fast_bfloat16", lambda device: True)
    real = torch.mm

    def uneven(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = real(a.float(), b.float())
        if a.dtype == torch.bfloat16:
            out[::2] *= 1.01
        return out.to(a.dtype)

    monkeypatch.setattr(torch, "mm", uneven)
    assert check_product(Shape(40, 24, torch.bfloat16), ALONE).widen


def test_a_machine_on_which_nothing_is_exact_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b: a @ b + torch.arange(len(a))[:, None])
    with pytest.raises(LagzeroError, match=r"24 inputs with 40 outputs in float32 depend on"):
        check_product(Shape(40, 24, torch.float32), ALONE)
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: real(a, b) + torch.rand(1))
    with pytest.raises(LagzeroError, match=r"batched products of attention"):
        check_attention([8], ALONE)


def test_wide_shapes_are_checked_at_fewer_counts():
    """2^34 operations at most: a head of 49,152 x 576 is tried up to 64 rows, 288 in all."""
    affordable = self_check._affordable(Shape(49152, 576, torch.float32))
    assert affordable == (16, 32, 48, 64)
    assert self_check._affordable(Shape(128, 128, torch.float32))[-1] == 512
    assert len(self_check._affordable(Shape(1 << 20, 1 << 14, torch.float32))) == 2
