"""A critic by itself, and with the policy that learns from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lagzero.config import CriticConfig, LossConfig, OptimizerConfig, TrainConfig
from lagzero.errors import LagzeroError
from lagzero.losses.objective import make_loss
from lagzero.prepare.gae import with_critic
from lagzero.prepare.pack import pack
from lagzero.train.critic import ActorCritic, Critic, load_head
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy
from lagzero.train.step import LocalTrainer
from lagzero.types import Batch, Sample

TRAIN = TrainConfig(optimizer=OptimizerConfig(lr=0.01))
OWN = CriticConfig(optimizer=OptimizerConfig(lr=0.02))
SHARED = CriticConfig(shared=True, coefficient=0.5)

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]


def batch(samples: list[Sample], critic: Critic, budget: int = 48) -> Batch:
    """What preparation makes of the samples, their rewards and the critic's values."""
    judged = [
        with_critic(s, value, np.zeros(len(s.tokens)), 1.0, 0.95)
        for s, value in zip(samples, critic.values(samples), strict=True)
    ]
    num = sum(int(s.tokens["trained"].sum()) for s in judged)
    rows = pack(judged, budget, True, np.full(len(judged), 1 / num))
    return Batch(rows, len(judged), num)


def graded(samples: list[Sample]) -> list[Sample]:
    """Rewards that a critic can tell from the prompt, and a little luck that it cannot."""
    return [replace(s, reward=s.group_index % 2 + 0.1 * s.member) for s in samples]


def make(
    policy: Policy, config: CriticConfig, make_policy: MakePolicy, train: TrainConfig = TRAIN
) -> tuple[ActorCritic, LocalTrainer]:
    trunk = policy if config.shared else make_policy()
    critic = Critic(trunk, config, train, total_steps=8)
    trainer = LocalTrainer(
        policy,
        make_loss(LossConfig()),
        train,
        total_steps=8,
        auxiliary=critic if config.shared else None,
    )
    return ActorCritic(trainer, critic, config.warmup_steps), trainer


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in policy.weights().items()}


def same(policy: Policy, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, before[n]) for n, t in policy.weights().items())


@pytest.mark.parametrize("config", [OWN, SHARED])
def test_a_new_critic_expects_nothing(
    make_policy: MakePolicy, make_samples: MakeSamples, config: CriticConfig
):
    """So the first step's advantages are the rewards'; untrained tokens have no value at all."""
    samples = graded(make_samples())
    critic = Critic(make_policy(), config, TRAIN)
    for sample, value in zip(samples, critic.values(samples), strict=True):
        trained = sample.tokens["trained"]
        assert (value[trained] == 0).all() and np.isnan(value[~trained]).all()


def test_a_value_is_a_linear_function_of_what_stood_before_the_token(
    make_policy: MakePolicy, make_samples: MakeSamples
):
    """Against the model run on each sequence by itself; budgets and sharing change nothing."""
    policy = make_policy()
    samples = make_samples()
    for budget, share in ((48, True), (1000, True), (30, False)):
        critic = Critic(policy, OWN, TrainConfig(micro_batch_tokens=budget, share_prompt=share))
        with torch.no_grad():
            critic.head.weight.copy_(torch.linspace(-1, 1, 32).unsqueeze(0))
            critic.head.bias.fill_(0.25)
        for sample, value in zip(samples, critic.values(samples), strict=True):
            ids = [*sample.prompt_ids, *sample.tokens["id"].tolist()]
            with torch.no_grad():
                policy.module.set_attn_implementation("sdpa")
                hidden = policy.module.model(torch.tensor([ids])).last_hidden_state[0]
                policy.module.set_attn_implementation("lagzero")
                expected = (critic.head(hidden).squeeze(-1)).numpy()
            places = len(sample.prompt_ids) - 1 + np.arange(len(sample.tokens))
            trained = sample.tokens["trained"]
            np.testing.assert_allclose(value[trained], expected[places][trained], atol=2e-5)


@pytest.mark.parametrize("config", [OWN, SHARED])
def test_a_critic_learns_to_expect_the_rewards(
    make_policy: MakePolicy, make_samples: MakeSamples, config: CriticConfig
):
    actor, _ = make(make_policy(), config, make_policy)
    samples = graded(make_samples(groups=4, members=2))
    first = actor.step(batch(samples, actor.critic)).metrics
    assert first["value/mean"] == 0
    assert "value/explained_variance" in first
    for _ in range(8):
        last = actor.step(batch(samples, actor.critic)).metrics
    assert last["value/loss"] < 0.5 * first["value/loss"]
    assert last["value/explained_variance"] > 0.4


