"""float32 as bfloat16 and the rest, and random rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lagzero.numerics.rounding import join, round_at_random, split

FINITE = st.floats(
    width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126, min_value=-(2.0**126)
)


def apart(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rounded, rest = wide.bfloat16().fill_(7), torch.full_like(wide, 7, dtype=torch.int16)
    split(wide.clone(), rounded, rest)
    return rounded, rest


@given(st.lists(FINITE, min_size=1))
def test_what_is_split_is_joined_bit_for_bit_and_rounded_to_the_nearest(values: list[float]):
    wide = torch.tensor(values)
    rounded, rest = apart(wide)
    joined = torch.empty_like(wide)
    join(rounded, rest, joined)
    assert torch.equal(joined.view(torch.int32), wide.view(torch.int32))  # -0.0 too
    exact, nearest = wide.double(), wide.bfloat16().double()
    assert torch.equal((rounded.double() - exact).abs(), (nearest - exact).abs())


def test_a_number_half_way_goes_away_from_0():
    """Between 1 and 2 bfloat16's spacing is 2^-7."""
    rounded, rest = apart(torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 2**-8 - 2**-23]))
    assert rounded.tolist() == [1 + 2**-7, -1 - 2**-7, 1.0]
    assert rest.tolist() == [-(2**15), -(2**15), 2**15 - 1]


@pytest.mark.parametrize("value", [1 + 2**-9, -(1 + 2**-9), 2**-130 * 1.3, 0.0, -1.5, 3e38])
def test_over_all_draws_the_mean_is_the_number(value: float):
    wide = torch.full((1 << 16,), value)
    exact = wide[0].double()
    rounded = torch.empty_like(wide, dtype=torch.bfloat16)
    round_at_random(wide, rounded, torch.arange(-(1 << 15), 1 << 15).short())
    assert rounded.double().mean() == exact
    assert len(set(rounded.tolist())) == (1 if exact.bfloat16().double() == exact else 2)


def test_a_weight_is_written_in_place_in_the_middle_of_others():
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rounded, rest = whole.bfloat16(), torch.zeros(4, dtype=torch.int16)
    split(torch.tensor([5.0, 1 + 2**-12]), rounded[1:3], rest[1:3])
    assert rounded.tolist() == [1.0, 5.0, 1.0, 4.0]
    assert rest.tolist() == [0, 0, 2**11, 0]
