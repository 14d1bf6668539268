"""Scored groups in, one batch out."""

import asyncio
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from lagzero.config import AdvantageConfig, KLConfig, LossConfig, TrainConfig
from lagzero.prepare.penalty import sequence_kl
from lagzero.prepare.prepare import GroupPreparer
from lagzero.types import (
    Batch,
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Sample,
    Score,
    ScoredGroup,
    sampled_tokens,
)

FAILED = Score(Outcome.INFRASTRUCTURE, None)


def scored(index: int, values: Sequence[float | None], lengths: Sequence[int]) -> ScoredGroup:
    """Member m of group i writes tokens 100 * i + 10 * m + position, which marks them."""
    rollouts = tuple(
        Rollout(
            m,
            sampled_tokens([100 * index + 10 * m + t for t in range(n)], [-1.0] * n, [index] * n),
            "",
            Finish.STOP if n < 5 else Finish.LENGTH,
        )
        for m, n in enumerate(lengths)
    )
    scores = tuple(FAILED if v is None else Score(Outcome.SCORED, v, {"x": v}) for v in values)
    return ScoredGroup(Group(index, Prompt(f"p{index}", (1, 2, index), "p"), rollouts), scores)


def preparer(advantage=None, loss=None, train=None, **rest) -> GroupPreparer:
    return GroupPreparer(
        AdvantageConfig(**{"normalize_std": False, **(advantage or {})}),
        LossConfig(**(loss or {})),
        TrainConfig(**(train or {})),
        **rest,
    )


def prepare(made: GroupPreparer, groups: Sequence[ScoredGroup]) -> Batch:
    return asyncio.run(made.prepare(groups))


def finite(batch: Batch) -> bool:
    return all(math.isfinite(v) for v in batch.metrics.values())


@pytest.mark.parametrize("budget", [1, 9, 1000])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rewards_stay_with_their_rows_under_filtering_and_packing(budget, share, order) -> None:
    """LP13: prompts 1 and 3 survive; a token's advantage is its own member's."""
    groups = [
        scored(1, [10.0, 11.0], [2, 5]),
        scored(2, [20.0, 20.0], [3, 3]),
        scored(3, [30.0, 31.0], [4, 1]),
    ]
    made = preparer(
        advantage={"estimator": "group_mean"},
        train={"micro_batch_tokens": budget, "share_prompt": share},
    )
    batch = prepare(made, [groups[i] for i in order])
    assert (batch.num_sequences, batch.num_trained_tokens) == (4, 12)
    seen: dict[int, float] = {}
    for row in batch.micro_batches:
        for target, advantage, sequence in zip(
            row.targets, row.advantages, row.sequences, strict=True
        ):
            group, member = int(target) // 100, int(target) // 10 % 10
            assert advantage == (0.5 if member == 1 else -0.5)
            assert sequence == {1: 0, 3: 2}[group] + member
            seen[int(target)] = float(advantage)
    assert len(seen) == 12
    assert batch.metrics["rollouts/zero_spread/count"] == 2


def test_short_groups_keep_their_own_baseline() -> None:
    """LN10: Q lost a member; its mean is 1/3 over three, and P's is untouched."""
    p = scored(1, [1.0, 1.0, 0.0, 0.0], [1, 1, 1, 1])
    q = scored(2, [1.0, 0.0, 0.0], [1, 1, 1])
    batch = prepare(preparer(group_size=4), [p, q])
    (row,) = batch.micro_batches
    by_target = dict(zip(row.targets.tolist(), row.advantages.tolist(), strict=True))
    assert by_target[100] == 0.5 and by_target[120] == -0.5
    assert by_target[200] == pytest.approx(2 / 3, abs=1e-7)  # float32
    assert by_target[210] == pytest.approx(-1 / 3, abs=1e-7)
    assert batch.metrics["groups/short/count"] == 1


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [scored(0, [1.0, 1.0], [2, 2])],
        [scored(0, [None, None], [2, 2])],
        [scored(0, [1.0, 0.0], [0, 0])],
        [scored(0, [], [])],
    ],
)
@pytest.mark.parametrize("where", ["loss", "reward", None])
def test_a_step_with_nothing_to_train_is_an_empty_batch(groups, where) -> None:
    """RF6, RF4: no rows, no NaN, and the counters say why."""

    async def reference(samples: Sequence[Sample]) -> list[np.ndarray]:
        return [s.tokens["logprob"] for s in samples]

    kl = KLConfig(coefficient=0.1, where=where) if where else KLConfig()
    batch = prepare(preparer(loss={"kl": kl}, reference_logprobs=reference), groups)
    assert (batch.micro_batches, batch.num_sequences, batch.num_trained_tokens) == ((), 0, 0)
    assert finite(batch)
    rollouts = sum(len(g.scores) for g in groups)
    assert batch.metrics["rollouts/count"] == rollouts
    assert batch.metrics["rollouts/trained/count"] == 0


def test_lengths_zero_one_and_five_pass() -> None:
    """RF6: the empty one is counted and left out; the end-of-text-only one is trained."""
    batch = prepare(preparer(), [scored(0, [5.0, 1.0, 0.0], [0, 1, 5])])
    assert (batch.num_sequences, batch.num_trained_tokens) == (2, 6)
    assert batch.metrics["rollouts/empty/count"] == 1
    weights = np.concatenate([r.weights for r in batch.micro_batches])
    np.testing.assert_allclose(weights, 1 / 6, atol=1e-16)


def test_metrics_by_hand() -> None:
    groups = [scored(1, [1.0, 0.0, None], [2, 5, 3]), scored(2, [1.0, 1.0], [3, 3])]
    got = prepare(preparer(advantage={"zero_spread": "keep"}), groups).metrics
    expected = {
        "rollouts/count": 5,
        "rollouts/infrastructure/count": 1,
        "rollouts/trained/count": 4,
        "groups/count": 2,
        "groups/zero_spread/count": 1,
        "groups/mixed_share": 0.5,
        "reward/mean": 0.75,
        "reward/std": math.sqrt(3) / 4,
        "reward/max": 1,
        "reward/positive_share": 0.75,
        "reward/part/x/mean": 0.75,
        "length/mean": 3.2,
        "length/max": 5,
        "finish/stop/share": 0.8,
        "finish/length/share": 0.2,
        "finish/abort/share": 0,
        "advantage/zero_share": 0.5,
        "advantage/abs_max": 0.5,
        "version/min": 1,
        "version/max": 2,
        "pack/rows/count": 1,
        # prompt 3 once a group, and each response less its last token: 3 + 1 + 4, 3 + 2 + 2
        "pack/tokens/count": 15,
        "pack/saved_share": 1 - 15 / 25,
        "tokens/trained/count": 13,
    }
    assert {k: got[k] for k in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)],
)
def test_sequence_kl_by_hand(estimator, expected: float) -> None:
    """LN11: behaviour -1.0, reference -1.5."""
    one = sequence_kl(np.array([-1.0]), np.array([-1.5]), estimator)
    assert one == pytest.approx(expected, abs=1e-15)
    three = sequence_kl(np.full(3, -1.0), np.full(3, -1.5), estimator)
    assert three == pytest.approx(3 * expected, abs=1e-14)


def test_sequence_kl_stays_finite_and_refuses_what_is_not() -> None:
    assert math.isfinite(sequence_kl(np.array([-700.0]), np.array([0.0]), "k3"))
    with pytest.raises(ValueError, match="not finite"):
        sequence_kl(np.array([-1.0]), np.array([np.nan]), "k3")
    with pytest.raises(ValueError, match="2 behaviour"):
        sequence_kl(np.zeros(2), np.zeros(1), "k1")


def test_kl_in_the_reward_is_subtracted_before_the_baseline() -> None:
    """LN11: equal task rewards, but member 1 strayed: it gets the lower advantage."""

    async def reference(samples: Sequence[Sample]) -> list[np.ndarray]:
        shift = {0: 0.0, 1: 0.5}
        return [np.full(len(s.tokens), -1.0 - shift[s.member]) for s in samples]

    made = preparer(
        loss={"kl": KLConfig(coefficient=0.1, estimator="k1", where="reward")},
        reference_logprobs=reference,
    )
    batch = prepare(made, [scored(0, [1.0, 1.0, None], [4, 4, 4])])
    (row,) = batch.micro_batches
    # KL of member 1 is 4 * 0.5 = 2, its reward 1 - 0.2; the baseline is 0.9
    np.testing.assert_allclose(row.advantages, [0.1] * 4 + [-0.1] * 4, atol=1e-7)
    assert row.reference_logprobs is None
    assert batch.metrics["reward/kl_per_sequence/mean"] == pytest.approx(1.0)
    assert batch.metrics["reward/kl_per_token/mean"] == pytest.approx(0.25)
    assert batch.metrics["reward/mean"] == 1.0
    assert batch.metrics["reward/penalised/mean"] == pytest.approx(0.9)


def test_kl_in_the_loss_travels_with_its_tokens() -> None:
    async def reference(samples: Sequence[Sample]) -> list[np.ndarray]:
        return [-s.tokens["id"] / 1000.0 for s in samples]

    made = preparer(
        loss={"kl": KLConfig(coefficient=0.1)},
        train={"micro_batch_tokens": 6},
        reference_logprobs=reference,
    )
    batch = prepare(made, [scored(1, [1.0, 0.0], [2, 4]), scored(2, [0.0, 1.0], [3, 1])])
    for row in batch.micro_batches:
        np.testing.assert_allclose(row.reference_logprobs, -row.targets / 1000.0, rtol=1e-6)


