"""The composed objective: terms, signs, and one step cut in every way."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.config import KLConfig, LossConfig
from lagzero.losses.entropy import entropy
from lagzero.losses.inputs import LossInputs, loss_inputs
from lagzero.losses.objective import make_loss, needs_entropy, step_metrics
from lagzero.losses.reduce import reduce
from lagzero.prepare.pack import pack
from lagzero.prepare.weights import token_weights
from lagzero.types import TOKEN, MicroBatch, Sample


def one_token(reference: float | None = None, advantage: float = 0.0) -> LossInputs:
    return LossInputs(
        torch.tensor([-1.0], dtype=torch.float64),
        None if reference is None else torch.tensor([reference], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.zeros(1),
        torch.zeros(1).long(),
        1,
    )


def test_the_kl_term_is_added_and_has_a_gradient() -> None:
    """LN11: policy -1.0, reference -1.5, k3, coefficient 1: 0.1065 and +0.3935."""
    loss = make_loss(LossConfig(kl=KLConfig(coefficient=1.0, estimator="k3")))
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    value, metrics = loss(logprobs, None, one_token(-1.5))
    value.sum().backward()
    assert value.item() == pytest.approx(0.1065, abs=5e-5)
    assert logprobs.grad.item() == pytest.approx(0.3935, abs=5e-5)
    assert metrics["reference/kl_k3"][0].item() == pytest.approx(0.1065, abs=5e-5)


def test_a_kl_term_of_the_reward_is_not_added_again() -> None:
    loss = make_loss(LossConfig(kl=KLConfig(coefficient=1.0, where="reward")))
    value, _ = loss(torch.tensor([-1.0], dtype=torch.float64), None, one_token(-1.5))
    assert value.item() == 0.0


def test_a_positive_entropy_coefficient_raises_entropy() -> None:
    """LN13: a descent step on the objective goes up in entropy; a negative one down."""
    for coefficient in (0.1, -0.1):
        loss = make_loss(LossConfig(entropy_coefficient=coefficient))
        logits = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
        logprobs = torch.log_softmax(logits, -1)[:, 0]
        value, _ = loss(logprobs, entropy(logits), one_token())
        value.sum().backward()
        assert logits.grad is not None
        after = entropy(logits.detach() - 0.1 * logits.grad) - entropy(logits.detach())
        assert math.copysign(1, after.item()) == math.copysign(1, coefficient)


def test_options_of_the_configuration_reach_the_loss() -> None:
    """LN14: A = -1, ratio 10: 10 by default, 3 with dual_clip 3; clips and ratio act as well."""
    ten = torch.tensor([math.log(10.0) - 1.0], dtype=torch.float64)

    def value(advantage: float, **options) -> float:
        return make_loss(LossConfig(**options))(ten, None, one_token(None, advantage))[0].item()

    assert value(-1.0) == pytest.approx(10.0, abs=1e-12)
    assert value(-1.0, dual_clip=3.0) == pytest.approx(3.0, abs=1e-12)
    assert value(1.0, clip_high=0.28) == pytest.approx(-1.28, abs=1e-12)
    low = torch.tensor([math.log(0.1) - 1.0], dtype=torch.float64)
    got = make_loss(LossConfig(clip_low=0.3))(low, None, one_token(None, -1.0))[0].item()
    assert got == pytest.approx(0.7, abs=1e-12)


def test_a_term_without_its_input_is_refused() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="reference"):
        make_loss(LossConfig(kl=KLConfig(coefficient=0.1)))(logprobs, None, one_token())
    config = LossConfig(entropy_coefficient=0.1)
    assert needs_entropy(config) and not needs_entropy(LossConfig())
    with pytest.raises(ValueError, match="entropies"):
        make_loss(config)(logprobs, None, one_token())
    with pytest.raises(ValueError, match="entropies"):
        make_loss(config)(logprobs, torch.zeros(1, 1), one_token())


def make_step(seed: int) -> tuple[list[Sample], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in range(3):
        prompt = tuple(int(i) for i in rng.integers(0, 16, rng.integers(1, 5)))
        for member in range(int(rng.integers(1, 4))):
            n = int(rng.integers(1, 7))
            tokens = np.zeros(n, TOKEN)
            tokens["id"] = rng.integers(0, 16, n)
            tokens["trained"] = rng.random(n) < 0.8
            tokens["trained"][-1] = True
            tokens["logprob"] = np.where(tokens["trained"], -3 * rng.random(n), np.nan)
            tokens["version"] = np.where(tokens["trained"], rng.integers(0, 5, n), -1)
            advantages = np.where(tokens["trained"], rng.normal(), 0.0)
            samples.append(Sample(group, member, prompt, tokens, advantages, 0.0))
    return samples, [-3 * rng.random(len(s.tokens)) for s in samples]


def toy_logits(row: MicroBatch, table: torch.Tensor) -> torch.Tensor:
    """A causal model [T, V] that sees tokens, their places, and the segment rules, no more."""
    segment = torch.as_tensor(row.segment_ids).long()
    parent = torch.as_tensor(row.parents).long()[segment]
    i = torch.arange(len(segment))
    sees = (segment[:, None] == segment) & (i <= i[:, None]) | (parent[:, None] == segment)
    places = torch.cos(torch.as_tensor(row.position_ids).double())[:, None]
    mixed = sees.double() @ (table[torch.as_tensor(row.token_ids).long()] * (2 + places))
    return torch.tanh(mixed) @ table.T * 2


def step_loss(samples, references, config: LossConfig, budget: int, share: bool):
    lengths = np.array([int(s.tokens["trained"].sum()) for s in samples])
    weights = token_weights(lengths, config.reduction, config.constant)
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(16, 4, dtype=torch.float64, generator=generator).requires_grad_()
    loss, total, parts = make_loss(config), 0.0, []
    for row in pack(samples, budget, share, weights, references):
        at = torch.as_tensor(row.predictors).long()
        logits = toy_logits(row, table)[at]
        every = torch.log_softmax(logits, -1)
        logprobs = every[torch.arange(len(at)), torch.as_tensor(row.targets).long()]
        inputs = loss_inputs(row, len(samples), dtype=torch.float64, version=4)
        per_token, metrics = loss(logprobs, entropy(logits), inputs)
        reduced = reduce(per_token, torch.as_tensor(row.weights))
        reduced.backward()
        total += reduced.item()
        parts.append(metrics)
    return total, table.grad, step_metrics(parts)


LEVELS = st.sampled_from(["token", "sequence_product", "sequence_mean"])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.booleans(),
    st.randoms(),
    st.sampled_from(["clip", "cispo", "band", "reinforce"]),
    st.sampled_from(["behaviour", "recomputed", "interpolated"]),
    LEVELS,
    st.sampled_from(["none", "truncate", "mask"]),
    LEVELS,
    st.sampled_from(["token_mean", "sequence_mean", "constant"]),
)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(
    seed, budget, share, random, policy, proximal, ratio, kind, level, reduction
) -> None:
    """LN1, LN2, LN9: one row against any budget, sample order and prompt sharing (float64)."""
    samples, references = make_step(seed)
    config = LossConfig(
        policy=policy,
        proximal=proximal,
        ratio=ratio,
        correction={"kind": kind, "level": level, "low": 0.3, "max_token_lag": 3},
        reduction=reduction,
        constant=10.0,
        entropy_coefficient=0.01,
        dual_clip=3.0,
        kl=KLConfig(coefficient=0.1),
    )
    base = step_loss(samples, references, config, 10**6, False)
    order = list(range(len(samples)))
    random.shuffle(order)
    got = step_loss(
        [samples[i] for i in order], [references[i] for i in order], config, budget, share
    )
    assert got[0] == pytest.approx(base[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(got[1], base[1], rtol=1e-9, atol=1e-11)
    assert got[2] == pytest.approx(base[2], rel=1e-9, abs=1e-12)


def test_loss_inputs_move_every_column() -> None:
    samples, references = make_step(0)
    (row,) = pack(samples, 10**6, True, np.ones(len(samples)), references)
    inputs = loss_inputs(row, len(samples))
    assert inputs.behaviour_logprobs.tolist() == row.behaviour_logprobs.tolist()
    assert inputs.reference_logprobs is not None
    assert inputs.reference_logprobs.tolist() == row.reference_logprobs.tolist()
    assert inputs.advantages.tolist() == row.advantages.tolist()
    assert inputs.sequences.tolist() == row.sequences.tolist()
    assert inputs.versions.tolist() == row.versions.tolist()
    assert inputs.num_sequences == len(samples)
    assert inputs.groups is not None
    assert inputs.groups.tolist() == row.groups.tolist()
    first = loss_inputs(row, len(samples), version=7)
    assert (first.version, first.proximal_logprobs) == (7, None)
    assert first.lags.tolist() == (7 - row.versions).tolist()
    later = loss_inputs(row, len(samples), proximal_logprobs=inputs.advantages)
    assert later.proximal_logprobs is inputs.advantages


def test_an_anchor_of_the_first_pass_holds_in_the_second() -> None:
    """p = -1 from the first pass, l = -0.5 now: the ratio is e^.5, above the clip."""
    inputs = replace(one_token(advantage=1.0), proximal_logprobs=torch.tensor([-1.0]).double())
    logprobs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    value, metrics = make_loss(LossConfig(proximal="recomputed"))(logprobs, None, inputs)
    value.sum().backward()
    assert (value.item(), logprobs.grad.item()) == (pytest.approx(-1.2), 0.0)
    assert metrics["policy/ratio_max"][0].item() == pytest.approx(math.exp(0.5))
    assert metrics["behaviour/ratio_max"][0].item() == 1.0