@pytest.mark.parametrize("config", [OWN, SHARED])
def test_the_cut_into_rows_changes_the_critics_step_by_rounding_only(
    make_policy: MakePolicy, make_samples: MakeSamples, config: CriticConfig
):
    samples = graded(make_samples())
    seen: list[tuple[float, float, float]] = []
    for budget in (30, 1000):
        actor, _ = make(make_policy(), config, make_policy)
        with torch.no_grad():
            actor.critic.head.weight.fill_(0.01)
        given = batch(samples, actor.critic, budget)
        assert (len(given.micro_batches) > 1) == (budget == 30)
        metrics = actor.step(given).metrics
        moved = float(actor.critic.head.weight.detach().sum())
        seen.append((metrics["value/loss"], metrics["value/explained_variance"], moved))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)


def test_the_policy_of_a_separate_critic_steps_as_if_there_were_none(
    make_policy: MakePolicy, make_samples: MakeSamples
):
    actor, trainer = make(make_policy(), OWN, make_policy)
    given = batch(graded(make_samples()), actor.critic)
    alone = LocalTrainer(make_policy(), make_loss(LossConfig()), TRAIN, total_steps=8)
    ours, theirs = actor.step(given), alone.step(given)
    assert ours.version == theirs.version == actor.version == 1
    assert same(trainer.policy, weights(alone.policy))
    assert ours.metrics["train/loss"] == theirs.metrics["train/loss"]


def test_a_shared_trunk_feels_both_losses(make_policy: MakePolicy, make_samples: MakeSamples):
    """The step's loss is the policy's plus coefficient times the critic's."""
    actor, trainer = make(make_policy(), SHARED, make_policy)
    samples = graded(make_samples())
    actor.step(batch(samples, actor.critic))  # now the head is not 0 any more
    given = batch(samples, actor.critic)
    alone = LocalTrainer(make_policy(), make_loss(LossConfig()), TRAIN, total_steps=8)
    alone.optimizer.load_state_dict(trainer.state_dict()[0])
    ours, theirs = actor.step(given).metrics, alone.step(given).metrics
    assert ours["train/loss"] == pytest.approx(
        theirs["train/loss"] + 0.5 * ours["value/loss"], rel=1e-5
    )
    assert not same(trainer.policy, weights(alone.policy))
    assert not any(name.startswith("head") for name in trainer.policy.weights())


@pytest.mark.parametrize("config", [OWN, SHARED])
def test_only_the_critic_learns_while_it_warms_up(
    make_policy: MakePolicy, make_samples: MakeSamples, config: CriticConfig
):
    config = config.model_copy(update={"warmup_steps": 2})
    actor, trainer = make(make_policy(), config, make_policy)
    samples = graded(make_samples())
    before = weights(trainer.policy)
    for version in (1, 2):
        stats = actor.step(batch(samples, actor.critic))
        assert stats.version == actor.version == version
        assert "policy/loss" not in stats.metrics and stats.metrics["train/loss"] > 0
        assert same(trainer.policy, before)
    assert np.nanmax(np.abs(np.concatenate(actor.critic.values(samples)))) > 0
    assert "policy/loss" in actor.step(batch(samples, actor.critic)).metrics
    assert not same(trainer.policy, before)
    assert trainer.optimizer.num_steps == 1


@pytest.mark.parametrize("config", [OWN, SHARED])
@pytest.mark.parametrize("warmup", [0, 2])
def test_a_resumed_pair_takes_the_same_steps(
    make_policy: MakePolicy, make_samples: MakeSamples, config: CriticConfig, warmup: int
):
    """Bit for bit, moments of the head included, also out of the middle of the warm-up."""
    train = TRAIN.model_copy(update={"passes": 2})
    config = config.model_copy(update={"warmup_steps": warmup})
    steps = [graded(make_samples(seed=seed)) for seed in range(4)]
    whole, trainer = make(make_policy(), config, make_policy, train)
    for samples in steps[:1]:
        whole.step(batch(samples, whole.critic))
    tensors, values = whole.state_dict()
    saved = {name: t.clone() for name, t in tensors.items()}
    resumed, other = make(make_policy(), config, make_policy, train)
    resumed.load_state_dict(saved, values)
    for samples in steps[1:]:
        ours = whole.step(batch(samples, whole.critic))
        theirs = resumed.step(batch(samples, resumed.critic))
        assert ours.version == theirs.version
        for name in ("value/loss", "value/mean", "value/clipped_share", "train/loss"):
            assert ours.metrics[name] == theirs.metrics[name]
    assert same(trainer.policy, weights(other.policy))
    mine, yours = whole.state_dict()[0], resumed.state_dict()[0]
    assert mine.keys() == yours.keys()
    assert all(torch.equal(t, yours[name]) for name, t in mine.items())


