"""The loop: produce and consume under a schedule. Synchronous RL is ``max_lag=0`` of it.

    produce   wait until the flow lets the next prompt start (admission)
              -> gate.shared("generate") -> generator.play -> scorer.score -> flow.finish
    consume   flow.take (window, staleness contract) -> gate.exclusive("train") -> preparer
              -> trainer.step -> link.publish -> flow.publish (groups too old begin again)

The loop knows protocols and the schedule, and no backend, placement or clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from lagzero.errors import GroupLost
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
from lagzero.schedule.flow import Flow, LoopSchedule, Progress
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


AfterStep = Callable[[Progress, StepStats], Awaitable[None]]


class Loop:
    """One run. ``stop`` may be called at any time; the run then ends at the last finished step."""

    def __init__(self, stages: Stages, schedule: LoopSchedule, start: Progress, after: AfterStep):
        self.stages = stages
        self.schedule = schedule
        self.progress = start
        self.flow = Flow(schedule, start, stages.preparer.useful)
        self._after = after
        self._patience = Patience(schedule.max_empty_steps)
        self._tasks: dict[asyncio.Task[None], None] = {}  # in start order, so that runs replay
        self._plays: dict[int, asyncio.Task[None]] = {}  # those that play a visit
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

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)  # whoever looks for what hangs reads it
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

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
        while True:
            while (index := self.flow.next_index()) is None:
                await self._wait()
            prompt = self.stages.source.at(index)
            if prompt is None:
                return
            self.flow.start(index, prompt)
            self._play(index, prompt)

    def _play(self, index: int, prompt: Prompt) -> None:
        self._plays[index] = self._spawn(self._visit(index, prompt), f"group {index}")

    async def _visit(self, index: int, prompt: Prompt) -> None:
        stages = self.stages
        try:
            async with stages.gate.shared("generate"), stages.observer.stage("generate"):
                group = await stages.generator.play(index, prompt)
            async with stages.observer.stage("score"):
                scored = await stages.scorer.score(group)
        except GroupLost as lost:
            self.flow.give_up(index, str(lost))
        else:
            self.flow.finish(index, scored)
        del self._plays[index]

    async def _take(self) -> list[ScoredGroup]:
        """Wait for the groups of one step: fewer when the data end, none when the run does."""
        groups: list[ScoredGroup] = []
        while len(groups) < self.schedule.groups_per_step:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                return []
            taken = self.flow.take(self.progress.step)
            if isinstance(taken, int):
                self._play(taken, self.flow.restart(taken))
            elif taken is not None:
                groups.append(taken)
            elif self._tasks:
                self._news.set()  # what was given up just now made room for others to start
                await self._wait()
            else:
                break
        return groups

    def _end_play(self, index: int, reason: str, again: bool) -> None:
        """Do not wait for a visit any longer: play it again or let it go."""
        if index in self._plays:
            self._plays.pop(index).cancel()
        if again:
            self._play(index, self.flow.restart(index, interrupted=True))
        else:
            self.flow.give_up(index, reason)

    async def _consume(self) -> None:
        while self.progress.step < self.schedule.steps and (groups := await self._take()):
            for index in self.flow.enough():
                self._end_play(index, "surplus", again=False)
            stats = await self._train(groups)
            learnt = stats.version > self.progress.step
            self.progress = self.flow.progress(stats.version)
            self.stages.observer.step(stats.version, stats.metrics)
            await self._after(self.progress, stats)
            self._patience.saw(learnt, groups, stats.metrics)
            # Admitted only now: what ``after`` does with the engine must not mix with the next
            # step's groups, or a resumed run would compute other batches than this one.
            published = stats.version if self._is_due(stats.version) else self.flow.published
            for index in self.flow.publish(published, 0 if learnt else len(groups)):
                self._end_play(index, "interrupted", again=self.flow.may_restart(index))
            self._news.set()

    def _is_due(self, version: int) -> bool:
        return version % self.schedule.sync_every == 0 or version == self.schedule.steps

    async def _train(self, groups: list[ScoredGroup]) -> StepStats:
        stages = self.stages
        audit = self.flow.close_step(groups, self.progress.step)
        async with stages.gate.exclusive("train"):
            async with stages.observer.stage("prepare"):
                batch = await stages.preparer.prepare(groups)
            async with stages.observer.stage("train"):
                stats = await stages.trainer.step(batch)
            if self._is_due(stats.version):
                async with stages.observer.stage("sync"):  # also unchanged weights: engine's state
                    await stages.link.publish(stats.version)
        return StepStats(stats.version, {**audit, **batch.metrics, **stats.metrics})
