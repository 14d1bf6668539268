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
from lagzero.errors import LagzeroError
from lagzero.losses.objective import make_loss, needs_entropy, needs_reference
from lagzero.numerics.allocator import keep_freed_memory
from lagzero.numerics.precision import has_fast_bfloat16, has_fast_float16, pick_dtype
from lagzero.prepare.prepare import GroupPreparer
from lagzero.runtime.local_runtime import (
    ComputeThread,
    ThreadTrainer,
)
from lagzero.schedule.check import lag_bound
from lagzero.schedule.flow import LoopSchedule
from lagzero.schedule.named import written_out
from lagzero.schedule.staleness import Contract
from lagzero.score import reward
from lagzero.score.reward import RewardScorer
from lagzero.train.critic import ActorCritic, Critic, load_head
from lagzero.train.exactness import make_exact, make_exact_in_c
from lagzero.train.lora import add_lora, lora_reference
from lagzero.train.model import (
    Policy,
    ReferenceScope,
    check_same_tokens,
    enable_activation_checkpointing,
    frozen_copy,
    load_policy,
    load_reference,
    load_tokenizer,
    pick_device,
)
from lagzero.train.quantised import compute_with_rounded
from lagzero.train.step import LocalTrainer
from lagzero.types import Array, Sample


@dataclass(frozen=True, slots=True)
class Data:
    """Prompts to train on and to measure with, and one line about each for people."""

    train: Prompts
    eval: Prompts | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Training:
    """What learns: the trainer, on its thread, and the preparation of its batches."""

    trainer: LocalTrainer | ActorCritic
    on_thread: ThreadTrainer
    preparer: GroupPreparer


def prepare_process(config: Config) -> Config:
    """Set what holds for the whole process: math threads and the allocator.

    Returns the configuration with nothing left open: a staleness preset is written out, the
    algorithm's name is gone because its keys are set, and ``model.dtype: auto`` is the type that it
    is on this machine.
    """
    config = written_out(config)
    if config.model.threads:
        torch.set_num_threads(config.model.threads)
    keep_freed_memory()
    dtype = pick_dtype(config.model.dtype, pick_device(config.model.device))
    model = config.model.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    return config.model_copy(update={"model": model, "algorithm": None})


def machine_notes(config: Config) -> tuple[str, ...]:
    """Return what a user should know of this machine under these settings, one line each."""
    device = pick_device(config.model.device)
    types = {config.model.dtype, config.engine.dtype}
    fast = {"bfloat16": has_fast_bfloat16, "float16": has_fast_float16}
    slow = [name for name, has_fast in fast.items() if name in types and not has_fast(device)]
    if not slow:
        return ()
    products = " or ".join(slow)
    if config.model.numerics == "exact":
        return (
            f"note: this {device.type} has no {products} matrix products, so exact numerics make "
            "them in float32 and round",
        )
    return (
        f"note: this {device.type} has no {products} matrix products, so where the model's modules "
        "make them (not in C: engine.decoder) they are computed number by number, tens of times "
        "slower than float32; set model.dtype (engine.dtype) to float32",
    )


def build_policy(config: Config) -> Policy:
    """Load the model; with LoRA, put adapters on it; make its numerics exact as configured."""
    policy = load_policy(config.model)
    if config.model.lora is not None:
        policy = add_lora(policy, config.model.lora, config.seed)
    if config.model.activation_checkpointing:
        enable_activation_checkpointing(policy)
    policy = _with_numerics(config, policy)
    if config.train.rounded_weights and config.engine.weights != "same":
        compute_with_rounded(policy, config.engine.weights)
    return policy


def _with_numerics(config: Config, policy: Policy) -> Policy:
    engine = config.engine
    if config.model.products == "int16":
        return make_exact(policy, decoder="native")
    match config.model.numerics:
        case "exact":
            apart = config.placement.kind != "colocated"
            threads = [config.placement.engine_threads] if apart else []
            return make_exact(policy, threads, engine.decoder)
        case "auto":
            alike = engine.weights == "same" and engine.dtype in ("same", config.model.dtype)
            return make_exact_in_c(policy) if alike and engine.decoder != "torch" else policy
        case "fast":
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


