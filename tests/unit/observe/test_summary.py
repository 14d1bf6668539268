"""The table at the end of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lagzero.observe.summary import Accuracy, Tally, accuracy_text, final_summary, wilson


def shown(*args, **kwargs) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(final_summary(*args, **kwargs))
    return out.getvalue()


def test_wilson_interval_of_half_of_a_hundred():
    # (0.5 + z^2/200 -+ z sqrt(0.25/100 + z^2/40000)) / (1 + z^2/100), z = 1.959964
    assert wilson(Tally(50, 100)) == pytest.approx((0.403832, 0.596168), abs=1e-6)


def test_wilson_interval_at_the_ends_stays_a_share():
    # k = 0: 0 and (z^2/n) / (1 + z^2/n)
    assert wilson(Tally(0, 10)) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson(Tally(10, 10)) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_no_share_of_nothing():
    with pytest.raises(ValueError, match="nothing was scored"):
        wilson(Tally(0, 0))
    with pytest.raises(ValueError, match="3 right of 2"):
        Tally(3, 2)
    assert accuracy_text(Tally(0, 0)) == accuracy_text(None) == "-"


def test_the_summary_compares_before_and_after_and_says_where_and_what_next():
    text = shown(
        Accuracy(Tally(64, 256), Tally(32, 256)),
        Accuracy(Tally(192, 256), Tally(160, 256)),
        "runs/demo",
        40,
    )
    for part in (
        "256 rollouts",
        "25.0 % (20.1 to 30.6)",
        "75.0 % (69.4 to 79.9)",
        "+50.0 points",
        "40 steps done. The run is in runs/demo",
        "lagzero eval runs/demo",
        "lagzero train --resume runs/demo",
    ):
        assert part in text


def test_a_run_without_an_evaluation_still_says_where_it_is():
    text = shown(None, None, "runs/demo", 3, [("look", "ls")])
    assert "accuracy" not in text
    assert "runs/demo" in text and "  ls" in text


def test_a_missing_side_is_a_dash_and_no_change():
    text = shown(None, Accuracy(Tally(1, 2)), "r", 1)
    assert "points" not in text
    assert "50.0 %" in text
