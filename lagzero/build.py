"""From configuration to objects: the only importer of backends, one explicit match a choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lagzero.config import Config
from lagzero.data.load import drop_overlap, load_prompts
from lagzero.data.prompts import Prompts
from lagzero.engine.attention import KVCache
from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Sampling
from lagzero.engine.runner import probe_kv_shapes
from lagzero.generate.native_backend import NativeBackend
from lagzero.generate.rollout import SingleTurnGenerator
from lagzero.losses.objective import make_loss, needs_entropy
from lagzero.numerics.allocator import keep_freed_memory
from lagzero.numerics.memory import free_bytes
from lagzero.numerics.precision import has_fast_bfloat16, pick_dtype
from lagzero.prepare.prepare import GroupPreparer
from lagzero.protocols import Gate, WeightLink
from lagzero.runtime.local_runtime import ComputeThread, ThreadTrainer, TurnGate
from lagzero.score import reward
from lagzero.score.reward import RewardScorer
from lagzero.sync.memory import CopiedWeights, SharedWeights
from lagzero.train.lora import add_lora, lora_reference
from lagzero.train.model import (
    Policy,
    ReferenceScope,
    enable_activation_checkpointing,
    frozen_copy,
    load_policy,
    load_tokenizer,
    pick_device,
    stop_ids,
)
from lagzero.train.step import LocalTrainer
from lagzero.types import Array, Sample


@dataclass(frozen=True, slots=True)
class Data:
    """Prompts to train on and to measure with, and one line about each for people."""

    train: Prompts
    eval: Prompts | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Serving:
    """What samples: the policy's engine, its backend, and generators for each purpose."""

    engine: Engine
    backend: NativeBackend
    train: SingleTurnGenerator
    eval_greedy: SingleTurnGenerator
    eval_sampled: SingleTurnGenerator


@dataclass(frozen=True, slots=True)
class Training:
    """What learns: trainer, preparation, the link to the engine, and the gate between the two."""

    trainer: LocalTrainer
    on_thread: ThreadTrainer
    preparer: GroupPreparer
    link: WeightLink
    gate: Gate


def prepare_process(config: Config) -> Config:
    """Set what holds for the whole process: math threads and the allocator.

    Returns the configuration with the type that ``model.dtype: auto`` is on this machine.
    """
    if config.model.threads:
        torch.set_num_threads(config.model.threads)
    keep_freed_memory()
    dtype = pick_dtype(config.model.dtype, pick_device(config.model.device))
    model = config.model.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    return config.model_copy(update={"model": model})


def machine_notes(config: Config) -> tuple[str, ...]:
    """Return what a user should know of this machine under these settings, one line each."""
    device = pick_device(config.model.device)
    if "bfloat16" not in (config.model.dtype, config.engine.dtype) or has_fast_bfloat16(device):
        return ()
    return (
        f"note: this {device.type} has no bfloat16 matrix products, so they are computed number by "
        "number, tens of times slower than float32; set model.dtype (engine.dtype) to float32",
    )


def build_policy(config: Config) -> Policy:
    """Load the model; with LoRA, put adapters on it."""
    policy = load_policy(config.model)
    if config.model.lora is not None:
        policy = add_lora(policy, config.model.lora, config.seed)
    if config.model.activation_checkpointing:
        enable_activation_checkpointing(policy)
    return policy


def build_data(config: Config) -> Data:
    """Load prompts; held-out prompts that also occur in training are left out and counted.

    Needs the tokenizer and no weights, so that bad rows are refused before a model is loaded.
    """
    tokenizer, context_limit = load_tokenizer(config.model)

    def load(which: Literal["train", "eval"]) -> tuple[Prompts, str]:
        prompts, report = load_prompts(
            config.data,
            tokenizer,
            which=which,
            seed=config.seed,
            system_prompt=config.model.system_prompt,
            chat_template=config.model.chat_template,
            context_limit=context_limit,
        )
        return prompts, f"{which}: {report.summary()}"

    train, note = load("train")
    if not config.data.eval:
        return Data(train, None, (note,))
    evals, eval_note = load("eval")
    evals, overlap = drop_overlap(train, evals)
    if overlap:
        eval_note += f", {len(overlap)} left out (also in training)"
    return Data(train, evals, (note, eval_note))