def build_training(config: Config, policy: Policy, compute: ComputeThread) -> Training:
    """Make the trainer of ``policy``. Comes after the serving: the engine needs no reference."""
    critic = _critic(config, policy)
    warmup_steps = 0 if config.critic is None else config.critic.warmup_steps
    actor = LocalTrainer(
        policy,
        make_loss(config.loss),
        config.train,
        temperature=config.rollout.temperature,
        total_steps=config.schedule.steps - warmup_steps,
        entropy_gradient=needs_entropy(config.loss),
        master_weights=config.model.master_weights,
        reference=_reference(config, policy),
        auxiliary=critic if critic is not None and critic.shared else None,
    )

    async def reference_logprobs(samples: Sequence[Sample]) -> list[Array]:
        return await compute.call(actor.reference_logprobs, samples)

    async def values(samples: Sequence[Sample]) -> list[Array]:
        assert critic is not None  # the preparer is given this only with a critic
        return await compute.call(critic.values, samples)

    preparer = GroupPreparer(
        config.advantage,
        config.loss,
        config.train,
        config.rollout.group_size,
        reference_logprobs if needs_reference(config.loss) else None,
        None if critic is None else values,
    )
    trainer = actor if critic is None else ActorCritic(actor, critic, warmup_steps)
    return Training(trainer, ThreadTrainer(trainer, compute), preparer)


def loop_schedule(config: Config) -> LoopSchedule:
    """Turn the configuration's schedule and staleness into the loop's."""
    schedule, staleness = config.schedule, config.staleness
    return LoopSchedule(
        schedule.steps,
        schedule.groups_per_step,
        schedule.max_lag,
        schedule.window,
        schedule.max_empty_steps,
        schedule.extra_groups,
        schedule.surplus,
        schedule.sync_every,
        resampled_groups=_resampled_groups(config),
        contract=Contract(
            staleness.action,
            lag_bound(config) if staleness.bound is None else staleness.bound,
            staleness.clock,
            staleness.max_restarts,
        ),
    )


def _resampled_groups(config: Config) -> int:
    if config.advantage.zero_spread != "resample":
        return 0
    return config.advantage.resample_limit * config.schedule.groups_per_step


def _reference(config: Config, policy: Policy) -> ReferenceScope | None:
    if not needs_reference(config.loss):
        return None
    if config.model.reference is not None:
        return load_reference(config.model, policy)
    if config.model.lora is not None:
        return lora_reference(policy, config.model.lora)
    return frozen_copy(policy)


def _critic(config: Config, policy: Policy) -> Critic | None:
    settings = config.critic
    if settings is None:
        return None
    trunk = policy if settings.shared else _critic_trunk(config, settings.path, policy)
    critic = Critic(
        trunk,
        settings,
        config.train,
        total_steps=config.schedule.steps,
        master_weights=config.model.master_weights,
    )
    if settings.path is not None:
        load_head(critic, settings.path)
    return critic


def _critic_trunk(config: Config, path: str | None, policy: Policy) -> Policy:
    """Load the critic's own model, with adapters of its own where the policy has some."""
    model = {"numerics": "fast", "products": "same"}  # nothing samples from it
    fast = config.model.model_copy(update=model)
    whole = config.train.model_copy(update={"rounded_weights": False})
    config = config.model_copy(update={"model": fast, "train": whole})
    if path is None:
        return build_policy(config)
    lora = config.model.lora
    if lora is not None:
        lora = lora.model_copy(update={"start": None})  # that one belongs to the policy's weights
    model = config.model.model_copy(update={"path": path, "lora": lora})
    try:
        trunk = build_policy(config.model_copy(update={"model": model}))
    except LagzeroError as error:
        raise LagzeroError(f"critic.path: {path!r} cannot be the critic.\n{error}") from error
    check_same_tokens(trunk, policy, f"critic.path: {path!r}")
    return trunk


def newest_policy_folder(run: Path) -> Path | None:
    """Return the folder of a run's last policy: its newest checkpoint's, else the final one."""
    from lagzero.train.checkpoint import latest

    checkpoint = latest(run)
    if checkpoint is not None:  # as new as policy/, and newer once the run has been resumed
        return checkpoint / "policy"
    return run / "policy" if (run / "policy").is_dir() else None
