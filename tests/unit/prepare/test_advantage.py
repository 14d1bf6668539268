"""Advantages of one group against values worked out by hand and a slow twin."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.prepare.advantage import (
    SPREAD_FLOOR,
    group_advantages,
    is_zero_spread,
    pair_advantages,
    standardized,
)

NAN = float("nan")


def slow_twin(rewards: list[float], estimator: str, normalize_std: bool) -> list[float]:
    """The definition in plain loops, without any rescaling."""
    scored = [r for r in rewards if not math.isnan(r)]
    largest = max((abs(r) for r in scored), default=0.0)
    flat = len(scored) < 2 or max(scored) - min(scored) <= SPREAD_FLOOR * largest
    out: list[float] = []
    at = 0
    for reward in rewards:
        if math.isnan(reward):
            out.append(0.0)
            continue
        if estimator == "none":
            out.append(reward)
            continue
        if flat:
            out.append(0.0)
            continue
        pool = scored if estimator == "group_mean" else scored[:at] + scored[at + 1 :]
        at += 1
        mean = sum(pool) / len(pool)
        value = reward - mean
        if normalize_std:
            std = 0.0
            if len(pool) > 1:
                std = math.sqrt(sum((p - mean) ** 2 for p in pool) / (len(pool) - 1))
            if std > SPREAD_FLOOR * largest:
                value /= std
            bound = math.sqrt(len(scored))
            value = max(-bound, min(bound, value))
        out.append(value)
    return out


def test_group_mean_is_the_reward_less_the_mean() -> None:
    got = group_advantages(np.array([1.0, 0.0, 0.0, 1.0, 1.0]), "group_mean", False)
    np.testing.assert_allclose(got, [0.4, -0.6, -0.6, 0.4, 0.4], atol=1e-15)


def test_std_has_the_divisor_n_minus_one() -> None:
    got = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), "group_mean", True)
    # mean 1/4, squares sum to 3/4, variance 1/4, std 1/2 (the divisor n would give 0.433)
    np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5], atol=1e-15)


def test_leave_one_out_compares_with_the_others() -> None:
    got = group_advantages(np.array([3.0, 1.0, 2.0]), "leave_one_out", False)
    np.testing.assert_allclose(got, [1.5, -1.5, 0.0], atol=1e-15)


def test_none_is_the_reward_itself() -> None:
    got = group_advantages(np.array([3.0, NAN, -2.0]), "none", False)
    np.testing.assert_array_equal(got, [3.0, 0.0, -2.0])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_lone_odd_reward_is_not_divided_by_rounding_residue(dtype: Any) -> None:
    """LN4: the spread of seven equal rewards is 0, in float32 too, not a residue."""
    got = group_advantages(np.array([0.0] + [0.7] * 7, dtype), "leave_one_out", True)
    assert got[0] == pytest.approx(-float(dtype(0.7)), abs=1e-12)
    # For the others: baseline 0.6, sample std 0.7 / sqrt(7), so 0.1 * sqrt(7) / 0.7.
    np.testing.assert_allclose(got[1:], math.sqrt(7) / 7, rtol=1e-6)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9),
    st.sampled_from(["group_mean", "leave_one_out"]),
)
def test_normalised_advantages_stay_below_the_stated_bound(
    rewards: list[float], estimator: Any
) -> None:
    """LN4: never above sqrt(n)."""
    got = group_advantages(np.array(rewards), estimator, True)
    assert np.abs(got).max() <= math.sqrt(len(rewards)) + 1e-12


def test_nearly_equal_others_are_clipped_at_the_bound() -> None:
    """LN4: a real but tiny spread of the others cannot give an advantage in the thousands."""
    got = group_advantages(np.array([0.0, 0.7, 0.7, 0.7001]), "leave_one_out", True)
    assert got[0] == -2.0


def test_an_unscorable_member_leaves_the_others_alone() -> None:
    """LN5: statistics over the three scored, mean 2/3; nothing becomes NaN."""
    got = group_advantages(np.array([1.0, 0.0, NAN, 1.0]), "group_mean", False)
    np.testing.assert_allclose(got, [1 / 3, -2 / 3, 0.0, 1 / 3], atol=1e-15)
    normalised = group_advantages(np.array([1.0, 0.0, NAN, 1.0]), "group_mean", True)
    std = math.sqrt(1 / 3)  # (1/9 + 4/9 + 1/9) / 2
    np.testing.assert_allclose(normalised, np.array([1 / 3, -2 / 3, 0, 1 / 3]) / std, atol=1e-15)


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[5.0], [NAN, 5.0, NAN], [NAN, NAN], []])
def test_a_singleton_group_is_all_zero(
    rewards: list[float], estimator: Any, normalize_std: bool
) -> None:
    """LN5: with one scored member there is nobody to compare it with."""
    got = group_advantages(np.array(rewards), estimator, normalize_std)
    np.testing.assert_array_equal(got, np.zeros(len(rewards)))


def test_each_group_is_normalised_by_itself() -> None:
    """LN7: 3 groups of 3, where an axis mix-up would go unseen; the flat one is all zeros."""
    groups = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [5.0, 5.0, 5.0]]
    got = [group_advantages(np.array(g), "group_mean", True).tolist() for g in groups]
    assert got == [[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-300, 1e300, 0.0])
def test_equal_rewards_give_exact_zeros(value: float) -> None:
    assert is_zero_spread(np.full(7, value))
    for estimator in ("group_mean", "leave_one_out"):
        assert not group_advantages(np.full(7, value), estimator, True).any()


def test_opposite_huge_rewards_do_not_overflow() -> None:
    got = group_advantages(np.array([1.7e308, -1.7e308]), "group_mean", True)
    np.testing.assert_allclose(got, [math.sqrt(0.5), -math.sqrt(0.5)], rtol=1e-12)


REWARDS = st.lists(
    st.one_of(st.integers(-8, 8).map(lambda i: i / 4), st.just(NAN)), min_size=1, max_size=8
)
CHOICES = st.sampled_from(
    [
        ("group_mean", True),
        ("group_mean", False),
        ("leave_one_out", True),
        ("leave_one_out", False),
        ("none", False),
    ]
)


@given(REWARDS, CHOICES)
def test_equals_the_slow_twin(rewards: list[float], choice: Any) -> None:
    got = group_advantages(np.array(rewards), *choice)
    np.testing.assert_allclose(got, slow_twin(rewards, *choice), atol=1e-12)


@given(REWARDS, CHOICES, st.randoms())
def test_permuting_members_permutes_advantages(
    rewards: list[float], choice: Any, random: Any
) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_advantages(np.array(rewards), *choice)
    shuffled = group_advantages(np.array(rewards)[order], *choice)
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-12)


def test_normalised_group_mean_ignores_scale_and_shift() -> None:
    rewards = np.array([0.0, 1.0, 0.25, 0.5])
    base = group_advantages(rewards, "group_mean", True)
    for other in (rewards * 1e-5, rewards * 1e5, rewards + 3):
        np.testing.assert_allclose(group_advantages(other, "group_mean", True), base, rtol=1e-9)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.array([np.inf, 0.0]), "group_mean", True)
    with pytest.raises(ValueError, match=r"\[G\]"):
        group_advantages(np.zeros((2, 2)), "group_mean", True)
    with pytest.raises(ValueError, match="normalize_std"):
        group_advantages(np.zeros(2), "none", True)


def test_a_pair_is_the_first_best_and_the_first_worst() -> None:
    assert pair_advantages(np.array([NAN, 1.0, 3.0, 3.0, 0.0, 0.0])).tolist() == [0, 0, 1, 0, -1, 0]
    assert not pair_advantages(np.array([1.0, NAN])).any()
    assert not pair_advantages(np.array([2.0, 2.0])).any()
    assert not pair_advantages(np.array([NAN, NAN])).any()


def test_standardised_by_hand() -> None:
    """Mean 2, squares 4 + 0 + 0 + 4, std sqrt(8/3)."""
    got = standardized(np.array([0.0, 2.0, 2.0, 4.0]))
    np.testing.assert_allclose(got, np.array([-2, 0, 0, 2]) / math.sqrt(8 / 3), rtol=1e-15)


@given(
    st.lists(st.integers(-50, 50), min_size=2, max_size=20).filter(lambda a: len(set(a)) > 1),
    st.integers(-3, 3),
    st.sampled_from([1e-300, 0.25, 1.0, 1e300]),
)
def test_standardised_advantages_know_no_offset_and_no_scale(rewards, shift, scale) -> None:
    got = standardized(np.array(rewards, np.float64))
    assert got.mean() == pytest.approx(0, abs=1e-12)
    assert got.std(ddof=1) == pytest.approx(1, rel=1e-12)
    moved = standardized((np.array(rewards, np.float64) + shift) * scale)
    np.testing.assert_allclose(moved, got, rtol=1e-6, atol=1e-9)


def test_advantages_without_spread_are_left_undivided() -> None:
    assert standardized(np.full(4, 0.7)).tolist() == pytest.approx([0.0] * 4, abs=1e-15)
    assert standardized(np.array([3.0])).tolist() == [0.0]
    assert standardized(np.zeros(3)).tolist() == [0.0] * 3
    residue = np.array([0.7, 0.7, np.nextafter(0.7, 1)])
    assert np.abs(standardized(residue)).max() < 1e-15
