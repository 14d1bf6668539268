"""The loop: produce and consume under a schedule. Synchronous RL is ``max_lag=0`` of it.

    produce   wait until admission lets the next prompt start
              -> gate.shared("generate") -> generator.play -> scorer.score -> buffer
    consume   buffer -> gate.exclusive("train") -> preparer -> trainer.step -> link.publish
              -> admission.published += 1

The loop knows protocols and the schedule, and no backend, placement or clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

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
from lagzero.schedule.patience import Patience
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
    extra_groups: int = 0  # started beyond need; carried, so only a window above 1 gains by them


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands between two steps. It is all that a resume needs of the loop."""

    step: int = 0  # optimiser steps taken: the policy version
    next_index: int = 0  # the first visit that has not been consumed
    ahead: tuple[int, ...] = ()  # visits past it that have; empty with window 1


AfterStep = Callable[[Progress, StepStats], Awaitable[None]]


class Loop:
    """One run. ``stop`` may be called at any time; the run then ends at the last finished step."""

    def __init__(self, stages: Stages, schedule: LoopSchedule, start: Progress, after: AfterStep):
        self.stages = stages
        self.schedule = schedule
        self.progress = start
        self._after = after
        self._admission = Admission(
            schedule.groups_per_step, schedule.max_lag, start.step, schedule.extra_groups
        )
        self._buffer: WindowedBuffer[ScoredGroup] = WindowedBuffer(
            schedule.window, start.next_index, start.ahead
        )
        self._patience = Patience(schedule.max_empty_steps)
        self._tasks: dict[asyncio.Task[None], None] = {}  # in start order, so that runs replay
        self._news = asyncio.Event()  # anything that someone may be waiting for
        self._failure: BaseException | None = None
        self._stopping = False

    def stop(self) -> None:
        """End the run: unfinished groups are given up, a step that has its groups is finished."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()  # now: the step may be waiting for them to leave the gate
        self._news.set()

    async def run(self) -> Progress:
        """Train until the schedule, the data or ``stop`` ends it. A failure anywhere is raised."""
        self._spawn(self._produce(), "producing")
        try:
            await self._consume()
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.progress

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)  # whoever looks for what hangs reads it
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        self._failure = self._failure or error  # one fault often fails all groups; the first counts
        self._news.set()

    async def _wait(self) -> None:
        # Whoever waits looks again before it waits again, so no news is missed.
        self._news.clear()
        await self._news.wait()

    async def _produce(self) -> None:
        for index in itertools.count(self.progress.next_index):
            if index in self.progress.ahead:
                continue
            while not self._admission.may_start():
                await self._wait()
            prompt = self.stages.source.at(index)
            if prompt is None:
                return
            self._admission.started += 1
            self._spawn(self._play(index, prompt), f"group {index}")

    async def _play(self, index: int, prompt: Prompt) -> None:
        stages = self.stages
        async with stages.gate.shared("generate"), stages.observer.stage("generate"):
            group = await stages.generator.play(index, prompt)
        async with stages.observer.stage("score"):
            scored = await stages.scorer.score(group)
        self._buffer.put(index, scored)

    async def _take(self) -> list[ScoredGroup]:
        """Wait for the groups of one step: fewer when the data end, none when the run does."""
        groups: list[ScoredGroup] = []
        while len(groups) < self.schedule.groups_per_step:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                return []
            taken = self._buffer.pop()
            if taken is not None:
                groups.append(taken[1])
            elif self._tasks:
                await self._wait()
            else:
                break
        return groups

    async def _consume(self) -> None:
        while self.progress.step < self.schedule.steps and (groups := await self._take()):
            stats = await self._train(groups)
            learnt = stats.version > self.progress.step
            self.progress = Progress(stats.version, self._buffer.first, self._buffer.ahead)
            self.stages.observer.step(stats.version, stats.metrics)
            await self._after(self.progress, stats)
            self._patience.saw(learnt, groups, stats.metrics)
            # Admitted only now: what ``after`` does with the engine must not mix with the next
            # step's groups, or a resumed run would compute other batches than this one.
            self._admission.published = stats.version
            self._admission.dropped += 0 if learnt else len(groups)
            self._news.set()

    async def _train(self, groups: list[ScoredGroup]) -> StepStats:
        stages = self.stages
        async with stages.gate.exclusive("train"):
            async with stages.observer.stage("prepare"):
                batch = await stages.preparer.prepare(groups)
            async with stages.observer.stage("train"):
                stats = await stages.trainer.step(batch)
            async with stages.observer.stage("sync"):  # also unchanged weights: same engine state
                await stages.link.publish(stats.version)
        return StepStats(stats.version, {**batch.metrics, **stats.metrics})
