from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lagzero.config import Config, LoraConfig
from lagzero.config_load import parse_config
from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Request, Sampling
from lagzero.errors import WeightSyncError
from lagzero.losses.objective import make_loss
from lagzero.numerics.attention import ATTENTION, register
from lagzero.prepare.pack import pack
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.sync.memory import CopiedWeights, SharedWeights, copy_weights
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy
from lagzero.train.step import LocalTrainer
from lagzero.types import Sample

Tensors = dict[str, torch.Tensor]


class Receiver:
    """Notes what it hears: the version, the weights at that moment, and the thread."""

    def __init__(self, weights: Tensors | None = None):
        self.version = 0
        self.heard: list[tuple[int, str, float | None]] = []
        self._weights = weights

    def weights_changed(self, version: int) -> None:
        self.version = version
        value = None if self._weights is None else float(self._weights["a"][0])
        self.heard.append((version, threading.current_thread().name, value))


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


def weights(dtype: torch.dtype = torch.float32) -> Tensors:
    return {
        "a": torch.arange(4, dtype=dtype),
        "b.weight": torch.full((2, 3), 0.1, dtype=dtype),
        "c.weight": torch.full((3,), -2.0, dtype=dtype),
    }


def test_shared_weights_are_only_announced_on_the_compute_thread(compute: ComputeThread):
    receiver = Receiver()
    asyncio.run(SharedWeights(receiver, compute).publish(3))
    ((version, thread, _),) = receiver.heard
    assert version == 3
    assert thread.startswith("lagzero-compute")


def test_copied_weights_are_cast_into_the_engines_own_tensors(compute: ComputeThread):
    source, target = weights(), weights(torch.bfloat16)
    for tensor in target.values():
        tensor.zero_()
    storage = {name: tensor.data_ptr() for name, tensor in target.items()}
    receiver = Receiver(target)
    asyncio.run(CopiedWeights(source, target, receiver, compute).publish(1))
    assert {name: tensor.data_ptr() for name, tensor in target.items()} == storage
    assert target["a"].tolist() == [0, 1, 2, 3]
    assert target["b.weight"][0, 0].item() == 0.10009765625  # 0.1 in bfloat16
    assert source["b.weight"].dtype == torch.float32


def test_the_version_is_announced_once_all_tensors_are_there(compute: ComputeThread):
    source, target = weights(), weights()
    receiver = Receiver(target)
    link = CopiedWeights(source, target, receiver, compute)
    for version, value in ((1, 10.0), (2, 20.0)):
        source["a"][0] = value
        asyncio.run(link.publish(version))
    assert [(v, value) for v, _, value in receiver.heard] == [(1, 10.0), (2, 20.0)]


def test_later_updates_bring_only_what_training_changes(compute: ComputeThread):
    """A first one that was refused still counts as none."""
    source, target = weights(), weights(torch.bfloat16)
    link = CopiedWeights(source, target, Receiver(target), compute, changing={"a"})
    source["b.weight"][0, 0] = float("nan")
    with pytest.raises(WeightSyncError, match="b.weight: holds NaN"):
        asyncio.run(link.publish(0))
    for version, (new, of_a, of_b) in enumerate([(5.0, 5.0, 5.0), (6.0, 6.0, 5.0)]):
        for tensor in source.values():
            tensor.fill_(new)
        asyncio.run(link.publish(version))
        assert set(target["a"].tolist()) == {of_a}
        assert set(target["b.weight"].flatten().tolist()) == {of_b}


@pytest.mark.parametrize("changing", [{"a"}, None])
def test_names_and_shapes_are_compared_with_every_update(
    compute: ComputeThread, changing: set[str] | None
):
    source, target = weights(), weights()
    link = CopiedWeights(source, target, Receiver(target), compute, changing)
    asyncio.run(link.publish(0))
    source["b.weight"] = torch.zeros(3, 2)
    with pytest.raises(WeightSyncError, match="b.weight: shape"):
        asyncio.run(link.publish(1))


def wrong_name(update: Tensors) -> None:
    update["b.wieght"] = update.pop("b.weight")


def wrong_shape(update: Tensors) -> None:
    update["b.weight"] = torch.zeros(3, 2)


def missing(update: Tensors) -> None:
    del update["c.weight"]


def not_a_number(update: Tensors) -> None:
    update["c.weight"][1] = float("nan")


def infinite(update: Tensors) -> None:
    update["c.weight"][1] = float("inf")


