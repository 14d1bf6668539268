"""Several engine processes: started together, watched, replaced, given weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from lagzero.errors import EngineDied, WeightSyncError
from lagzero.runtime.messages import (
    Completions,
    Failed,
    FromEngine,
    Heartbeat,
    Pause,
    Paused,
    Ready,
    RequestRefused,
    Resume,
    TakeWeights,
    ToEngine,
    WeightsRefused,
    WeightsTaken,
)
from lagzero.runtime.process_handle import ProcessHandle, ProcessPlan
from lagzero.runtime.weight_fence import WeightFence

if TYPE_CHECKING:
    from lagzero.engine.engine import EngineCounters

_BEATS = 4  # looks in a row at an engine that said nothing, within the limit
_MOST_LABELS = 8  # requests that a report names


@dataclass(frozen=True, slots=True)
class DeathRule:
    """What is done about an engine process that ends or hangs.

    ``restart`` starts another one, at most ``max_restarts`` times in all engines together; after
    that, and with ``stop``, every pending request fails.
    """

    on_death: Literal["restart", "stop"] = "restart"
    max_restarts: int = 3
    hang_limit_s: float = 10.0  # without a heartbeat; a step may take longer
    start_limit_s: float = 600.0  # until an engine is ready


class PoolListener(Protocol):
    """Who wants to know what becomes of requests. All calls come on the event loop."""

    def heard(self, engine: int, message: Completions | RequestRefused | Failed) -> None:
        """Hear what an engine says about requests."""
        ...

    def pending(self, engine: int) -> Sequence[str]:
        """Return a label for each request that an engine works on."""
        ...

    def lost(self, engine: int) -> None:
        """Hear that an engine is gone; a new one is on its way."""
        ...

    def joined(self, engine: int) -> None:
        """Hear that a new engine can be sent requests; it has the current weights."""
        ...

    def stopped(self, error: EngineDied) -> None:
        """Hear that no engine is left and none will come."""
        ...


@dataclass(slots=True)
class _Member:
    """What the pool knows of one engine process."""

    handle: ProcessHandle
    is_ready: bool = False
    is_live: bool = False  # has the current weights, so that it can be sent requests
    is_paused: bool = False
    num_seen: int = 0  # messages, when it was last looked at
    num_silent: int = 0  # looks in a row without a new one
    num_looks: int = 0
    fault: str = ""  # why the pool itself killed it
    counters: EngineCounters | None = None


@dataclass(slots=True)
class _Publication:
    """The weights that engines that join are given, and those before them."""

    current: TakeWeights | None = None
    before: TakeWeights | None = None
    refusals: list[str] = field(default_factory=list[str])


class EnginePool:
    """Engine processes, numbered from 0. Everything happens on the event loop of ``start``."""

    def __init__(
        self, plans: Sequence[ProcessPlan], rule: DeathRule, report: Callable[[str], None]
    ):
        self.num_restarts = 0
        self.error: EngineDied | None = None
        self._plans = tuple(plans)
        self._rule = rule
        self._report = report
        self._members: dict[int, _Member] = {}
        self._retired: list[EngineCounters] = []
        self._fence = WeightFence()
        self._publication = _Publication()
        self._pausing: set[int] = set()  # engines that are to stand still
        self._changed = asyncio.Event()
        self._listener: PoolListener | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_starting = True

    @property
    def num_engines(self) -> int:
        """Engines, those included that are being started again."""
        return len(self._plans)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each engine whose process runs."""
        return {number: member.handle.pid for number, member in self._members.items()}

    @property
    def counters(self) -> list[EngineCounters]:
        """The last totals of every process that reported any, also of those that are gone."""
        now = (member.counters for member in self._members.values())
        return [*self._retired, *(each for each in now if each is not None)]

    async def start(self, listener: PoolListener) -> None:
        """Start all processes and wait until they are ready.

        Raises LagzeroError, with no process left, when one of them cannot be made.
        """
        self._listener = listener
        try:
            for number in range(len(self._plans)):
                self._start(number)
            self._watcher = asyncio.create_task(self._watch(), name="engine processes")
            while self.error is None and not all(m.is_live for m in self._members.values()):
                await self._change()
        except BaseException:
            await self.close()
            raise
        self._is_starting = False
        if self.error is not None:
            await self.close()
            raise self.error

    async def close(self) -> None:
        """End all processes; they are gone when this returns."""
        if self.error is None:
            self.error = EngineDied("the engine processes were closed")
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        for member in self._members.values():
            if not member.is_ready:  # it would read the order to stop only when it is
                member.handle.kill()
        await asyncio.gather(*(member.handle.close() for member in self._members.values()))
        self._members.clear()
        self._changed.set()

    def send(self, engine: int, message: ToEngine) -> None:
        """Send to one engine, without waiting."""
        self._members[engine].handle.send(message)

    def send_all(self, message: ToEngine) -> None:
        """Send to every engine that can be sent requests."""
        for member in self._members.values():
            if member.is_live:
                member.handle.send(message)

    async def pause(self, engines: Iterable[int]) -> None:
        """Make engines stand still between two steps; return when all that are ready do.

        One that is started meanwhile stands still from its start. A pause that is itself cancelled
        ends at once. Raises EngineDied when no engine is left.
        """
        chosen = set(engines)
        self._pausing |= chosen
        for number in chosen & self._members.keys():
            if self._members[number].is_ready:
                self.send(number, Pause())
        try:
            while any(m.is_ready and not m.is_paused for m in self._among(chosen)):
                await self._change()
            self._check()
        except BaseException:
            self.resume(chosen)
            raise

    def resume(self, engines: Iterable[int]) -> None:
        """Let engines go on after a pause."""
        chosen = set(engines)
        self._pausing -= chosen
        for member in self._among(chosen):
            member.is_paused = False
            if member.is_ready:
                member.handle.send(Resume())

    def _among(self, engines: set[int]) -> list[_Member]:
        return [member for number, member in self._members.items() if number in engines]

    # Weights. One publication at a time; its caller sees to that.

    async def free_slot(self) -> int:
        """Wait until a slot may be written, and return it: never one that an engine may read.

        Raises EngineDied when no engine is left, and WeightSyncError for an earlier publication
        that was given up before its refusal came.
        """
        await self._settle()
        current = self._publication.current
        kept = set[int]() if current is None else {current.slot}  # for engines that join
        while not (free := {0, 1} - kept - self._fence.readable()):
            await self._change()
            self._check()
        return min(free)

    async def switch(self, order: TakeWeights) -> None:
        """Make every engine take a slot; return when all that live have.

        Raises WeightSyncError when one refuses; those that had taken it are then given the slot
        before, so all engines stay at one version. The first publication has none before it.
        """
        publication = self._publication
        publication.before, publication.current = publication.current, order
        for number, member in self._members.items():
            if member.is_ready:
                self._order(number, order)
        await self._settle()

    def _order(self, engine: int, order: TakeWeights) -> None:
        self._fence.ordered(engine, order.slot)
        self.send(engine, order)

    async def _settle(self) -> None:
        """Wait for every answer; take a refused publication back."""
        await self._quiet()
        publication = self._publication
        if not publication.refusals:
            return
        refused, before = publication.current, publication.before
        publication.current = before
        for number, member in self._members.items():
            took = refused is not None and self._fence.used(number) == refused.slot
            if before is not None and member.is_ready and took:
                self._order(number, before)
        await self._quiet()
        refusals, publication.refusals = publication.refusals, []
        raise WeightSyncError("weight update refused:\n" + "\n".join(refusals))

    async def _quiet(self) -> None:
        self._check()
        while not self._fence.is_quiet:
            await self._change()
            self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    async def _change(self) -> None:
        # Whoever waits looks again before it waits again, so no news is missed.
        self._changed.clear()
        await self._changed.wait()

    # Life and death.

    def _start(self, number: int) -> None:
        name = f"engine {number}"
        handle = ProcessHandle(
            name,
            self._plans[number].packed(self._rule.hang_limit_s / (2 * _BEATS)),
            lambda message: self._heard(number, message),
            lambda how: self._ended(number, how),
        )
        handle.start()
        self._members[number] = _Member(handle)

    def _heard(self, number: int, message: FromEngine) -> None:
        member, listener = self._members[number], self._listener
        assert listener is not None
        match message:
            case Heartbeat():
                return
            case Ready():
                member.is_ready = True
                self._fence.joined(number)
                if number in self._pausing:
                    self.send(number, Pause())
                if self._publication.current is not None:
                    self._order(number, self._publication.current)
            case Paused():
                member.is_paused = number in self._pausing
            case WeightsTaken():
                member.counters = message.counters
                self._fence.taken(number)
            case WeightsRefused():
                self._fence.refused(number)
                why = f"engine {number}, version {message.version}: {message.reason}"
                self._publication.refusals.append(why)
                if not member.is_live:
                    self._stop(f"engine {number} cannot take the weights it needs to start: {why}")
                    return
            case Completions():
                member.counters = message.counters
                listener.heard(number, message)
            case RequestRefused() | Failed():
                listener.heard(number, message)
            case _:
                self._stop(f"engine {number} sent a message that nobody knows: {message!r}")
                return
        if member.is_ready and not member.is_live and self._fence.is_settled(number):
            member.is_live = True
            if not self._is_starting:
                current = self._publication.current
                which = "its own weights" if current is None else f"version {current.version}"
                self._report(f"engine {number} is back (pid {member.handle.pid}), with {which}")
                listener.joined(number)
        self._changed.set()

    def _ended(self, number: int, how: str) -> None:
        member, listener = self._members.pop(number), self._listener
        assert listener is not None
        self._fence.lost(number)
        self._changed.set()
        if member.counters is not None:
            self._retired.append(member.counters)
        if self.error is not None:
            return
        text = f"engine {number} (pid {member.handle.pid}) {member.fault or how}"
        if self._is_starting or (member.handle.failure and not member.is_ready):
            self._stop(f"{text}\nIt had not become ready, so it is not started again.")
            return
        text += _what_it_had(listener.pending(number))
        rule = self._rule
        if rule.on_death == "stop":
            self._stop(text)
        elif self.num_restarts >= rule.max_restarts:
            self._stop(f"{text}\nIt is not started again: {rule.max_restarts} restarts are used up")
        else:
            self.num_restarts += 1
            count = f"restart {self.num_restarts} of at most {rule.max_restarts}"
            self._report(f"{text}\nA new process is started in its place ({count}).")
            if member.is_live:
                listener.lost(number)
            self._start(number)

    def _stop(self, why: str) -> None:
        self.error = EngineDied(why)
        for member in self._members.values():
            member.handle.kill()
        assert self._listener is not None
        self._listener.stopped(self.error)
        self._changed.set()

    async def _watch(self) -> None:
        """Kill processes that give no sign of life.

        Looks are counted rather than seconds, so that an owner that was itself stopped for a while
        does not blame its engines.
        """
        every_s = self._rule.hang_limit_s / _BEATS
        while True:
            await asyncio.sleep(every_s)
            for member in self._members.values():
                num_heard = member.handle.num_heard
                is_silent = num_heard == member.num_seen
                member.num_silent = member.num_silent + 1 if is_silent else 0
                member.num_seen = num_heard
                member.num_looks += 1
                if member.fault:
                    continue
                if member.is_ready and member.num_silent >= _BEATS:
                    member.fault = (
                        f"has given no sign of life for {self._rule.hang_limit_s:g} s "
                        "and was killed"
                    )
                elif not member.is_ready and member.num_looks * every_s > self._rule.start_limit_s:
                    member.fault = f"was not ready after {self._rule.start_limit_s:g} s"
                if member.fault:
                    member.handle.kill()


def _what_it_had(labels: Sequence[str]) -> str:
    if not labels:
        return " while it had no request"
    more = len(labels) - _MOST_LABELS
    names = ", ".join(labels[:_MOST_LABELS]) + (f" and {more} more" if more > 0 else "")
    return f" while it worked on {len(labels)} request(s): {names}"
