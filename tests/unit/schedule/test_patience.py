from __future__ import annotations

import pytest

from lagzero.errors import LagzeroError
from lagzero.schedule.patience import Patience


def test_it_ends_at_the_limit_and_not_before():
    patience = Patience(2)
    patience.saw(False, [], {})
    with pytest.raises(LagzeroError, match=r"^2 steps in a row"):
        patience.saw(False, [], {})


def test_a_step_that_learns_starts_the_count_anew():
    patience = Patience(2)
    for learnt in (False, True, False, True, False):
        patience.saw(learnt, [], {})
    assert patience.num_empty == 1


def test_only_figures_that_explain_are_told():
    metrics = {
        "rollouts/zero_spread/count": 16.0,
        "rollouts/empty/count": 0.0,
        "reward/mean": 0.0,
        "length/mean": 7.0,
    }
    with pytest.raises(LagzeroError) as stopped:
        Patience(1).saw(False, [], metrics)
    assert "Last step: reward/mean=0, rollouts/zero_spread/count=16\n" in str(stopped.value)
