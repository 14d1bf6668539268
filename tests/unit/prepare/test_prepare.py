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
    with pytest.raises(ValueError, match="one log-prob for every token"):
        prepare(made, [scored(0, [1.0, 0.0], [2, 2])])


def test_two_groups_with_one_index_are_refused() -> None:
    with pytest.raises(ValueError, match="same index"):
        prepare(preparer(), [scored(0, [1.0, 0.0], [2, 2])] * 2)
