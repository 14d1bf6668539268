"""Which rollouts are trained, and the fate of each of the others."""

from dataclasses import replace

import numpy as np
import pytest

from lagzero.config import AdvantageConfig
from lagzero.prepare.keep import Fate, has_spread, select, usable_rewards
from lagzero.prepare.measure import selection_metrics
from lagzero.types import (
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Score,
    ScoredGroup,
    given_tokens,
    sampled_tokens,
)

INFRA = Score(Outcome.INFRASTRUCTURE, None, reason="sandbox was late")
NO_SCORE = Score(Outcome.UNSCORABLE, None, reason="no gold answer")


def scored(values: list[float | Score], lengths: list[int] | None = None) -> ScoredGroup:
    scores = tuple(v if isinstance(v, Score) else Score(Outcome.SCORED, v) for v in values)
    rollouts = tuple(
        Rollout(m, sampled_tokens([1] * n, [-0.5] * n, [0] * n), "", Finish.STOP)
        for m, n in enumerate(lengths or [2] * len(values))
    )
    return ScoredGroup(Group(0, Prompt("p", (1, 2), "p"), rollouts), scores)


def chosen(group: ScoredGroup, group_size: int | None = None, **config):
    settings = AdvantageConfig(**{"normalize_std": False, **config})
    return select(group, usable_rewards(group), settings, group_size)


def test_failed_members_are_left_out_and_told_apart() -> None:
    """LN5: the counters name the reason, and the others keep their statistics."""
    got = chosen(scored([1.0, 0.0, NO_SCORE, INFRA, 1.0]))
    assert [f.value for f in got.fates] == [
        "trained",
        "trained",
        "unscorable",
        "infrastructure",
        "trained",
    ]
    np.testing.assert_allclose(got.advantages, [1 / 3, -2 / 3, 0, 0, 1 / 3], atol=1e-15)
    counts = selection_metrics([got])
    assert counts["rollouts/unscorable/count"] == 1
    assert counts["rollouts/infrastructure/count"] == 1
    assert counts["rollouts/trained/count"] == 3
    assert counts["groups/short/count"] == 1


def test_empty_rollouts_are_left_out_of_statistics_too() -> None:
    """RF6: lengths 0, 1 and 5; the one-token rollout is trained, the empty one is not."""
    got = chosen(scored([9.0, 1.0, 0.0], lengths=[0, 1, 5]))
    assert got.fates == (Fate.EMPTY, Fate.TRAINED, Fate.TRAINED)
    np.testing.assert_allclose(got.advantages, [0.0, 0.5, -0.5], atol=1e-15)


def test_a_rollout_of_given_tokens_only_counts_as_empty() -> None:
    group = scored([1.0, 0.0])
    tool_only = Rollout(0, given_tokens([4, 5]), "", Finish.ABORT)
    rollouts = (tool_only, group.group.rollouts[1])
    group = ScoredGroup(Group(0, group.group.prompt, rollouts), group.scores)
    assert chosen(group, zero_spread="keep").fates == (Fate.EMPTY, Fate.TRAINED)


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_short_groups_follow_the_chosen_policy(policy) -> None:
    """LN10: P keeps mean .5; Q, which lost a member, uses its own three or is dropped."""
    p = chosen(scored([1.0, 1.0, 0.0, 0.0]), group_size=4, short_group=policy)
    q = chosen(scored([1.0, 0.0, 0.0]), group_size=4, short_group=policy)
    np.testing.assert_allclose(p.advantages, [0.5, 0.5, -0.5, -0.5], atol=1e-15)
    assert not p.short and q.short
    if policy == "keep":
        np.testing.assert_allclose(q.advantages, [2 / 3, -1 / 3, -1 / 3], atol=1e-15)
        assert set(q.fates) == {Fate.TRAINED}
    else:
        assert set(q.fates) == {Fate.SHORT_GROUP}
    assert selection_metrics([p, q])["groups/short/count"] == 1


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_groups_without_spread_follow_the_chosen_policy(policy) -> None:
    got = chosen(scored([0.7, 0.7, 0.7]), zero_spread=policy)
    assert got.zero_spread and not got.advantages.any()
    expected = Fate.TRAINED if policy == "keep" else Fate.ZERO_SPREAD
    assert set(got.fates) == {expected}


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_a_lone_member_is_counted_apart_from_equal_rewards(policy) -> None:
    """LN5: a group with one scored member has advantage 0 and a name of its own."""
    got = chosen(scored([NO_SCORE, 1.0, NO_SCORE]), zero_spread=policy)
    assert got.lone and not got.zero_spread and not got.advantages.any()
    assert got.fates[1] is (Fate.TRAINED if policy == "keep" else Fate.LONE)
    assert selection_metrics([got])["groups/lone/count"] == 1


def test_without_a_baseline_equal_rewards_are_still_trained() -> None:
    got = chosen(scored([2.0, 2.0]), estimator="none", zero_spread="drop")
    assert set(got.fates) == {Fate.TRAINED}
    assert got.advantages.tolist() == [2.0, 2.0]
    lone = chosen(scored([2.0]), estimator="none", zero_spread="drop")
    assert lone.fates == (Fate.TRAINED,) and lone.advantages.tolist() == [2.0]


