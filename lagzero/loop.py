"""The loop: produce and consume under a schedule. Synchronous RL is ``max_lag=0`` of it.

    produce   wait until admission lets the next prompt start
              -> gate.shared("generate") -> generator.play -> scorer.score -> buffer
    consume   buffer -> gate.exclusive("train") -> preparer -> trainer.step -> link.publish
              -> admission.published += 1

The loop knows protocols and the schedule, and no backend, placement or clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from lagzero.errors import LagzeroError
from lagzero.protocols import (
    Gate,
    Generator,
    Observer,
    Preparer,
    PromptSource,
    Scorer,
    Trainer,
    WeightLink,
)
from lagzero.schedule.admission import Admission
from lagzero.schedule.buffer import WindowedBuffer
from lagzero.types import Prompt, ScoredGroup, StepStats


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one RL step, and who watches them."""

    source: PromptSource
    generator: Generator
    scorer: Scorer
    preparer: Preparer
    trainer: Trainer
    link: WeightLink
    gate: Gate
    observer: Observer


@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """How far to go, and how far generation may run ahead."""

    steps: int  # optimiser steps in all, those before a resume included
    groups_per_step: int
    max_lag: int = 0  # policy versions
    window: int | None = 1  # of start order, at hand-over
    max_empty_steps: int = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands between two steps. It is all that a resume needs of the loop."""

    step: int = 0  # optimiser steps taken: the policy version
    next_index: int = 0  # the first visit that has not been consumed


AfterStep = Callable[[Progress, StepStats], Awaitable[None]]


class Loop:
    """One run. ``stop`` may be set at any time; the run then ends at the last finished step."""

    def __init__(self, stages: Stages, schedule: LoopSchedule, start: Progress, after: AfterStep):
        self.stages = stages
        self.schedule = schedule
        self.progress = start
        self.stop = asyncio.Event()
        self._after = after
        self._admission = Admission(schedule.groups_per_step, schedule.max_lag, start.step)
        self._buffer: WindowedBuffer[ScoredGroup] = WindowedBuffer(
            schedule.window, start.next_index
        )
        self._next_index = start.next_index
        self._changed = asyncio.Condition()
        self._playing: set[asyncio.Task[None]] = set()
        self._num_unfinished = 0
        self._exhausted = False
        self._failure: BaseException | None = None

    async def run(self) -> Progress:
        """Train until the schedule, the data or ``stop`` ends it. A failure anywhere is raised here."""
        background = [asyncio.create_task(self._produce()), asyncio.create_task(self._watch_stop())]
        background[0].add_done_callback(self._note_failure)
        try:
            await self._consume()
        finally:
            tasks = [*background, *self._playing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.progress

    async def _produce(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(self._admission.may_start)
                index = self._next_index
                prompt = self.stages.source.at(index)
                if prompt is None:
                    self._exhausted = True
                    self._changed.notify_all()
                    return
                self._next_index += 1
                self._num_unfinished += 1
                self._admission.started += 1
            task = asyncio.create_task(self._play(index, prompt))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)
            task.add_done_callback(self._note_failure)

    async def _play(self, index: int, prompt: Prompt) -> None:
        stages = self.stages
        async with stages.gate.shared("generate"), stages.observer.stage("generate"):
            group = await stages.generator.play(index, prompt)
        async with stages.observer.stage("score"):
            scored = await stages.scorer.score(group)
        async with self._changed:
            self._buffer.put(index, scored)
            self._num_unfinished -= 1
            self._changed.notify_all()

    async def _watch_stop(self) -> None:
        await self.stop.wait()
        async with self._changed:
            self._changed.notify_all()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
            self.stop.set()

    async def _take(self) -> list[ScoredGroup] | None:
        """Wait for the groups of one step. None when the run ends first."""
        groups: list[ScoredGroup] = []
        async with self._changed:
            while len(groups) < self.schedule.groups_per_step:
                if self._failure is not None:
                    raise self._failure
                if self.stop.is_set():
                    return None
                taken = self._buffer.pop()
                if taken is not None:
                    groups.append(taken[1])
                elif self._exhausted and not self._num_unfinished and not len(self._buffer):
                    return groups or None
                else:
                    await self._changed.wait()
        return groups

    async def _consume(self) -> None:
        num_empty = 0
        while self.progress.step < self.schedule.steps:
            groups = await self._take()
            if groups is None:
                return
            stats = await self._train(groups)
            done = self.progress.next_index + len(groups)
            async with self._changed:
                if stats.version > self.progress.step:
                    num_empty = 0
                    self._admission.published = stats.version
                else:
                    num_empty += 1
                    self._admission.dropped += len(groups)
                self._changed.notify_all()
            self.progress = Progress(stats.version, done)
            self.stages.observer.step(stats.version, stats.metrics)
            await self._after(self.progress, stats)
            if num_empty >= self.schedule.max_empty_steps:
                raise LagzeroError(_nothing_to_learn(num_empty, stats.metrics))

    async def _train(self, groups: list[ScoredGroup]) -> StepStats:
        stages = self.stages
        async with stages.gate.exclusive("train"):
            async with stages.observer.stage("prepare"):
                batch = await stages.preparer.prepare(groups)
            async with stages.observer.stage("train"):
                stats = await stages.trainer.step(batch)
            if stats.version > self.progress.step:
                async with stages.observer.stage("sync"):
                    await stages.link.publish(stats.version)
        return StepStats(stats.version, {**batch.metrics, **stats.metrics})


def _nothing_to_learn(num_empty: int, metrics: Mapping[str, float]) -> str:
    counts = ", ".join(
        f"{name}={metrics[name]:g}"
        for name in sorted(metrics)
        if name.startswith(("groups_", "samples_", "reward_"))
    )
    return (
        f"{num_empty} steps in a row had nothing to learn from, so the run stops (the last "
        f"checkpoint is intact). Last step: {counts}. If every reward is equal, the task is too "
        "hard or too easy for this policy, or the reward does not read the answers; "
        "schedule.max_empty_steps sets the limit"
    )
