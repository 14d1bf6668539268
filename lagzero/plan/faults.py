"""A small world for fault exploration: all stages of the loop, one fault and a full history."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.plan.models import FreeGate
from lagzero.runtime.local_runtime import TurnGate
from lagzero.types import (
    Batch,
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Score,
    ScoredGroup,
    StepStats,
    sampled_tokens,
)

FAULTS = (
    "source raises",
    "rollout raises",
    "rollout never returns",
    "scorer raises",
    "scorer never returns",
    "preparer raises",
    "trainer raises",
    "publish fails half-way",
    "saving raises",
)


RAISING = ("raises", "half-way")  # how the kinds end that raise


class InjectedFault(RuntimeError):
    """The failure that a schedule puts in."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and at which call of that stage."""

    kind: str
    call: int


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that makes up one schedule."""

    seed: int
    steps: int
    groups_per_step: int
    group_size: int
    max_lag: int
    window: int | None
    extra_groups: int
    num_prompts: int | None
    turns: bool  # colocated: stages take turns
    empty_share: float
    fault: Fault
    moment: str | None  # stop, cancel or None
    moment_s: float
    permute: bool  # draw the order of ready callbacks

    def without_fault(self) -> Setup:
        """Return the same run with nothing going wrong."""
        return replace(self, fault=Fault("none", 0), moment=None)


@dataclass(slots=True)
class World:
    """All stages at once. It resumes from ``start`` with what ``committed`` steps trained."""

    setup: Setup
    start: Progress
    committed: tuple[tuple[int, ...], ...] = ()  # groups of each step that was saved
    events: list[str] = field(default_factory=list[str])
    hanging: list[str] = field(default_factory=list[str])
    saved: Progress = field(init=False)
    _wrong: list[str] = field(default_factory=list[str])
    _began: dict[int, int] = field(default_factory=dict[int, int])  # group -> published version
    _calls: dict[str, int] = field(default_factory=dict[str, int])
    _taken: tuple[int, ...] = ()
    _replicas: list[int] = field(default_factory=lambda: [0, 0])  # version of each engine
    _version: int = 0
    _training: bool = False
    _playing: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.saved = self.start
        self._version = self.start.step
        self._replicas = [self.start.step] * 2
        self._rng = random.Random(f"{self.setup.seed} {self.start.step}")

    async def run(self) -> str:
        """Run the loop to its end and say how it ended: finished, stopped or cancelled."""
        setup = self.setup
        stages = Stages(self, self, self, self, _Trainer(self), self, self._gate(), _Silent())
        schedule = LoopSchedule(
            setup.steps,
            setup.groups_per_step,
            setup.max_lag,
            setup.window,
            max_empty_steps=1000,
            extra_groups=setup.extra_groups,
        )
        loop = Loop(stages, schedule, self.start, self._after)
        clock = asyncio.get_running_loop()
        if setup.moment is None:
            await loop.run()
            ending = "finished"
        else:
            task = asyncio.create_task(loop.run(), name="the run")
            clock.call_at(setup.moment_s, loop.stop if setup.moment == "stop" else task.cancel)
            await asyncio.wait([task])
            ending = "cancelled" if task.cancelled() else self._stopped(task, clock.time())
        left = [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        self._expect(not left, f"tasks were left running: {left}")
        return ending

    def _stopped(self, task: asyncio.Task[Progress], now_s: float) -> str:
        self._expect(task.result() == self.saved, "the result is not what was saved last")
        return "stopped" if now_s >= self.setup.moment_s else "finished"

    def _gate(self) -> TurnGate | FreeGate:
        return TurnGate() if self.setup.turns else FreeGate()

    # --- the stages ---------------------------------------------------------------------------

    def at(self, index: int) -> Prompt | None:
        """Return prompt ``index``."""
        self._maybe_fail("source raises")
        if self.setup.num_prompts is not None and index >= self.setup.num_prompts:
            return None
        return Prompt(f"p{index}", (index,), "")

    async def play(self, index: int, prompt: Prompt) -> Group:
        """Write one token a rollout, the group's own number."""
        self._note("play", index)
        self._expect(index not in self._began, f"group {index} was started twice")
        self._expect(prompt.token_ids == (index,), f"group {index} got prompt {prompt.id}")
        self._began[index] = min(self._replicas)
        self._playing += 1
        self._expect(not (self.setup.turns and self._training), "generating in a training turn")
        try:
            failing = self._is_due("rollout raises")
            if self._is_due("rollout never returns"):
                await self._hang(index)
            await asyncio.sleep(self._duration())
            if failing:
                raise InjectedFault(f"rollout of group {index}")
        finally:
            self._playing -= 1
        tokens = sampled_tokens([index], [-1.0], [self._began[index]])
        rollouts = tuple(
            Rollout(member, tokens, f"{index}", Finish.STOP)
            for member in range(self.setup.group_size)
        )
        self._note("played", index)
        return Group(index, prompt, rollouts)

    async def score(self, group: Group) -> ScoredGroup:
        """Give each rollout the group's number as its reward."""
        failing = self._is_due("scorer raises")
        if self._is_due("scorer never returns"):
            await self._hang(group.index)
        if self._rng.random() < 0.7:
            await asyncio.sleep(self._duration() / 4)
        if failing:
            raise InjectedFault(f"scoring of group {group.index}")
        score = Score(Outcome.SCORED, float(group.index))
        self._note("scored", group.index)
        return ScoredGroup(group, (score,) * len(group.rollouts))

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        """Check that the groups are whole and fresh enough."""
        for each in groups:
            self._check_group(each)
        self._taken = tuple(each.group.index for each in groups)
        self._note("take", *self._taken)
        late = (
            self.setup.moment == "stop" and asyncio.get_running_loop().time() > self.setup.moment_s
        )
        self._expect(not late, "a step began after stop")
        before = {index for step in self.committed for index in step}
        again = before.intersection(self._taken)
        self._expect(not again, f"groups {sorted(again)} were trained twice")
        self._maybe_fail("preparer raises")
        await asyncio.sleep(0)
        empty = self._rng.random() < self.setup.empty_share
        return Batch((), 0 if empty else len(groups), 0 if empty else 1)

    def _check_group(self, scored: ScoredGroup) -> None:
        group, index = scored.group, scored.group.index
        ids = {int(rollout.tokens["id"][0]) for rollout in group.rollouts}
        rewards = {score.value for score in scored.scores}
        whole = len(group.rollouts) == len(scored.scores) == self.setup.group_size
        self._expect(
            whole and ids == {index} == rewards and group.prompt.id == f"p{index}",
            f"group {index} was mixed: {ids}, {rewards}, {group.prompt.id}",
        )
        setup = self.setup
        if setup.window is not None:
            late = setup.window - 1 + setup.extra_groups
            bound = setup.max_lag + math.ceil(late / setup.groups_per_step)
            lag = self._version - int(group.rollouts[0].tokens["version"][0])
            self._expect(0 <= lag <= bound, f"group {index} has lag {lag}, bound {bound}")

    async def train(self, batch: Batch) -> StepStats:
        """Take a while; the version rises unless the batch is empty."""
        self._expect(not self._training, "two steps at once")
        self._expect(not (self.setup.turns and self._playing), "training in a generating turn")
        self._training = True
        failing = self._is_due("trainer raises")
        await asyncio.sleep(self._duration())
        self._training = False
        if failing:
            raise InjectedFault("training")
        self._version += 1 if batch.num_sequences else 0
        return StepStats(self._version, {})

    async def publish(self, version: int) -> None:
        """Update one replica after the other; half-way is where it may fail."""
        failing = self._is_due("publish fails half-way")
        for number in range(len(self._replicas)):
            await asyncio.sleep(self._duration() / 8)
            self._replicas[number] = version
            if failing:
                raise InjectedFault(f"publishing version {version}")

    async def _after(self, progress: Progress, stats: StepStats) -> None:
        await asyncio.sleep(self._duration() / 8)
        self._maybe_fail("saving raises")
        self.saved = progress
        self.committed = (*self.committed, self._taken)
        self._note("saved", progress.step)
        gone = {*range(progress.next_index), *progress.ahead}
        self._expect(gone == self.consumed(), f"progress {progress} is not what was consumed")
        short = len(self._taken) < self.setup.groups_per_step
        self._expect(not short or self.setup.num_prompts is not None, "a short step")

    # --- bookkeeping --------------------------------------------------------------------------

    def consumed(self) -> set[int]:
        """Return the groups of all saved steps, empty ones included."""
        return {index for step in self.committed for index in step}

    def violations(self) -> list[str]:
        """List what went wrong, with the check that needs the end of the run.

        A group that was started and not consumed is pending: the resumed run will start it again.
        """
        lost = [
            index
            for index in self._began
            if index not in self.consumed()
            and (index < self.saved.next_index or index in self.saved.ahead)
        ]
        return [*self._wrong, *([f"groups {lost} are lost"] if lost else [])]

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._wrong.append(otherwise)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _note(self, what: str, *numbers: int) -> None:
        self.events.append(f"{self._now():.6f} {what} {' '.join(map(str, numbers))}")

    def _duration(self) -> float:
        """Draw seconds: often equal ones, so that things coincide; sometimes a very long one."""
        kind = self._rng.random()
        if kind < 0.3:
            return float(self._rng.randint(0, 3))
        return self._rng.expovariate(0.5) * (20 if kind > 0.95 else 1)

    def _is_due(self, kind: str) -> bool:
        if kind != self.setup.fault.kind:
            return False
        self._calls[kind] = self._calls.get(kind, -1) + 1
        return self._calls[kind] == self.setup.fault.call

    def _maybe_fail(self, kind: str) -> None:
        if self._is_due(kind):
            raise InjectedFault(kind)

    async def _hang(self, index: int) -> None:
        self._note("hangs", index)
        self.hanging.append(f"group {index}")
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class _Trainer:
    world: World

    async def step(self, batch: Batch) -> StepStats:
        return await self.world.train(batch)


class _Silent:
    """An observer that notes nothing."""

    def stage(self, stage: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass
