"""A small world for fault exploration: all stages of the loop, one fault and a full history."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lagzero.errors import GroupLost
from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.plan.ledger import Ledger, LedgerAudit, Saved
from lagzero.runtime.local_runtime import FreeGate, TurnGate
from lagzero.schedule.router import Router
from lagzero.schedule.staleness import Contract, provable_bound
from lagzero.types import (
    TOKEN,
    Batch,
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Score,
    ScoredGroup,
    StepStats,
)

FAULTS = (
    "source raises",
    "rollout raises",
    "rollout never returns",
    "engine dies",
    "scorer raises",
    "scorer never returns",
    "preparer raises",
    "trainer raises",
    "publish fails half-way",
    "saving raises",
)


RAISING = ("raises", "half-way")  # how the kinds end that raise
ENGINES = 2


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
    surplus: Literal["carry", "drop"]
    sync_every: int
    contract: Contract
    num_prompts: int | None
    turns: bool  # colocated: stages take turns
    empty_share: float
    flat_share: float  # of groups that are of no use
    resampled_groups: int
    lost_share: float  # of plays and of scorings that give their group up
    fault: Fault
    moment: str | None  # stop, cancel or None
    moment_s: float
    permute: bool  # draw the order of ready callbacks

    def without_fault(self) -> Setup:
        """Return the same run with nothing going wrong."""
        return replace(self, fault=Fault("none", 0), moment=None)

    @property
    def may_refuse(self) -> bool:
        """Whether every group is too old before the next transfer, so that the run cannot go on."""
        bound = self.contract.bound
        acts = self.contract.action in ("drop", "recycle", "interrupt")
        return acts and bound is not None and bound < self.sync_every - 1

    def schedule(self) -> LoopSchedule:
        """Return the loop's schedule."""
        return LoopSchedule(
            self.steps,
            self.groups_per_step,
            self.max_lag,
            self.window,
            max_empty_steps=8 if self.may_refuse else 1000,
            extra_groups=self.extra_groups,
            surplus=self.surplus,
            sync_every=self.sync_every,
            contract=self.contract,
            resampled_groups=self.resampled_groups,
        )

    def bounds(self) -> list[int]:
        """Return the bounds that each lag must keep: of admission and of the contract."""
        provable = provable_bound(
            self.max_lag, self.groups_per_step, self.window, self.extra_groups, self.sync_every
        )
        acts = self.contract.action in ("drop", "recycle", "interrupt")
        return [
            each for each in (provable, self.contract.bound if acts else None) if each is not None
        ]