@pytest.mark.parametrize(
    ("spoil", "problems"),
    [
        (
            wrong_name,
            [
                "b.weight: missing from the update",
                "b.wieght: the engine has no such tensor; the nearest is 'b.weight'",
            ],
        ),
        (wrong_shape, ["b.weight: shape [3, 2], the engine's is [2, 3]"]),
        (missing, ["c.weight: missing from the update"]),
        (not_a_number, ["c.weight: holds NaN or infinity"]),
        (infinite, ["c.weight: holds NaN or infinity"]),
    ],
)
def test_a_faulty_update_changes_nothing(compute: ComputeThread, spoil: Any, problems: list[str]):
    """WS6: a hard error; the version does not advance and every old bit stays."""
    update, target = weights(), weights(torch.bfloat16)
    for tensor in update.values():
        tensor.add_(1)
    spoil(update)
    before = {name: tensor.clone() for name, tensor in target.items()}
    receiver = Receiver()
    link = CopiedWeights(update, target, receiver, compute)
    with pytest.raises(WeightSyncError) as refused:
        asyncio.run(link.publish(1))
    assert str(refused.value).splitlines() == ["weight update refused:", *problems]
    assert receiver.heard == []
    assert all(torch.equal(target[name], before[name]) for name in before)


def test_every_fault_of_an_update_is_listed():
    """WS6."""
    update, target = weights(), weights()
    for spoil in (wrong_shape, not_a_number):
        spoil(update)
    del update["a"]
    with pytest.raises(WeightSyncError) as refused:
        copy_weights(update, target)
    assert [line.split(":")[0] for line in str(refused.value).splitlines()[1:]] == [
        "a",
        "b.weight",
        "c.weight",
    ]


# --- small adapters on a coarse base -----------------------------------------------------------


def make_policy(dtype: torch.dtype) -> Policy:
    register()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=40,
                hidden_size=256,
                intermediate_size=256,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
            )
        )
    vocabulary = {f"w{i}": i for i in range(40)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    )
    module.set_attn_implementation(ATTENTION)
    return Policy(module.to(dtype).eval(), tokenizer)


def config() -> Config:
    return parse_config(
        {
            "data": {"train": [{"kind": "arithmetic"}]},
            "score": {"rewards": [{"use": "number_answer"}]},
            "eval": {"before": False, "after": False},
        }
    )


def sampled_by(policy: Policy) -> list[Sample]:
    engine = Engine(policy, policy.tokenizer, EngineLimits(kv_cache_tokens=1024))
    engine.add(Request(0, (3, 1, 4, 1, 5), tuple(range(8)), Sampling(max_new_tokens=24)))
    done = [c for _ in range(60) for c in engine.step()]
    assert len(done) == 8
    return [
        Sample(0, c.member, (3, 1, 4, 1, 5), c.tokens, np.ones(len(c.tokens), np.float32), 1.0)
        for c in sorted(done, key=lambda c: c.member)
    ]


def gap(trainer: LocalTrainer, samples: list[Sample]) -> float:
    """Return the largest difference between the engine's log-probs and the trainer's."""
    rows = pack(samples, 4096, True, np.zeros(len(samples)))
    behaviour = np.concatenate([row.behaviour_logprobs for row in rows])
    return float(np.abs(np.concatenate([trainer.logprobs(row) for row in rows]) - behaviour).max())


@pytest.mark.parametrize("engine_dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_too_small_for_the_bases_type_reaches_the_engine(
    engine_dtype: torch.dtype, compute: ComputeThread
):
    """LO6: weights of 1.5 and changes of 0.003, which merging in bfloat16 would round away."""
    policy = add_lora(make_policy(torch.bfloat16), LoraConfig(rank=2, alpha=2.0))
    serving = policy if engine_dtype == policy.dtype else policy.cast_copy(engine_dtype)
    untouched = [s.tokens["id"].tolist() for s in sampled_by(serving)]
    with torch.no_grad():
        # Inputs of one sign add the small changes up; a steep head makes them visible.
        policy.module.get_input_embeddings().weight.abs_()
        policy.module.get_output_embeddings().weight.mul_(10)
        for name, parameter in policy.module.named_parameters():
            if "lora_A" in name:
                parameter.fill_(0.03)
            elif "lora_B" in name:
                parameter.fill_(0.05)
            elif any(part in name for part in ("v_proj", "o_proj", "gate_proj", "up_proj", "down")):
                parameter.copy_(1.5 * parameter.sign())
    layer = policy.module.base_model.layers[0].self_attn.o_proj
    delta = layer.get_delta_weight("default")
    assert delta.abs().max().item() == pytest.approx(0.003)
    merged = (layer.base_layer.weight.float() + delta).bfloat16()
    assert torch.equal(merged, layer.base_layer.weight)  # so merging would lose it

    if serving is not policy:
        engine = Receiver()
        link = CopiedWeights(policy.weights(), serving.weights(), engine, compute)
        asyncio.run(link.publish(1))
        assert engine.version == 1
    samples = sampled_by(serving)
    assert [s.tokens["id"].tolist() for s in samples] != untouched
    trainer = LocalTrainer(policy, make_loss(config().loss), config().train)
    with policy.adapter.disable_adapter():
        without = gap(trainer, samples)
    agreed = gap(trainer, samples)
    # Logits are of the order of 10 and activations have 8 bits: 10 / 2^8, a few times over.
    assert agreed < 0.15
    assert without > 5 * agreed  # the change is far above that rounding, and the engine has it