def test_a_kl_term_without_a_reference_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a reference policy"):
        preparer(loss={"kl": KLConfig(coefficient=0.1)})


def test_a_reference_of_the_wrong_length_is_refused() -> None:
    async def reference(samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.zeros(1) for _ in samples]

    made = preparer(loss={"kl": KLConfig(coefficient=0.1)}, reference_logprobs=reference)
    with pytest.raises(ValueError, match="reference policy must return one number"):
        prepare(made, [scored(0, [1.0, 0.0], [2, 2])])


def test_two_groups_with_one_index_are_refused() -> None:
    with pytest.raises(ValueError, match="same index"):
        prepare(preparer(), [scored(0, [1.0, 0.0], [2, 2])] * 2)


# --- a critic, penalties of single tokens, standardised advantages --------------------------------


async def half(samples: Sequence[Sample]) -> list[np.ndarray]:
    """A critic that expects 0.5 wherever something is trained."""
    return [np.where(s.tokens["trained"], 0.5, np.nan) for s in samples]


def by_target(batch: Batch, column: str) -> dict[int, float]:
    out: dict[int, float] = {}
    for row in batch.micro_batches:
        out |= dict(zip(row.targets.tolist(), getattr(row, column).tolist(), strict=True))
    return out


GAE = {"estimator": "gae", "gamma": 0.5, "lam": 0.5}


@pytest.mark.parametrize("budget", [1, 1000])
@pytest.mark.parametrize("share", [True, False])
def test_values_returns_and_advantages_of_gae_travel_with_their_tokens(budget, share) -> None:
    """Rewards 1 and 0, two tokens and one. By hand:

    member 0: delta -0.25, 0.5; A 0 - 0.25 + 0.25 * 0.5 = -0.125 and 0.5; member 1: A -0.5
    """
    train = {"micro_batch_tokens": budget, "share_prompt": share}
    made = preparer(advantage=GAE, train=train, values=half)
    batch = prepare(made, [scored(1, [1.0, 0.0], [2, 1])])
    assert by_target(batch, "advantages") == {100: -0.125, 101: 0.5, 110: -0.5}
    assert by_target(batch, "returns") == {100: 0.375, 101: 1.0, 110: 0.0}
    assert by_target(batch, "old_values") == {100: 0.5, 101: 0.5, 110: 0.5}


def test_gae_compares_no_members() -> None:
    """A single rollout, and one whose fellow failed, are trained like any other."""
    made = preparer(advantage={**GAE, "gamma": 1.0, "lam": 1.0}, values=half)
    batch = prepare(made, [scored(1, [1.0], [2]), scored(2, [0.0, None], [1, 1])])
    assert by_target(batch, "advantages") == {100: 0.5, 101: 0.5, 200: -0.5}
    assert batch.metrics["rollouts/lone/count"] == 0


async def quarter_less(samples: Sequence[Sample]) -> list[np.ndarray]:
    """A reference that gives every token 0.25 nats less than what sampled it."""
    return [s.tokens["logprob"] - 0.25 for s in samples]


def test_under_gae_each_token_pays_its_own_kl() -> None:
    """k1 = 0.25 a token, coefficient 2: rewards -0.5, -0.5, 1 - 0.5 of three tokens, lam 0."""
    made = preparer(
        advantage={"estimator": "gae", "lam": 0.0},
        loss={"kl": KLConfig(coefficient=2.0, estimator="k1", where="reward")},
        values=half,
        reference_logprobs=quarter_less,
    )
    batch = prepare(made, [scored(1, [1.0], [3])])
    assert by_target(batch, "advantages") == {100: -0.5, 101: -0.5, 102: 0.0}
    assert batch.micro_batches[0].reference_logprobs is None
    assert batch.metrics["reward/kl_per_sequence/mean"] == 0.75
    assert batch.metrics["reward/kl_per_token/mean"] == 0.25
    assert batch.metrics["reward/penalised/mean"] == -0.5


def test_kl_in_the_advantage_is_each_tokens_own() -> None:
    """Distillation: no reward, no baseline; A = -coefficient * (behaviour - reference)."""

    async def teacher(samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.where(s.tokens["id"] % 2 == 0, -0.5, -3.0) for s in samples]

    made = preparer(
        advantage={"estimator": "none"},
        loss={"kl": KLConfig(coefficient=2.0, estimator="k1", where="advantage")},
        reference_logprobs=teacher,
    )
    batch = prepare(made, [scored(1, [0.0, 0.0], [2, 1])])
    assert by_target(batch, "advantages") == {100: 1.0, 101: -4.0, 110: 1.0}
    assert by_target(batch, "reference_logprobs") == {100: -0.5, 101: -3.0, 110: -0.5}


def test_kl_in_the_advantage_comes_after_the_baseline() -> None:
    made = preparer(
        advantage={"estimator": "leave_one_out"},
        loss={"kl": KLConfig(coefficient=1.0, estimator="k1", where="advantage")},
        reference_logprobs=quarter_less,
    )
    batch = prepare(made, [scored(1, [1.0, 0.0], [2, 1])])
    assert by_target(batch, "advantages") == {100: 0.75, 101: 0.75, 110: -1.25}


@pytest.mark.parametrize("budget", [1, 1000])
def test_the_steps_advantages_are_standardised_over_all_its_tokens(budget) -> None:
    """Rewards 4, 0 and 2 of 1, 2 and 1 tokens: 4, 0, 0, 2, mean 1.5, squares 11, std sqrt(11/3)."""
    made = preparer(
        advantage={"estimator": "none", "normalize_batch": True},
        train={"micro_batch_tokens": budget},
    )
    batch = prepare(made, [scored(1, [4.0, 0.0], [1, 2]), scored(2, [2.0], [1])])
    std = math.sqrt(11 / 3)
    expected = {100: 2.5 / std, 110: -1.5 / std, 111: -1.5 / std, 200: 0.5 / std}
    assert by_target(batch, "advantages") == pytest.approx(expected, rel=1e-6)


def test_gae_and_a_critic_belong_together() -> None:
    with pytest.raises(ValueError, match="gae needs a critic"):
        preparer(advantage={"estimator": "gae"})
    with pytest.raises(ValueError, match="nothing else has one"):
        preparer(values=half)

    async def short(samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.zeros(1) for _ in samples]

    with pytest.raises(ValueError, match="the critic must return one number"):
        prepare(preparer(advantage=GAE, values=short), [scored(1, [1.0], [2])])


# --- pairs ---------------------------------------------------------------------------------------

DPO = {"policy": "dpo", "reduction": "sequence_mean"}


@pytest.mark.parametrize("budget", [1, 9, 1000])
@pytest.mark.parametrize("share", [True, False])
def test_the_best_and_the_worst_of_a_group_share_a_row(budget, share) -> None:
    """Ties go to the first member; a group without spread has no pair, even if they are kept."""
    made = preparer(
        advantage={"zero_spread": "keep"},
        loss=DPO,
        train={"micro_batch_tokens": budget, "share_prompt": share},
        reference_logprobs=quarter_less,
    )
    batch = prepare(
        made,
        [
            scored(1, [0.5, 1.0, 0.0, 1.0], [2, 3, 4, 2]),
            scored(2, [1.0, 1.0, 1.0], [2, 2, 2]),
            scored(3, [-1.0, 2.0], [1, 2]),
        ],
    )
    signs = {110: 1, 111: 1, 112: 1, 120: -1, 121: -1, 122: -1, 123: -1, 300: -1, 310: 1, 311: 1}
    assert by_target(batch, "advantages") == signs
    assert by_target(batch, "reference_logprobs") == dict.fromkeys(signs, -1.25)
    homes = [set(row.groups.tolist()) for row in batch.micro_batches]
    assert sorted(n for home in homes for n in home) == [0, 1]
    assert all(abs(row.advantages.sum()) < len(row.targets) for row in batch.micro_batches)
    # every sequence weighs a quarter, whatever its length
    assert sum(row.weights.sum() for row in batch.micro_batches) == pytest.approx(1.0)
    assert batch.metrics["rollouts/unpaired/count"] == 2
    assert batch.metrics["rollouts/zero_spread/count"] == 3
    assert batch.metrics["rollouts/trained/count"] == 4


def test_pairs_need_a_reference() -> None:
    with pytest.raises(ValueError, match="dpo needs a reference"):
        preparer(loss=DPO)


def test_a_kl_penalty_in_the_reward_decides_who_is_best() -> None:
    """Equal rewards, but the longer rollout strays further: it is the worst."""
    made = preparer(
        loss={**DPO, "kl": KLConfig(coefficient=0.1, estimator="k1", where="reward")},
        reference_logprobs=quarter_less,
    )
    batch = prepare(made, [scored(1, [1.0, 1.0], [4, 2])])
    assert {t: a for t, a in by_target(batch, "advantages").items() if t in (100, 110)} == {
        100: -1.0,
        110: 1.0,
    }
    assert batch.micro_batches[0].reference_logprobs is not None
