"""An engine with 8-bit weights, and a trainer that computes with the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lagzero.config import LoraConfig, OptimizerConfig, TrainConfig
from lagzero.errors import LagzeroError
from lagzero.numerics.quantise import Kind, QuantisedLinear, rounded
from lagzero.prepare.pack import pack
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy, frozen_copy
from lagzero.train.quantised import compute_with_rounded, quantisable, quantised_copy
from lagzero.train.step import LocalTrainer
from lagzero.train.traffic import Comparison, Traffic, compare, play
from lagzero.types import Batch, Sample

Make = Callable[..., Policy]
TRAFFIC = Traffic(num_tokens=200, longest_prompt=20, longest_response=12, weight_change=0.0)


def sampled_by(serving: Policy, trainer: Policy) -> Comparison:
    """Let one policy sample and the other one score what it sampled."""
    return compare(trainer, play(serving, TRAFFIC), TRAFFIC)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}])
def test_with_rounded_weights_the_trainer_is_the_engines_policy(
    kind: Kind, changes: dict[str, Any], make_policy: Make
):
    """The gap falls to that of float32 sums in another order; without, it is 8-bit rounding's."""
    policy = make_policy("llama", **changes)
    serving = quantised_copy(policy, kind, None)
    apart = sampled_by(serving, policy)
    compute_with_rounded(policy, kind)
    together = sampled_by(serving, policy)
    assert apart.gap_mean > 1e-3
    assert together.gap_max < 1e-4
    assert together.kl_k3 < 1e-9


def test_only_linear_layers_are_stored_in_8_bits(make_policy: Make):
    """The head, here tied to no embedding, stays; so do embeddings and norms."""
    policy = make_policy("qwen3")
    serving = quantised_copy(policy, "int8", torch.bfloat16)
    types = {name: p.dtype for name, p in serving.weights().items()}
    small = {name for name, dtype in types.items() if dtype == torch.int8}
    assert small == {f"{name}.weight" for name in quantisable(policy)}
    assert len(small) == 3 * 7
    assert all("layers." in name for name in small)
    scales = {name for name in types if name.endswith(".scale")}
    assert {types.pop(name) for name in scales} == {torch.float32}
    assert {types[name] for name in types.keys() - small} == {torch.bfloat16}
    assert serving.dtype == torch.bfloat16
    assert {p.dtype for p in policy.weights().values()} == {torch.float32}


def test_the_copy_shares_no_memory_with_the_policy(make_policy: Make):
    policy = make_policy("llama")
    serving = quantised_copy(policy, "int8", None)
    theirs = {p.data_ptr() for p in serving.weights().values()}
    assert theirs.isdisjoint(p.data_ptr() for p in policy.weights().values())
    assert not any(isinstance(m, QuantisedLinear) for m in policy.module.modules())


@pytest.mark.parametrize("rounds", [True, False])
def test_adapters_stay_as_they_are_on_an_8_bit_base(rounds: bool, make_policy: Make):
    """The base alone is rounded, in the engine and, if asked for, in the trainer."""
    policy = add_lora(make_policy("llama"), LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    serving = quantised_copy(policy, "int8", None)
    quantised = [n for n, m in serving.module.named_modules() if isinstance(m, QuantisedLinear)]
    assert quantised
    assert all(name.endswith("base_layer") for name in quantised)
    if rounds:
        compute_with_rounded(policy, "int8")
    found = sampled_by(serving, policy)
    assert (found.gap_max < 1e-4) is rounds


def test_a_model_without_linear_layers_is_refused(make_policy: Make):
    with pytest.raises(LagzeroError, match="GPT2LMHeadModel has no torch.nn.Linear besides"):
        quantised_copy(make_policy("gpt2"), "int8", None)


def step(policy: Policy, samples: list[Sample], loss: Any) -> dict[str, torch.Tensor]:
    """Take one step; return how far each weight moved."""
    before = {name: p.clone() for name, p in policy.weights().items()}
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-3))
    rows = pack(samples, 64, True, np.full(len(samples), 1 / len(samples)))
    num = sum(int(s.tokens["trained"].sum()) for s in samples)
    LocalTrainer(policy, loss, train).step(Batch(rows, len(samples), num))
    return {name: p - before[name] for name, p in policy.weights().items()}


def test_every_weight_learns_by_less_than_its_rounding(
    make_policy: Make, make_samples: Any, policy_gradient: Any
):
    """The trained weights are the unrounded ones, so small updates add up."""
    policy = make_policy("llama")
    compute_with_rounded(policy, "int8")
    moved = step(policy, make_samples(groups=1, members=2), policy_gradient)
    for name in quantisable(policy):
        weight = policy.weights()[f"{name}.weight"]
        assert moved[f"{name}.weight"].abs().mean() > 1e-4
        assert not torch.equal(weight, rounded(weight, "int8"))


def test_a_reference_copied_from_it_rounds_its_own_weights(make_policy: Make):
    """It is the policy as it started, rounding included, whatever the policy becomes."""
    policy = make_policy("llama")
    serving = quantised_copy(policy, "int8", None)
    compute_with_rounded(policy, "int8")
    with frozen_copy(policy)() as reference:
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.mul_(1.5)
        assert sampled_by(serving, reference).gap_max < 1e-4
