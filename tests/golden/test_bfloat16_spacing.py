"""The worked example of docs/numerics.md: what one rounding of a logit does to a ratio."""

from __future__ import annotations

import math

import pytest
import torch


def test_bfloat16_numbers_between_16_and_32_are_an_eighth_apart():
    """8 bits of significand: the spacing in [2^e, 2^(e+1)) is 2^(e-7)."""
    for number in (16.0, 20.25, 31.75):
        here = torch.tensor(number, dtype=torch.bfloat16)
        after = torch.nextafter(here, torch.tensor(math.inf, dtype=torch.bfloat16))
        assert float(after) - float(here) == 2.0 ** (4 - 7) == 0.125
    # eps is the spacing from 1 to 2; in float16 and float32 it is 8 and 65,536 times smaller
    spacing = {t: torch.finfo(t).eps * 2**4 for t in (torch.bfloat16, torch.float16, torch.float32)}
    assert list(spacing.values()) == [0.125, 0.125 / 8, 0.125 / 2**16]


def test_a_rounded_logit_moves_a_ratio_by_up_to_e_to_the_sixteenth():
    halfway = torch.tensor(20.0625)  # between 20 and 20.125
    assert float(halfway) - float(halfway.bfloat16()) == 0.0625
    assert math.exp(0.0625) == pytest.approx(1.0645, abs=5e-5)


def test_two_roundings_of_nearly_equal_logits_move_it_by_twice_that():
    """Engine and trainer round sums that differ in a last float32 bit to different neighbours."""
    engine = torch.nextafter(torch.tensor(20.0625), torch.tensor(0.0))
    trainer = torch.nextafter(torch.tensor(20.0625), torch.tensor(21.0))
    gap = float(trainer.bfloat16()) - float(engine.bfloat16())
    assert gap == 0.125
    assert math.exp(gap) == pytest.approx(1.1331, abs=5e-5)