def test_every_rollout_has_exactly_one_counted_fate() -> None:
    groups = [
        scored([1.0, 0.0, NO_SCORE]),
        scored([1.0, 1.0]),
        scored([INFRA, 1.0]),
        scored([1.0, 0.0], lengths=[0, 0]),
    ]
    selections = [chosen(g) for g in groups]
    counts = selection_metrics(selections)
    fates = [counts[f"rollouts/{fate.value}/count"] for fate in Fate]
    assert sum(fates) == 9
    assert counts["rollouts/empty/count"] == 2
    assert counts["rollouts/zero_spread/count"] == 2
    assert counts["rollouts/lone/count"] == 1


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([0.5, NO_SCORE, 0.5], False),
        ([1.0, NO_SCORE], True),  # handed over, where the failure is counted
        ([NO_SCORE, INFRA], True),
    ],
)
def test_dynamic_sampling_replaces_groups_whose_usable_rewards_are_equal(values, spread) -> None:
    assert has_spread(scored(values)) == spread


def test_a_group_that_resampling_let_through_is_dropped() -> None:
    got = chosen(scored([1.0, 1.0]), zero_spread="resample")
    assert got.fates == (Fate.ZERO_SPREAD, Fate.ZERO_SPREAD)
    assert chosen(scored([1.0, INFRA]), zero_spread="resample").fates[0] is Fate.LONE


CUT = (Finish.STOP, Finish.LENGTH, Finish.CONTEXT, Finish.ABORT)


def ended(values: list[float | Score], finishes=CUT) -> ScoredGroup:
    group = scored(values)
    rollouts = tuple(
        replace(rollout, finish=finish)
        for rollout, finish in zip(group.group.rollouts, finishes, strict=True)
    )
    return ScoredGroup(replace(group.group, rollouts=rollouts), group.scores)


def test_truncated_rollouts_count_in_the_baseline_and_are_not_trained() -> None:
    """Mean 0.5 over all four; without the two that a limit cut off it would be 0.5 of others."""
    got = chosen(ended([1.0, 1.0, 0.0, 0.0]), truncated="mask")
    names = [fate.value for fate in got.fates]
    assert names == ["trained", "truncated", "truncated", "trained"]
    assert got.advantages.tolist() == [0.5, 0.0, 0.0, -0.5]
    assert selection_metrics([got])["rollouts/truncated/count"] == 2
    kept = chosen(ended([1.0, 1.0, 0.0, 0.0]))
    assert kept.fates == (Fate.TRAINED,) * 4
    assert kept.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_the_baseline_of_the_untruncated_is_that_of_all() -> None:
    """Rewards 1, 0, 0, 1: the mean of all is 0.5, and leave-one-out sees the truncated as well."""
    got = chosen(ended([1.0, 0.0, 0.0, 1.0]), truncated="mask", estimator="leave_one_out")
    np.testing.assert_allclose(got.advantages, [2 / 3, 0, 0, 2 / 3], atol=1e-15)
    assert not got.short


def test_a_group_whose_members_are_all_truncated_trains_nobody() -> None:
    every = ended([1.0, 0.0, 1.0, 0.0], (Finish.LENGTH,) * 4)
    got = chosen(every, truncated="mask")
    assert got.fates == (Fate.TRUNCATED,) * 4
    assert not got.advantages.any()


def paired(group: ScoredGroup, **config):
    settings = AdvantageConfig(**config)
    return select(group, usable_rewards(group), settings, pairs=True)


def test_the_first_best_and_the_first_worst_make_a_pair() -> None:
    got = paired(scored([0.0, 2.0, NO_SCORE, 2.0, -1.0, -1.0]))
    names = [fate.value for fate in got.fates]
    assert names == ["unpaired", "trained", "unscorable", "unpaired", "trained", "unpaired"]
    assert got.advantages.tolist() == [0, 1, 0, 0, -1, 0]


@pytest.mark.parametrize("zero_spread", ["keep", "drop", "resample"])
def test_without_two_different_rewards_there_is_no_pair(zero_spread) -> None:
    flat = paired(scored([1.0, 1.0]), zero_spread=zero_spread)
    assert flat.fates == (Fate.ZERO_SPREAD,) * 2 and flat.zero_spread
    lone = paired(scored([1.0, INFRA]), zero_spread=zero_spread)
    assert lone.fates == (Fate.LONE, Fate.INFRASTRUCTURE) and lone.lone


def test_a_masked_rollout_is_in_no_pair() -> None:
    """The best and the worst were cut off: the pair is made of the others, or there is none."""
    got = paired(ended([1.0, 9.0, -9.0, 0.0]), truncated="mask")
    assert got.advantages.tolist() == [1, 0, 0, -1]
    flat = paired(ended([1.0, 9.0, -9.0, 1.0]), truncated="mask")
    assert [fate.value for fate in flat.fates] == [
        "zero_spread",
        "truncated",
        "truncated",
        "zero_spread",
    ]


def test_a_critic_needs_nobody_to_compare_with() -> None:
    got = chosen(scored([1.0, INFRA]), estimator="gae")
    assert got.fates[0] is Fate.TRAINED and not got.lone
    assert got.advantages.tolist() == [0.0, 0.0]