def build_scorer(config: Config, on_failure: Callable[[str], None]) -> RewardScorer:
    """Load the rewards; ``on_failure`` hears each reason why one failed, once."""
    return reward.build_scorer(config.score, on_failure=on_failure)


def build_serving(config: Config, policy: Policy, compute: ComputeThread, version: int) -> Serving:
    """Make the engine for a policy, and the generators that play prompts on it."""
    rollout = config.rollout
    ends = frozenset(stop_ids(policy.module, policy.tokenizer))
    engine = Engine(policy, policy.tokenizer, _engine_limits(config, policy), version)
    backend = NativeBackend(engine, compute)
    sampled = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=ends,
        stop_strings=tuple(rollout.stop),
        include_stop=rollout.include_stop,
    )
    greedy = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=0.0,
        stop_ids=ends,
        stop_strings=tuple(rollout.stop),
        include_stop=rollout.include_stop,
    )

    def generator(sampling: Sampling, size: int, stream: str) -> SingleTurnGenerator:
        return SingleTurnGenerator(backend, sampling, size, config.seed, stream)

    return Serving(
        engine,
        backend,
        train=generator(sampled, rollout.group_size, "train"),
        eval_greedy=generator(greedy, 1, "eval"),
        eval_sampled=generator(sampled, config.eval.samples, "eval"),
    )


def build_training(
    config: Config, policy: Policy, serving_policy: Policy, serving: Serving, compute: ComputeThread
) -> Training:
    """Make the trainer of ``policy`` and the link to the engine that serves ``serving_policy``."""
    # Before the reference, whose frozen adapter the engine has no use for.
    link = _link(policy, serving_policy, serving.engine, compute)
    trainer = LocalTrainer(
        policy,
        make_loss(config.loss),
        config.train,
        temperature=config.rollout.temperature,
        total_steps=config.schedule.steps,
        entropy_gradient=needs_entropy(config.loss),
        master_weights=config.model.master_weights,
        reference=_reference(config, policy),
    )

    async def reference_logprobs(samples: Sequence[Sample]) -> list[Array]:
        return await compute.call(trainer.reference_logprobs, samples)

    preparer = GroupPreparer(
        config.advantage,
        config.loss,
        config.train,
        config.rollout.group_size,
        reference_logprobs if config.loss.kl.coefficient > 0 else None,
    )
    return Training(trainer, ThreadTrainer(trainer, compute), preparer, link, TurnGate())


def _link(policy: Policy, serving: Policy, engine: Engine, compute: ComputeThread) -> WeightLink:
    if serving is policy:
        return SharedWeights(engine, compute)
    changing = policy.trainable().keys()
    return CopiedWeights(policy.weights(), serving.weights(), engine, compute, changing)


def build_serving_policy(config: Config, policy: Policy) -> Policy:
    """Return the policy itself where the engine can use its tensors, else a copy in its type."""
    match config.engine.dtype:
        case "same":
            return policy
        case "float32" | "bfloat16" as dtype:
            wanted = pick_dtype(dtype, policy.device)
            return policy if policy.dtype == wanted else policy.cast_copy(wanted)


def _reference(config: Config, policy: Policy) -> ReferenceScope | None:
    if config.loss.kl.coefficient == 0:
        return None
    if config.model.lora is not None:
        return lora_reference(policy, config.model.lora)
    return frozen_copy(policy)


def _engine_limits(config: Config, policy: Policy) -> EngineLimits:
    """Size the KV cache: as configured, else a share of free memory, at most what can be used."""
    engine = config.engine
    most = engine.max_running * policy.context_limit
    tokens = engine.kv_cache_tokens
    if tokens is None:
        shapes = probe_kv_shapes(policy).shapes
        per_token = KVCache.bytes_per_token(shapes, policy.dtype)
        tokens = int(free_bytes(policy.device) * engine.kv_cache_share) // per_token
    return EngineLimits(
        max_running=engine.max_running,
        page_size=engine.page_size,
        kv_cache_tokens=max(engine.page_size, min(tokens, most)),
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache=engine.prefix_cache,
    )


def newest_policy_folder(run: Path) -> Path | None:
    """Return the folder of a run's last policy: its newest checkpoint's, else the final one."""
    from lagzero.train.checkpoint import latest

    checkpoint = latest(run)
    if checkpoint is not None:  # as new as policy/, and newer once the run has been resumed
        return checkpoint / "policy"
    return run / "policy" if (run / "policy").is_dir() else None
