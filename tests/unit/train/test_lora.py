"""Low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lagzero.config import LoraConfig, OptimizerConfig, TrainConfig
from lagzero.errors import LagzeroError
from lagzero.prepare.pack import pack, unpack
from lagzero.train.lora import add_lora, lora_reference
from lagzero.train.model import Policy, enable_activation_checkpointing, save_policy
from lagzero.train.step import LocalTrainer
from lagzero.types import Array, Batch, Sample

TRAIN = TrainConfig(optimizer=OptimizerConfig(lr=0.01))


def batch(samples: list[Sample]) -> Batch:
    num = sum(int(s.tokens["trained"].sum()) for s in samples)
    rows = pack(samples, 64, True, np.full(len(samples), 1 / num))
    return Batch(rows, len(samples), num)


def base_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in policy.weights().items() if "lora_" not in n}


def scores(trainer: LocalTrainer, samples: list[Sample]) -> list[Array]:
    rows = pack(samples, 1000, True, np.ones(len(samples)))
    return unpack([trainer.logprobs(row) for row in rows], rows, samples)


def largest_gap(a: list[Array], b: list[Array]) -> float:
    return max(float(np.nanmax(np.abs(x - y))) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_base_stays_bit_identical_however_many_steps(
    family: str,
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    """LO1: bfloat16 base, adapter moved by 100 steps and scored by both policies each time."""
    config = LoraConfig(rank=4)
    policy = add_lora(make_policy(family, torch.bfloat16), config)
    before = base_tensors(policy)
    samples = make_samples(groups=1, members=2)
    trainer = LocalTrainer(policy, policy_gradient, TRAIN, reference=lora_reference(policy, config))
    start = scores(trainer, samples)
    for _ in range(100):
        trainer.step(batch(samples))
        trainer.reference_logprobs(samples)
    after = base_tensors(policy)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert largest_gap(scores(trainer, samples), start) > 0.1


def test_only_adapters_train_and_a_fresh_one_changes_nothing(
    make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    samples = make_samples()
    plain = LocalTrainer(make_policy(), None, TRAIN)  # pyright: ignore[reportArgumentType]
    expected = scores(plain, samples)
    policy = add_lora(make_policy(), LoraConfig(rank=4))
    trainer = LocalTrainer(policy, None, TRAIN)  # pyright: ignore[reportArgumentType]
    assert all("lora_" in name for name in policy.trainable())
    # Seven linear layers in each of three blocks, A and B each; not the head.
    assert len(policy.trainable()) == 3 * 7 * 2
    assert largest_gap(scores(trainer, samples), expected) == 0


def test_named_targets_and_seed_decide_the_adapter(make_policy: Callable[..., Policy]):
    config = LoraConfig(rank=4, targets=["q_proj", "v_proj"])
    policies = [add_lora(make_policy(), config, seed) for seed in (1, 1, 2)]
    names = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in policies[0].trainable()}
    assert names == {"q_proj", "v_proj"}
    first, same, other = (
        torch.cat([p.flatten() for p in x.trainable().values()]) for x in policies
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_targets_that_name_no_layer_are_refused(make_policy: Callable[..., Policy]):
    with pytest.raises(LagzeroError, match="no_such_layer"):
        add_lora(make_policy(), LoraConfig(targets=["no_such_layer"]))


def test_activation_checkpointing_trains_adapters_alike(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    weights: list[list[torch.Tensor]] = []
    for checkpointing in (False, True):
        policy = add_lora(make_policy(), LoraConfig(rank=4))
        if checkpointing:
            enable_activation_checkpointing(policy)
        trainer = LocalTrainer(policy, policy_gradient, TRAIN)
        for _ in range(2):
            trainer.step(batch(make_samples()))
        weights.append([p.detach() for p in policy.trainable().values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.fixture
def trained_adapter(
    tmp_path: Path,
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
) -> Path:
    """A folder with an adapter that some training has moved."""
    policy = add_lora(make_policy(), LoraConfig(rank=4, alpha=8.0))
    trainer = LocalTrainer(policy, policy_gradient, TRAIN)
    for seed in range(5):
        trainer.step(batch(make_samples(seed=seed)))
    save_policy(policy, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_reference_is_the_starting_adapter_or_the_base_as_chosen(
    trained_adapter: Path,
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    """LO4: from a trained adapter, the divergence at step 0 is exactly 0 with ``start`` and not
    with ``base``; after training, ``start`` still gives the values of step 0."""
    samples = make_samples(seed=9)
    plain = LocalTrainer(make_policy(), None, TRAIN)  # pyright: ignore[reportArgumentType]
    without_adapter = scores(plain, samples)
    found: dict[str, list[Array]] = {}
    for choice in ("start", "base"):
        config = LoraConfig.model_validate({"start": str(trained_adapter), "reference": choice})
        policy = add_lora(make_policy(), config)
        scope = lora_reference(policy, config)
        trainer = LocalTrainer(policy, policy_gradient, TRAIN, reference=scope)
        start = scores(trainer, samples)
        num_trainable = len(policy.trainable())
        found[choice] = trainer.reference_logprobs(samples)
        assert len(policy.trainable()) == num_trainable  # the frozen copy stays frozen
        gap = largest_gap(found[choice], start)
        assert gap == 0 if choice == "start" else gap > 0.1
        trainer.step(batch(samples))
        assert largest_gap(scores(trainer, samples), start) > 0
        assert largest_gap(trainer.reference_logprobs(samples), found[choice]) == 0
    assert largest_gap(found["base"], without_adapter) == 0


def test_the_starting_adapter_is_loaded_again_only_for_a_reference_to_it(
    trained_adapter: Path, make_policy: Callable[..., Policy]
):
    for choice, num_adapters in (("start", 2), ("base", 1)):
        config = LoraConfig.model_validate({"start": str(trained_adapter), "reference": choice})
        policy = add_lora(make_policy(), config)
        names = policy.trainable().keys()
        assert list(policy.adapter.peft_config) == ["default"]
        lora_reference(policy, config)
        assert len(policy.adapter.peft_config) == num_adapters
        assert policy.trainable().keys() == names
        assert not any(m.training for m in policy.adapter.modules())


def test_saved_adapters_load_with_peft_and_score_the_same(
    trained_adapter: Path, model_folder: Callable[..., Path], make_policy: Callable[..., Policy]
):
    config = LoraConfig(start=str(trained_adapter))
    policy = add_lora(make_policy(), config)
    base = AutoModelForCausalLM.from_pretrained(model_folder())
    plain = peft.PeftModel.from_pretrained(base, str(trained_adapter))
    save_policy(policy, trained_adapter.parent / "again")
    again = trained_adapter.parent / "again"
    assert {f.name for f in again.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert not (again / "start").exists()
    reloaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder()), str(again)
    )
    ids = torch.tensor([[1, 5, 9, 30, 7]])
    with torch.no_grad():
        first, second = plain(ids).logits, reloaded(ids).logits
        without = AutoModelForCausalLM.from_pretrained(model_folder())(ids).logits
    assert torch.equal(first, second)
    assert (first - without).abs().max() > 0.1
    loaded: Any = plain.peft_config["default"]
    assert loaded.lora_alpha == 8.0  # the folder's, not the configuration's


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, make_policy: Callable[..., Policy]):
    with pytest.raises(LagzeroError, match=r"adapter_config\.json"):
        add_lora(make_policy(), LoraConfig(start=str(tmp_path)))


def test_an_adapter_of_another_model_is_refused(
    trained_adapter: Path, make_policy: Callable[..., Policy]
):
    with pytest.raises(LagzeroError, match="does not fit LlamaForCausalLM"):
        add_lora(make_policy(hidden_size=16), LoraConfig(start=str(trained_adapter)))
