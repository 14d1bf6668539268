"""The published rows as scenarios: what they mean, and that the comparison can be read off."""

from __future__ import annotations

import re

import pytest

from lagzero.plan.published import (
    FITTED,
    HELD_OUT,
    PROMPTS,
    SIGMA,
    UPDATE_S,
    WAIT_S,
    Fit,
    Row,
    cycle_s,
    mechanisms,
    of,
    scenario,
    verl,
)
from lagzero.plan.simulate import simulate

FIT = Fit(median=400.0, train_device_s=1e-3, sync_s=1.0, mean=600.0)


@pytest.mark.parametrize("row", [FITTED, *HELD_OUT], ids=lambda row: row.name)
def test_a_row_trains_512_prompts_between_two_transfers(row: Row):
    case = scenario(row, FIT, cycles=3, overhead_s=4e-3)
    assert case.groups_per_step * case.sync_every == PROMPTS
    assert case.steps == 3 * case.sync_every
    assert case.group_size == 16
    if row.staleness is None:
        assert (case.engines * 4, case.placement, case.extra_groups) == (
            row.devices,
            "colocated",
            0,
        )
    else:
        assert case.engines * 4 * 2 == row.devices
        # the published rule: at most (1 + staleness) * 512 are started and not trained
        assert case.extra_groups == pytest.approx(row.staleness * PROMPTS, abs=0.5)


def test_the_fitted_row_is_in_no_other_place():
    assert FITTED not in HELD_OUT
    assert len({row.name for row in (FITTED, *HELD_OUT)}) == 12
    assert FITTED.published_s - UPDATE_S - WAIT_S == pytest.approx(4.33)


def test_the_assumed_tail_has_its_99th_percentile_at_10_medians():
    drawn = sorted(
        of(lengths=f"lognormal:median=1000,sigma={SIGMA}").lengths.draws(1).part(0, 200_000)
    )
    assert drawn[198_000] / drawn[100_000] == pytest.approx(10, rel=0.03)


def test_a_cycle_is_the_time_from_transfer_to_transfer():
    """Lengths 4 on 4 lanes, one group a step, 2 steps a transfer, 1 s of training: 5 s a step in
    which nothing overlaps."""
    case = of(
        lanes=4, group_size=1, groups_per_step=1, sync_every=2, steps=8, lengths="fixed:4",
        train_s=1, train_token_s=0, sync_s=0,
    )  # fmt: skip
    result = simulate(case)
    # two groups start together: 4 s, then two steps of 1 s
    assert [each.at_s for each in result.steps] == [5, 6, 11, 12, 17, 18, 23, 24]
    assert cycle_s(result, 1) == 6.0


@pytest.mark.long
def test_the_comparison_prints_each_row_with_its_error():
    said: list[str] = []
    verl(said.append, cycles=2, warm=1, overhead_s=4e-3)
    rows = [
        re.fullmatch(r"  (.*?) +(\d+) +(\d+) +(fitted|[+-]\d+ %) +[\d.]+", each)
        for each in said[4:]
    ]
    assert all(rows)
    assert [row[1] for row in rows if row] == [row.name for row in (FITTED, *HELD_OUT)]
    for row in rows[1:]:
        assert row is not None
        published, simulated, error = float(row[2]), float(row[3]), float(row[4].split()[0])
        # both are printed rounded, so the error read off them may differ by half a second of each
        assert 100 * (simulated / published - 1) == pytest.approx(error, abs=1.2)
    fitted = rows[0]
    assert fitted is not None
    assert float(fitted[3]) == pytest.approx(FITTED.published_s, rel=0.05)


def test_the_order_of_the_published_mechanisms_is_kept():
    said: list[str] = []
    mechanisms(said.append, steps=4)
    gains = [float(re.split(r"\s{2,}", line.strip())[-4]) for line in said[2:]]
    synchronous, _, april, ahead, pipeline, areal = gains
    assert synchronous == 1.0
    assert 1.0 < ahead < april < pipeline <= areal * 1.1
