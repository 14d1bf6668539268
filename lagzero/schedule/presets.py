"""Schedules that follow the documented rules of other asynchronous systems, by name.

Each function takes the peer's own parameters and returns the same rule in our terms. What a peer
counts in samples or in weight transfers is turned into groups and policy versions. Where the two
differ, the docstring says how; "not reproduced" and "not verified" are meant literally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lagzero.schedule.flow import LoopSchedule
from lagzero.schedule.staleness import Contract

AUTO = -1  # of trl's max_inflight_tasks


@dataclass(frozen=True, slots=True)
class Preset:
    """The part of a schedule that decides how stale samples get.

    ``kv_on_update``: what unfinished responses do with keys and values of the old weights when new
    ones arrive (``engine.kv_on_update``); None: the peer lets no response run across a transfer.
    ``max_playing``: groups that the peer plays at once; the generator's to keep, admission does
    not know it.
    """

    groups_per_step: int
    max_lag: int = 0  # policy versions
    window: int | None = 1
    extra_groups: int = 0
    surplus: Literal["carry", "drop"] = "carry"
    sync_every: int = 1  # steps
    contract: Contract = field(default_factory=Contract)
    kv_on_update: Literal["keep", "recompute"] | None = None
    max_playing: int | None = None  # groups

    def __post_init__(self) -> None:
        least = {"groups_per_step": 1, "max_lag": 0, "extra_groups": 0, "sync_every": 1}
        wrong = [
            f"{name}={getattr(self, name)} (>= {bound})"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if wrong:
            raise ValueError(", ".join(wrong))

    def schedule(self, steps: int, max_empty_steps: int = 8) -> LoopSchedule:
        """Return the schedule of a run of ``steps`` optimiser steps."""
        return LoopSchedule(
            steps=steps,
            groups_per_step=self.groups_per_step,
            max_lag=self.max_lag,
            window=self.window,
            max_empty_steps=max_empty_steps,
            extra_groups=self.extra_groups,
            surplus=self.surplus,
            sync_every=self.sync_every,
            contract=self.contract,
        )


def sync(groups_per_step: int) -> Preset:
    """Synchronous: the groups of one step start, are trained, and the weights are published."""
    return Preset(groups_per_step)


def one_step_off(groups_per_step: int) -> Preset:
    """The next step's groups are played while this one trains: every lag after the first is 1.

    verl's recipe of that name starts a batch when the one before it has been generated, not when
    there is room; the weights that each batch begins with are the same. Source: verl,
    docs/advance/one_step_off.md.
    """
    return Preset(groups_per_step, max_lag=1)


def areal(
    groups_per_step: int,
    max_head_offpolicyness: int = 4,
    max_concurrent_rollouts: int | None = None,
) -> Preset:
    """AReaL: capacity, and no sample is rejected for its age.

    A rollout may start while

        accepted + running < (max_head_offpolicyness + version + 1) * consumer_batch_size

    and running < max_concurrent_rollouts. Rejected ones leave the count. Running rollouts are
    interrupted by new weights and go on with their keys and values computed again. The rule bounds
    how far generation runs ahead, not each lag. Not reproduced: the order in which finished samples
    are taken (the paper prefers old ones; here, first finished). The default of 4 is the value in
    the documentation's example. Sources: Fu et al. 2025, sections 4 and 5.1; AReaL,
    areal/core/staleness_manager.py and docs, "Asynchronous RL".
    """
    return Preset(
        groups_per_step,
        max_head_offpolicyness,
        window=None,
        contract=Contract("accept", max_head_offpolicyness),
        kv_on_update="recompute",
        max_playing=max_concurrent_rollouts,
    )


def skyrl(
    groups_per_step: int,
    max_staleness_steps: int = 4,
    num_parallel_generation_workers: int | None = None,
    preserve_inflight_kv_cache_on_weight_update: bool = True,
) -> Preset:
    """SkyRL, fully async: AReaL's capacity, counted from the step being worked on.

    A group may start while, with S = max_staleness_steps and B groups a step,

        accepted + running < (S + current_global_step) * B,   current_global_step = version + 1

    so S is our max_lag. A group that comes back older is trained and a warning written. The
    workers, which play one group each, should be between B and (S + 1) * B. Not verified: the
    default of max_staleness_steps. Source: SkyRL, docs/content/docs/tutorials/fully_async.mdx.
    """
    return Preset(
        groups_per_step,
        max_staleness_steps,
        window=None,
        contract=Contract("accept", max_staleness_steps),
        kv_on_update="keep" if preserve_inflight_kv_cache_on_weight_update else "recompute",
        max_playing=num_parallel_generation_workers,
    )


def pipelinerl(
    groups_per_step: int, attempts: int, max_lag: int, weight_update_interval: int = 1
) -> Preset:
    """PipelineRL: weights arrive in flight, generation runs ahead by ``max_lag`` samples.

    With ``attempts`` samples a group and N = groups_per_step * attempts samples a step,

        groups that may start = ceil(max_lag / attempts) + (transfers + 1) * ceil(U / attempts),
        U = ceil(weight_update_interval / N) * N

    where both settings count samples, not versions. Samples are never rejected for their age. The
    shipped default, max_lag null, has no limit and no counterpart here. Not reproduced: with
    pop_old_data, a ring buffer overwrites old samples while the trainer is slower than the actors.
    Not verified: that keys and values are kept in every configuration; the paper keeps them.
    Sources: PipelineRL, README.md, conf/base.yaml and pipelinerl/actor.py (ActorLoop.run); Piche et
    al. 2025, arXiv:2509.19128.
    """
    if attempts < 1 or max_lag < 0 or weight_update_interval < 1:
        raise ValueError(
            f"attempts={attempts} (>= 1), max_lag={max_lag} samples (>= 0), "
            f"weight_update_interval={weight_update_interval} samples (>= 1)"
        )
    samples = groups_per_step * attempts
    return Preset(
        groups_per_step,
        window=None,
        extra_groups=math.ceil(max_lag / attempts),
        sync_every=math.ceil(weight_update_interval / samples),
        contract=Contract("accept"),
        kv_on_update="keep",
    )


def prime_rl(
    groups_per_step: int,
    max_async_level: int = 1,
    max_off_policy_steps: int = 8,
    oversampling_factor: float = 1.0,
) -> Preset:
    """prime-rl: in flight and finished groups above ``max_off_policy_steps`` are given up.

    Batch n (from 0) is collected once version n - max_async_level is out, and while it is, each
    group that finishes is replaced, so that P = floor(oversampling_factor * B) are in flight. So at
    most (version + max_async_level + 1) * B + P have started. A group is cancelled when more than
    max_off_policy_steps versions came out since it was dispatched, and not started again; a
    finished one is left out of batch n when n minus its dispatch version is above that limit. With
    0, one policy wrote the whole group. Releases before pull request 1901 compared before they
    counted and let one version more pass; those before 1512 started cancelled groups again. The
    newest have no max_async_level and overlap one step. Not verified: that keys and values are
    kept. Sources: prime-rl, docs/async.md; src/prime_rl/orchestrator: scheduler.py
    (generate_batch), dispatcher.py (on_new_version), config.py and min_fresh_version.
    """
    if oversampling_factor < 0:
        raise ValueError(f"oversampling_factor={oversampling_factor} (>= 0)")
    return Preset(
        groups_per_step,
        max_async_level,
        window=None,
        extra_groups=math.floor(oversampling_factor * groups_per_step),
        contract=Contract("interrupt", max_off_policy_steps, "start", max_restarts=0),
        kv_on_update="keep",
    )


def trl(
    groups_per_step: int,
    num_generations: int = 8,
    max_staleness: int = 4,
    max_inflight_tasks: int = AUTO,
    queue_maxsize: int = 1024,
    weight_sync_steps: int = 1,
) -> Preset:
    """TRL's AsyncGRPOTrainer: a queue, from which samples that are too old are dropped.

    A sample has the version at which its group began, counted in weight transfers, and is dropped
    when the present one exceeds it by more than max_staleness. With n = weight_sync_steps that is

        floor(version / n) - start / n > max_staleness   <=>   lag > n * (max_staleness + 1) - 1

    in policy versions. At most max_inflight_tasks samples are generated at once (-1:
    max_staleness * samples a step) and queue_maxsize wait, so ceil of their sum over
    num_generations groups may be started and not taken; with n > 1 our limit, which moves with
    transfers only, allows (n - 1) steps of groups more at the beginning of a period. Not
    reproduced: groups that wait to be scored (they add to the count). Not verified: later
    releases, which hold generation itself to max_staleness; what becomes of keys and values after
    vLLM's pause in mode "keep". Sources: TRL, docs/source/async_grpo_trainer.md and
    trl/experimental/async_grpo (async_grpo_config, async_grpo_trainer, async_rollout_worker).
    """
    if num_generations < 1 or max_staleness < 0 or queue_maxsize < 1 or weight_sync_steps < 1:
        raise ValueError(
            f"num_generations={num_generations} (>= 1), max_staleness={max_staleness} (>= 0), "
            f"queue_maxsize={queue_maxsize} (>= 1), weight_sync_steps={weight_sync_steps} (>= 1)"
        )
    if max_inflight_tasks < 0:
        max_inflight_tasks = max_staleness * groups_per_step * num_generations
    if max_inflight_tasks == 0:
        raise ValueError(
            "max_inflight_tasks=0 generates nothing; it is also what -1 means with max_staleness=0"
        )
    return Preset(
        groups_per_step,
        window=None,
        extra_groups=math.ceil((max_inflight_tasks + queue_maxsize) / num_generations),
        sync_every=weight_sync_steps,
        contract=Contract("drop", weight_sync_steps * (max_staleness + 1) - 1, "start"),
        kv_on_update="keep",
        max_playing=math.ceil(max_inflight_tasks / num_generations),
    )


def verl(
    ppo_mini_batch_size: int,
    require_batches: int = 1,
    trigger_parameter_sync_step: int = 1,
    staleness_threshold: float = 0.0,
    partial_rollout: bool = True,
) -> Preset:
    """The fully async trainer of verl: a fraction of the samples may be left from before.

    A step takes B = require_batches * ppo_mini_batch_size groups (verl's samples), and T =
    trigger_parameter_sync_step steps pass from one transfer to the next. Between two transfers,
    groups that were carried over and groups that start add up to at most

        int(B * (staleness_threshold + 1) * T)

    Nothing is dropped for its age. Threshold 0 is synchronous in rounds of T steps, 1 about one
    round off. With partial_rollout, running groups are interrupted by a transfer and go on after
    it, their keys and values computed again; without it, or at threshold 0, where it has no
    effect, the transfer waits for them, which is not reproduced: our transfers wait for nobody.
    Source: verl, docs/advance/fully_async.md; fully_async_rollouter.py (max_required_samples).
    """
    if ppo_mini_batch_size < 1 or require_batches < 1 or trigger_parameter_sync_step < 1:
        raise ValueError(
            f"ppo_mini_batch_size={ppo_mini_batch_size}, require_batches={require_batches}, "
            f"trigger_parameter_sync_step={trigger_parameter_sync_step} (each >= 1)"
        )
    if staleness_threshold < 0:
        raise ValueError(f"staleness_threshold={staleness_threshold} (>= 0)")
    groups, steps = require_batches * ppo_mini_batch_size, trigger_parameter_sync_step
    return Preset(
        groups,
        window=None,
        extra_groups=int(groups * (staleness_threshold + 1) * steps) - groups * steps,
        sync_every=steps,
        contract=Contract("accept"),
        kv_on_update="recompute" if partial_rollout and staleness_threshold else None,
    )
