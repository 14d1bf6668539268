"""One optimiser step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lagzero.config import LossConfig, OptimizerConfig, TrainConfig
from lagzero.errors import LagzeroError
from lagzero.losses.inputs import LossInputs
from lagzero.losses.objective import make_loss
from lagzero.prepare.pack import pack, unpack
from lagzero.train.model import Policy, frozen_copy
from lagzero.train.step import LocalTrainer
from lagzero.types import Batch, Sample

TRAIN = TrainConfig(optimizer=OptimizerConfig(lr=0.01))


def batch(samples: list[Sample], budget: int = 48) -> Batch:
    num = sum(int(s.tokens["trained"].sum()) for s in samples)
    rows = pack(samples, budget, True, np.full(len(samples), 1 / num))
    return Batch(rows, len(samples), num)


def as_sampled_by(trainer: LocalTrainer, samples: list[Sample]) -> list[Sample]:
    """The same samples with the trainer's own log-probs as the behaviour policy's."""
    rows = pack(samples, 1000, True, np.ones(len(samples)))
    values = unpack([trainer.logprobs(row) for row in rows], rows, samples)
    out: list[Sample] = []
    for sample, value in zip(samples, values, strict=True):
        tokens = sample.tokens.copy()
        tokens["logprob"] = value
        out.append(replace(sample, tokens=tokens))
    return out


def test_an_empty_batch_changes_nothing(make_policy: Callable[..., Policy], policy_gradient: Any):
    trainer = LocalTrainer(make_policy(), policy_gradient, TRAIN, version=4)
    before = {n: t.clone() for n, t in trainer.policy.weights().items()}
    stats = trainer.step(Batch((), 0, 0))
    assert (stats.version, stats.metrics) == (4, {})
    assert all(torch.equal(t, before[n]) for n, t in trainer.policy.weights().items())
    assert trainer.optimizer.num_steps == 0


def test_an_untouched_policy_has_every_ratio_one(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """Behaviour log-probs come from other rows than the step's, so only rounding is left."""
    trainer = LocalTrainer(
        make_policy(), make_loss(LossConfig()), TRAIN, temperature=0.7, version=5
    )
    samples = as_sampled_by(trainer, make_samples(version=5))
    metrics = trainer.step(batch(samples)).metrics
    for name in ("mismatch", "behaviour"):
        assert metrics[f"{name}/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert metrics[f"{name}/ratio_min"] == pytest.approx(1, abs=1e-5)
        assert metrics[f"{name}/kl_k3"] == pytest.approx(0, abs=1e-9)
        assert metrics[f"{name}/gap_max"] < 1e-5


def test_mismatch_counts_only_the_tokens_of_the_current_version(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """Three groups of version 1 are off by up to a nat; one group of version 2 is exact."""
    trainer = LocalTrainer(make_policy(), make_loss(LossConfig()), TRAIN, version=2)
    exact = as_sampled_by(trainer, make_samples(groups=1, version=2))
    stale = [replace(s, group_index=s.group_index + 1) for s in make_samples(seed=3, version=1)]
    metrics = trainer.step(batch([*exact, *stale])).metrics
    assert metrics["mismatch/gap_max"] < 1e-5
    assert metrics["behaviour/gap_max"] > 0.1


def test_a_step_reports_what_it_did(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    trainer = LocalTrainer(make_policy(), policy_gradient, TRAIN)
    given = batch(make_samples(), budget=30)
    stats = trainer.step(given)
    assert stats.version == trainer.version == 1
    m = stats.metrics
    assert m["train/num_micro_batches"] == len(given.micro_batches) > 1
    assert m["train/num_trained_tokens"] == given.num_trained_tokens
    assert m["train/num_tokens"] == sum(len(r.token_ids) for r in given.micro_batches)
    assert m["train/lr"] == 0.01
    assert m["train/grad_norm"] > 0
    assert 0 < m["policy/entropy"] < np.log(61)
    assert min(m["train/forward_s"], m["train/backward_s"], m["train/optimizer_s"]) > 0


def test_steps_raise_the_log_probs_of_what_was_good(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    trainer = LocalTrainer(make_policy(), policy_gradient, TRAIN)
    samples = make_samples()
    advantages = np.concatenate([s.advantages[s.tokens["trained"]] for s in samples])

    def gain() -> float:
        values = as_sampled_by(trainer, samples)
        logprobs = np.concatenate([s.tokens["logprob"][s.tokens["trained"]] for s in values])
        return float((advantages * logprobs).sum())

    before = gain()
    for _ in range(5):
        trainer.step(batch(samples))
    assert gain() > before + 1


def test_log_probs_are_of_the_rollouts_temperature(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """LP1: hotter is flatter. Temperature 0 samples greedily and records at temperature 1."""
    rows = batch(make_samples()).micro_batches
    at = {
        t: LocalTrainer(
            make_policy(),
            None,  # pyright: ignore[reportArgumentType]
            TRAIN,
            temperature=t,
        ).logprobs(rows[0])
        for t in (0.0, 1.0, 1e6)
    }
    assert np.array_equal(at[0.0], at[1.0])
    np.testing.assert_allclose(at[1e6], -np.log(61), atol=1e-4)
    assert np.abs(at[1.0] + np.log(61)).max() > 0.5


def test_a_gradient_that_is_not_finite_leaves_the_trainer_as_it_was(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    def broken(
        logprobs: torch.Tensor, entropies: torch.Tensor | None, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return logprobs * float("nan"), {}

    trainer = LocalTrainer(make_policy(), broken, TRAIN)
    before = {n: t.clone() for n, t in trainer.policy.weights().items()}
    with pytest.raises(LagzeroError, match="optimiser step 1"):
        trainer.step(batch(make_samples()))
    assert trainer.version == 0
    assert all(torch.equal(t, before[n]) for n, t in trainer.policy.weights().items())


def test_the_reference_is_the_frozen_start(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    policy, samples = make_policy(), make_samples()
    trainer = LocalTrainer(policy, policy_gradient, TRAIN, reference=frozen_copy(policy))
    own = [s.tokens["logprob"] for s in as_sampled_by(trainer, samples)]
    before = trainer.reference_logprobs(samples)
    for sample, mine, reference in zip(samples, own, before, strict=True):
        trained = sample.tokens["trained"]
        np.testing.assert_allclose(reference[trained], mine[trained], atol=1e-6)
        assert np.isnan(reference[~trained]).all()
    trainer.step(batch(samples))
    after = trainer.reference_logprobs(samples)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))
    moved = [s.tokens["logprob"] for s in as_sampled_by(trainer, samples)]
    assert max(float(np.nanmax(np.abs(a - b))) for a, b in zip(own, moved, strict=True)) > 0.01


def test_asking_for_a_reference_that_is_not_there_is_an_error(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    trainer = LocalTrainer(make_policy(), policy_gradient, TRAIN)
    with pytest.raises(ValueError, match="no reference"):
        trainer.reference_logprobs(make_samples())


def test_a_step_that_failed_half_way_leaves_no_gradient_behind(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    """The loss fails on the second row; the next step equals that of a fresh trainer."""
    num_calls = 0

    def failing(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise RuntimeError("second row")
        return policy_gradient(*args)

    given = batch(make_samples(), budget=30)
    shaken = LocalTrainer(make_policy(), failing, TRAIN)
    with pytest.raises(RuntimeError, match="second row"):
        shaken.step(given)
    fresh = LocalTrainer(make_policy(), policy_gradient, TRAIN)
    norms = [t.step(given).metrics["train/grad_norm"] for t in (shaken, fresh)]
    assert norms[0] == norms[1]


def moved(make_policy: Callable[..., Policy], given: Batch, loss: LossConfig, **train: Any):
    """(trainer, metrics) of one step with these settings from the same start."""
    settings = TrainConfig(optimizer=OptimizerConfig(lr=0.01), **train)
    trainer = LocalTrainer(make_policy(), make_loss(loss), settings, total_steps=4)
    return trainer, trainer.step(given).metrics


def test_in_a_second_pass_the_clip_acts_and_the_mismatch_stays(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """The ratio is to the first pass's log-probs: 1 in the first pass, moved in the second."""
    start = LocalTrainer(make_policy(), make_loss(LossConfig()), TRAIN)
    given = batch(as_sampled_by(start, make_samples()), budget=30)
    loss = LossConfig(proximal="recomputed", clip_low=0.001, clip_high=0.001)
    trainer, once = moved(make_policy, given, loss)
    assert (once["policy/ratio_min"], once["policy/ratio_max"]) == (1.0, 1.0)
    assert once["policy/clipped_high_share"] == once["policy/clipped_low_share"] == 0
    assert (trainer.version, trainer.optimizer.num_steps, once["train/num_updates"]) == (1, 1, 1)

    trainer, twice = moved(make_policy, given, loss, passes=2)
    assert (trainer.version, trainer.optimizer.num_steps, twice["train/num_updates"]) == (1, 2, 2)
    assert twice["policy/ratio_max"] > 1.05
    assert 0 < twice["policy/clipped_high_share"] <= 0.5  # of both passes' tokens
    assert twice["behaviour/gap_max"] == once["behaviour/gap_max"] < 1e-5
    assert twice["mismatch/kl_k3"] == pytest.approx(once["mismatch/kl_k3"])
    assert twice["train/num_micro_batches"] == 2 * once["train/num_micro_batches"]
    assert twice["train/num_trained_tokens"] == once["train/num_trained_tokens"]


def test_two_passes_are_two_updates_anchored_at_the_first(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """Two passes against mu = prox equal two steps of one pass whose behaviour is recorded, bit
    for bit: the anchor is the same numbers, kept instead of recorded."""
    start = LocalTrainer(make_policy(), make_loss(LossConfig()), TRAIN)
    given = batch(make_samples())
    rows = tuple(
        replace(row, behaviour_logprobs=start.logprobs(row)) for row in given.micro_batches
    )
    given = replace(given, micro_batches=rows)
    both, _ = moved(make_policy, given, LossConfig(proximal="recomputed"), passes=2)
    recorded, _ = moved(make_policy, given, LossConfig())
    recorded.step(given)
    other = recorded.policy.weights()
    assert all(torch.equal(t, other[n]) for n, t in both.policy.weights().items())


def test_the_learning_rate_counts_steps_and_not_updates(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """Linear over 4 steps of 3 updates: 1, 3/4, 1/2, 1/4 of the rate."""
    optimizer = OptimizerConfig(lr=0.01, schedule="linear")
    train = TrainConfig(passes=3, optimizer=optimizer)
    trainer = LocalTrainer(make_policy(), make_loss(LossConfig()), train, total_steps=4)
    given = batch(make_samples())
    rates = [trainer.step(given).metrics["train/lr"] for _ in range(4)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert (trainer.version, trainer.optimizer.num_steps) == (4, 12)


def test_a_run_of_several_passes_resumes_bit_for_bit(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    loss = LossConfig(proximal="recomputed", correction={"kind": "truncate"})
    given = batch(make_samples())
    straight, _ = moved(make_policy, given, loss, passes=2)
    tensors, values = straight.state_dict()
    tensors = {name: t.clone() for name, t in tensors.items()}
    resumed, _ = moved(make_policy, given, loss, passes=2)
    resumed.step(given)  # to be forgotten
    resumed.load_state_dict(tensors, values)
    ends = [trainer.step(given).metrics for trainer in (straight, resumed)]
    timeless = [{k: v for k, v in end.items() if not k.endswith("_s")} for end in ends]
    assert timeless[0] == timeless[1]
    other = resumed.policy.weights()
    assert all(torch.equal(t, other[n]) for n, t in straight.policy.weights().items())


def test_truncation_gives_back_the_gradient_that_a_shifted_sampler_spoilt(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """The sampler's log-probs are off by up to 0.3 nats. REINFORCE weighted by prox / mu has the
    gradient of -(prox / mu) A l: it is that of the unspoilt run with A prox / mu as advantages."""
    start = LocalTrainer(make_policy(), make_loss(LossConfig()), TRAIN)
    exact = as_sampled_by(start, make_samples())
    rng = np.random.default_rng(1)
    shifts = [rng.uniform(-0.3, 0.3, len(s.tokens)).astype(np.float32) for s in exact]
    shifted: list[Sample] = []
    weighted: list[Sample] = []
    for sample, shift in zip(exact, shifts, strict=True):
        tokens = sample.tokens.copy()
        tokens["logprob"] -= shift  # prox / mu = e^shift, 1.35 at most
        shifted.append(replace(sample, tokens=tokens))
        ratio = np.exp(sample.tokens["logprob"] - tokens["logprob"])
        advantages = np.where(tokens["trained"], sample.advantages * ratio, 0.0)
        weighted.append(replace(sample, advantages=advantages))
    corrected = LossConfig(policy="reinforce", correction={"kind": "truncate", "high": 2.0})
    plain = LossConfig(policy="reinforce")
    norms = {
        name: moved(make_policy, batch(samples), loss)[1]["train/grad_norm"]
        for name, samples, loss in (
            ("corrected", shifted, corrected),
            ("wanted", weighted, plain),
            ("spoilt", shifted, plain),
        )
    }
    assert norms["corrected"] == pytest.approx(norms["wanted"], rel=1e-5)
    assert abs(norms["spoilt"] / norms["wanted"] - 1) > 1e-3
    cut = LossConfig(policy="reinforce", correction={"kind": "truncate", "high": 1.1})
    metrics = moved(make_policy, batch(shifted), cut)[1]
    assert 0 < metrics["correction/truncated_share"] < 1
    assert metrics["correction/weight_max"] == pytest.approx(1.1)


@pytest.mark.parametrize(("fails_in", "version"), [(1, 4), (2, 5)])
def test_a_failed_pass_leaves_the_version_of_the_weights_as_they_are(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    fails_in: int,
    version: int,
):
    """A run saves after a failure only where the version says that no step is half done."""
    given = batch(make_samples(), 1000)
    calls: list[int] = []

    def loss(logprobs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        calls.append(1)
        return logprobs * (float("nan") if len(calls) == fails_in else 1.0), {}

    trainer = LocalTrainer(make_policy(), loss, TrainConfig(passes=3), version=4)
    before = {n: t.clone() for n, t in trainer.policy.weights().items()}
    with pytest.raises(LagzeroError, match="norm is nan"):
        trainer.step(given)
    same = all(torch.equal(t, before[n]) for n, t in trainer.policy.weights().items())
    assert (trainer.version, same) == (version, fails_in == 1)