@dataclass(slots=True)
class World:
    """All stages at once. It resumes from what ``start`` saved."""

    setup: Setup
    start: Saved
    ledger: Ledger = field(init=False)
    hanging: list[str] = field(default_factory=list[str])
    _calls: dict[str, int] = field(default_factory=dict[str, int])
    _replicas: list[int] = field(default_factory=list[int])  # version of each engine
    _works: list[dict[asyncio.Future[bool], None]] = field(init=False)  # what each engine does
    _router: Router = field(init=False)
    _version: int = 0
    _training: bool = False
    _playing: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        contract, step = self.setup.contract, self.start.progress.step
        restarts = contract.max_restarts if contract.action in ("recycle", "interrupt") else 0
        self.ledger = Ledger(self.start, 1 + restarts, self.setup.resampled_groups)
        self._version = step
        self._replicas = [step] * ENGINES
        self._works = [{} for _ in range(ENGINES)]
        self._router = Router(ENGINES)
        self._rng = random.Random(f"{self.setup.seed} {step}")

    async def run(self) -> str:
        """Run the loop to its end and say how it ended: finished, stopped or cancelled."""
        setup = self.setup
        stages = Stages(self, self, self, self, _Trainer(self), self, self._gate(), _Watcher(self))
        loop = Loop(stages, setup.schedule(), self.start.progress, self._after)
        loop.flow.audit = LedgerAudit(setup.contract, self.ledger, sums=setup.seed % 8 == 0)
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
        self.ledger.expect(not left, f"tasks were left running: {left}")
        self.ledger.expect(not self._playing, "a play that ended is still counted")
        return ending

    def _stopped(self, task: asyncio.Task[Progress], now_s: float) -> str:
        same = task.result() == self.ledger.saved.progress
        self.ledger.expect(same, "the result is not what was saved last")
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
        """Write two tokens a rollout, the group's own number, on one of the engines."""
        expect = self.ledger.expect
        self.ledger.play(index, min(self._replicas))
        expect(prompt.token_ids == (index,), f"group {index} got prompt {prompt.id}")
        self._playing += 1
        expect(not (self.setup.turns and self._training), "generating in a training turn")
        try:
            failing = self._is_due("rollout raises")
            if self._is_due("rollout never returns"):
                await self._hang(index)
            versions = await self._write(index)
            self._maybe_lose(index)
            if failing:
                raise InjectedFault(f"rollout of group {index}")
        finally:
            self._playing -= 1
        tokens = np.empty(2, TOKEN)
        tokens["id"], tokens["logprob"], tokens["trained"] = index, -1.0, True
        tokens["version"] = versions
        rollouts = tuple(
            Rollout(member, tokens, "", Finish.STOP) for member in range(self.setup.group_size)
        )
        self.ledger.note("played", index)
        return Group(index, prompt, rollouts)

    async def _write(self, index: int) -> tuple[int, int]:
        """Return the versions of the first and the last token. A dead engine's work is re-sent."""
        clock = asyncio.get_running_loop()
        while True:
            engine = self._router.pick()
            began = self._replicas[engine]
            done = clock.create_future()
            timer = clock.call_later(self._duration(), _finish, done)
            self._works[engine][done] = None
            if self._is_due("engine dies"):
                clock.call_later(self._duration() / 4, self._die, engine)
            try:
                lives = await done
            finally:
                timer.cancel()
                if self._works[engine].pop(done, 1) is None:
                    self._router.left(engine)
            if lives:
                return began, self._replicas[engine]
            self.ledger.note("re-sent", index)

    def _die(self, engine: int) -> None:
        """Lose an engine and its work; it is back later, with the newest weights."""
        self.ledger.note("dies", engine)
        self._router.lost(engine)
        works, self._works[engine] = self._works[engine], {}
        for done in works:
            if not done.done():
                done.set_result(False)
        asyncio.get_running_loop().call_later(self._duration(), self._come_back, engine)

    def _come_back(self, engine: int) -> None:
        self.ledger.note("is back", engine)
        self._replicas[engine] = max(self._replicas)
        self._router.joined(engine)

    async def score(self, group: Group) -> ScoredGroup:
        """Give each rollout the group's number as its reward."""
        failing = self._is_due("scorer raises")
        if self._is_due("scorer never returns"):
            await self._hang(group.index)
        if self._rng.random() < 0.7:
            await asyncio.sleep(self._duration() / 4)
        if failing:
            raise InjectedFault(f"scoring of group {group.index}")
        self._maybe_lose(group.index)
        score = Score(Outcome.SCORED, float(group.index))
        self.ledger.note("scored", group.index)
        return ScoredGroup(group, (score,) * len(group.rollouts))

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        """Check that the groups are whole and fresh enough."""
        for each in groups:
            self._check_group(each)
        self.ledger.take(tuple(each.group.index for each in groups))
        late = (
            self.setup.moment == "stop" and asyncio.get_running_loop().time() > self.setup.moment_s
        )
        self.ledger.expect(not late, "a step began after stop")
        self._maybe_fail("preparer raises")
        await asyncio.sleep(0)
        empty = self._rng.random() < self.setup.empty_share
        return Batch((), 0 if empty else len(groups), 0 if empty else 1)

    def useful(self, scored: ScoredGroup) -> bool:
        """Say whether a group is of use, by its number. Those that are not will be given up."""
        index = scored.group.index
        flat = random.Random(f"{self.setup.seed} {index}").random() < self.setup.flat_share
        if flat:
            self.ledger.flat.add(index)
        return not flat

    def _check_group(self, scored: ScoredGroup) -> None:
        group, index = scored.group, scored.group.index
        ids = {each for rollout in group.rollouts for each in rollout.tokens["id"].tolist()}
        rewards = {score.value for score in scored.scores}
        whole = len(group.rollouts) == len(scored.scores) == self.setup.group_size
        self.ledger.expect(
            whole and ids == {index} == rewards and group.prompt.id == f"p{index}",
            f"group {index} was mixed: {ids}, {rewards}, {group.prompt.id}",
        )
        lag = self.setup.contract.lag(scored, self.ledger.began[index], self._version)
        for bound in self.setup.bounds():
            self.ledger.expect(0 <= lag <= bound, f"group {index} has lag {lag}, bound {bound}")

    async def train(self, batch: Batch) -> StepStats:
        """Take a while; the version rises unless the batch is empty."""
        expect = self.ledger.expect
        expect(not self._training, "two steps at once")
        expect(not (self.setup.turns and self._playing), "training in a generating turn")
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
        last = version == self.setup.steps
        due = version % self.setup.sync_every == 0 or last
        self.ledger.expect(due, f"version {version} was published out of turn")
        for number in range(ENGINES):
            await asyncio.sleep(self._duration() / 8)
            self._replicas[number] = version
            if failing:
                raise InjectedFault(f"publishing version {version}")

    async def _after(self, progress: Progress, stats: StepStats) -> None:
        short = len(self.ledger.taken) < self.setup.groups_per_step
        self.ledger.expect(not short or self.setup.num_prompts is not None, "a short step")
        await asyncio.sleep(self._duration() / 8)
        self._maybe_fail("saving raises")
        self.ledger.save(progress)

    # --- chance -------------------------------------------------------------------------------

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

    def _maybe_lose(self, index: int) -> None:
        if self.setup.lost_share and self._rng.random() < self.setup.lost_share:
            raise GroupLost(f"group {index} cannot be had")

    async def _hang(self, index: int) -> None:
        self.ledger.note("hangs", index)
        self.hanging.append(f"group {index}")
        await asyncio.Event().wait()


def _finish(done: asyncio.Future[bool]) -> None:
    if not done.done():
        done.set_result(True)


@dataclass(frozen=True, slots=True)
class _Trainer:
    world: World

    async def step(self, batch: Batch) -> StepStats:
        return await self.world.train(batch)


@dataclass(frozen=True, slots=True)
class _Watcher:
    """An observer that tells the ledger when a step ends."""

    world: World

    def stage(self, stage: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.world.ledger.step_ended()