def test_a_state_without_a_critic_is_refused(make_policy: MakePolicy, make_samples: MakeSamples):
    actor, trainer = make(make_policy(), OWN, make_policy)
    with pytest.raises(LagzeroError, match="head.weight: missing"):
        actor.load_state_dict(*trainer.state_dict())
    with pytest.raises(LagzeroError, match=r"critic\..*not a part of this model"):
        trainer.load_state_dict(*actor.state_dict())


def test_later_passes_are_clipped(make_policy: MakePolicy, make_samples: MakeSamples):
    """In the first pass nothing has moved; a tiny bound stops the values in the others."""
    samples = graded(make_samples())
    for passes, clipped in ((1, False), (3, True)):
        train = TRAIN.model_copy(update={"passes": passes})
        config = OWN.model_copy(update={"clip": 1e-6})
        actor, _ = make(make_policy(), config, make_policy, train)
        metrics = actor.step(batch(samples, actor.critic)).metrics
        assert (metrics["value/clipped_share"] > 0) == clipped


def test_an_empty_batch_changes_nothing(make_policy: MakePolicy):
    actor, _ = make(make_policy(), OWN, make_policy)
    assert actor.step(Batch((), 0, 0)).version == 0
    assert int(actor.critic.state_dict()["num_steps"]) == 0


def test_a_batch_without_returns_is_refused(make_policy: MakePolicy, make_samples: MakeSamples):
    samples = make_samples()
    rows = pack(samples, 48, True, np.ones(len(samples)))
    with pytest.raises(ValueError, match="learns from returns"):
        Critic(make_policy(), OWN, TRAIN).learn(Batch(rows, len(samples), 1))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_the_vocabularys_own_head_is_no_part_of_a_critic(family: str, make_policy: MakePolicy):
    """Nothing reaches an untied one, so it could have no moments to resume from."""
    names = Critic(make_policy(family), OWN, TRAIN).state_dict().keys()
    assert {"weight.head.weight", "weight.head.bias", "num_steps"} < names
    assert any("trunk." in name for name in names)
    assert not any("lm_head" in name for name in names)


def test_a_critic_with_adapters_trains_only_them_and_its_head(
    make_policy: MakePolicy, make_samples: MakeSamples, lora_config: Any
):
    trunk = add_lora(make_policy(), lora_config, seed=1)
    critic = Critic(trunk, OWN, TRAIN)
    samples = graded(make_samples())
    before = weights(trunk)
    for _ in range(2):
        critic.learn(batch(samples, critic))
    changed = {n for n, t in trunk.weights().items() if not torch.equal(t, before[n])}
    assert changed and all("lora_" in name for name in changed)


@pytest.fixture
def lora_config() -> Any:
    from lagzero.config import LoraConfig

    return LoraConfig(rank=2, alpha=4.0)


def test_a_half_precision_trunk_keeps_a_float32_head(
    make_policy: MakePolicy, make_samples: MakeSamples
):
    critic = Critic(make_policy(dtype=torch.bfloat16), OWN, TRAIN)
    samples = graded(make_samples())
    metrics = critic.learn(batch(samples, critic))
    assert metrics["value/grad_norm"] > 0
    assert critic.head.weight.dtype == torch.float32
    assert critic.values(samples)[0].dtype == np.float32


def reward_model(folder: Path, policy: Policy, outputs: int) -> Path:
    from transformers import LlamaForSequenceClassification

    config = policy.module.config.__class__(**policy.module.config.to_dict())
    config.num_labels = outputs
    torch.manual_seed(2)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def test_the_head_of_a_reward_model_is_taken_over(tmp_path: Path, make_policy: MakePolicy):
    from safetensors.torch import load_file

    policy = make_policy()
    folder = reward_model(tmp_path / "rm", policy, 1)
    critic = Critic(policy, OWN, TRAIN)
    load_head(critic, str(folder))
    stored = load_file(folder / "model.safetensors")["score.weight"]
    assert stored.abs().max() > 0
    assert torch.equal(critic.head.weight, stored)
    with pytest.raises(LagzeroError, match="has 3 outputs"):
        load_head(critic, str(reward_model(tmp_path / "classes", policy, 3)))


def test_a_language_model_has_no_head_to_take_over(
    make_policy: MakePolicy, model_folder: Callable[..., Path]
):
    critic = Critic(make_policy(), OWN, TRAIN)
    load_head(critic, str(model_folder()))
    assert not critic.head.weight.any()
