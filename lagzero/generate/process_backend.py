"""Engine processes as a sampling backend: many coroutines ask, a router spreads them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lagzero.engine.request import Completion, Request, Sampling
from lagzero.errors import EngineDied, LagzeroError
from lagzero.runtime.messages import (
    Abort,
    AddRequest,
    Completions,
    EngineFailed,
    Failed,
    ForgetPrefixes,
    RequestRefused,
    TakeBack,
)
from lagzero.runtime.process_pool import EnginePool
from lagzero.schedule.router import Policy, Repacking, Router
from lagzero.types import TOKEN, Array, Finish, Rollout

if TYPE_CHECKING:
    from lagzero.engine.engine import EngineCounters


@dataclass(slots=True, eq=False)
class _Open:
    """A call of ``complete`` that waits. What has ended of it is kept should its engine die."""

    label: str
    part: int
    future: asyncio.Future[list[Rollout]]
    asked: Request
    sent: Request  # the members that had not ended when it was last sent
    members: tuple[int, ...]  # of ``asked``, in the order of ``sent``
    begun: dict[int, Array]  # what members of ``asked`` had sampled before ``sent``
    engine: int | None = None  # None while there is none to send it to
    ended: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    target: int | None = None  # the engine that is to take it over
    returned: set[int] = field(default_factory=set[int])  # members that are back for it

    @property
    def num_left(self) -> int:
        """Members that have not ended."""
        return len(self.asked.seeds) - len(self.ended)


class ProcessBackend:
    """Sends each request to one engine process and resolves it when its last member ends.

    When that process dies and the pool's rule is to restart, the members that had not ended are
    sampled again, with the same seeds, elsewhere; what they had sampled there is lost.

    With ``num_parts``, the engines are that many equal parts in the order of their numbers, and a
    request stays in the part that it names. ``repacking``, of engines in one part, moves the last
    requests of an engine to another one, with all that they have sampled.
    """

    def __init__(
        self,
        pool: EnginePool,
        policy: Policy = "least_loaded",
        num_parts: int = 1,
        repacking: Repacking | None = None,
    ):
        assert repacking is None or num_parts == 1
        self._pool = pool
        self._part_size = pool.num_engines // num_parts
        self._routers = [Router(self._part_size, policy) for _ in range(num_parts)]
        self._repacking = repacking
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}  # by the id of ``sent``
        self._num_moved = 0

    async def start(self) -> None:
        """Start the processes; raises LagzeroError, with none left, when one cannot be made."""
        await self._pool.start(self)

    async def close(self) -> None:
        """End the processes. Calls that still wait raise EngineDied."""
        await self._pool.close()
        if self._open:
            self.stopped(EngineDied("the engine processes were closed"))

    @property
    def counters(self) -> EngineCounters:
        """What all engines did as far as they have told: sums of ``num_*``, largest ``max_*``."""
        told = self._pool.counters
        if not told:
            from lagzero.engine.engine import EngineCounters  # torch, which nothing else here needs

            return EngineCounters(*(0 for _ in dataclasses.fields(EngineCounters)))
        names = [each.name for each in dataclasses.fields(told[0])]
        values = {name: [int(getattr(each, name)) for each in told] for name in names}
        return dataclasses.replace(
            told[0],
            **{n: max(each) if n.startswith("max_") else sum(each) for n, each in values.items()},
        )

    @property
    def num_moved(self) -> int:
        """Responses that went on at another engine, so that theirs was free."""
        return self._num_moved

    async def complete(
        self,
        prompt_ids: tuple[int, ...],
        seeds: Sequence[int],
        sampling: Sampling,
        begun: Sequence[Array] = (),
        *,
        label: str = "",
        part: int = 0,
    ) -> list[Rollout]:
        """Return one rollout for each seed, in order. Cancelling it aborts the request.

        ``begun`` is as in ``NativeBackend.complete``; ``label`` names the request in reports of a
        death. Raises LagzeroError for a request that the engine refuses, EngineFailed when its
        step raises, EngineDied when its process dies and is not replaced.
        """
        if self._pool.error is not None:
            raise self._pool.error
        request = Request(next(self._ids), prompt_ids, tuple(seeds), sampling, tuple(begun))
        future: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()
        members, had = tuple(range(len(seeds))), dict(enumerate(begun))
        name = label or f"request {request.id}"
        entry = _Open(name, part, future, request, request, members, had)
        self._open[request.id] = entry
        self._send(entry)
        try:
            return await future
        except asyncio.CancelledError:
            if entry.engine is not None:
                self._pool.send(entry.engine, Abort((entry.sent.id,)))
            raise
        finally:
            self._leave(entry)

    def part(self, number: int) -> PartBackend:
        """Return one part of the engines as a backend of its own."""
        return PartBackend(self, number)

    def take_back(self, labels: Iterable[str]) -> None:
        """End the requests with these labels as they stand: their callers get what was sampled.

        Members end with ``Finish.ABORT``. One whose engine is being replaced goes on.
        """
        wanted = set(labels)
        for entry in self._open.values():
            if entry.label in wanted and entry.engine is not None:
                entry.target = None
                self._pool.send(entry.engine, TakeBack((entry.sent.id,)))

    async def forget_prefixes(self) -> None:
        """Make later requests find no prefix that earlier ones computed."""
        self._pool.send_all(ForgetPrefixes())

    # What the pool tells.

    def heard(self, engine: int, message: Completions | RequestRefused | Failed) -> None:
        """Hear what an engine says about requests."""
        match message:
            case Completions():
                for completion in message.completions:
                    self._collect(completion)
                if self._repacking is not None:
                    self._repack(self._repacking)
            case RequestRefused():
                self._fail([message.request_id], LagzeroError(message.failure.message))
            case Failed():
                failure = message.failure
                text = f"engine {engine}: {failure.kind}: {failure.message}\n{failure.trace}"
                self._fail(message.request_ids, EngineFailed(text.rstrip()))

    def pending(self, engine: int) -> Sequence[str]:
        """Return the labels of an engine's requests."""
        return [entry.label for entry in self._open.values() if entry.engine == engine]

    def lost(self, engine: int) -> None:
        """Send the requests of an engine that died to another one, if there is any."""
        router, number = self._router_of(engine)
        router.lost(number)
        for entry in [each for each in self._open.values() if each.engine == engine]:
            self._send_again(entry, None)

    def joined(self, engine: int) -> None:
        """Use a new engine; requests that had none go to it."""
        router, number = self._router_of(engine)
        router.joined(number)
        for entry in self._open.values():
            if entry.engine is None:
                self._send(entry)

    def stopped(self, error: EngineDied) -> None:
        """Tell every caller that no engine is left."""
        entries = dict(self._open)
        self._fail(list(entries), error)
        for entry in entries.values():
            entry.engine = None  # nothing is left to be aborted

    def _router_of(self, engine: int) -> tuple[Router, int]:
        """Return the router of an engine's part, and its number there."""
        part, number = divmod(engine, self._part_size)
        return self._routers[part], number

    def _send(self, entry: _Open, wanted: int | None = None) -> None:
        router = self._routers[entry.part]
        if router.num_live:
            number = router.pick(None if wanted is None else wanted % self._part_size)
            entry.engine = entry.part * self._part_size + number
            self._pool.send(entry.engine, AddRequest(entry.sent))

    def _send_again(self, entry: _Open, wanted: int | None) -> None:
        """Send the members that have not ended, to the engine ``wanted`` or to any."""
        del self._open[entry.sent.id]
        entry.engine, entry.target = None, None
        entry.returned.clear()
        entry.members = tuple(m for m in range(len(entry.asked.seeds)) if m not in entry.ended)
        nothing = np.zeros(0, TOKEN)
        entry.sent = dataclasses.replace(
            entry.asked,
            id=next(self._ids),
            seeds=tuple(entry.asked.seeds[m] for m in entry.members),
            begun=tuple(entry.begun.get(m, nothing) for m in entry.members) if entry.begun else (),
        )
        self._open[entry.sent.id] = entry
        self._send(entry, wanted)

    def _repack(self, rule: Repacking) -> None:
        """Begin to free engines that have little left, unless some are being freed."""
        if any(entry.target is not None for entry in self._open.values()):
            return
        loads: Counter[int] = Counter()
        for entry in self._open.values():
            if entry.engine is not None:
                loads[entry.engine] += entry.num_left
        for source, target in rule.moves(loads).items():
            leaving = [entry for entry in self._open.values() if entry.engine == source]
            for entry in leaving:
                entry.target = target
            self._pool.send(source, TakeBack(tuple(entry.sent.id for entry in leaving)))

    def _move(self, entry: _Open) -> None:
        """Let a request, all of which is back, go on at the engine that takes it over."""
        assert entry.engine is not None
        router, number = self._router_of(entry.engine)
        router.left(number)
        self._num_moved += len(entry.returned)
        self._send_again(entry, entry.target)

    def _collect(self, completion: Completion) -> None:
        entry = self._open.get(completion.request_id)
        if entry is None:  # cancelled while its last step ran
            return
        member, finish = entry.members[completion.member], completion.finish
        if finish is Finish.ABORT and entry.target is not None:
            entry.begun[member] = completion.tokens
            entry.returned.add(member)
        else:
            entry.ended[member] = Rollout(member, completion.tokens, completion.text, finish)
        if not entry.num_left:
            self._leave(entry)
            if not entry.future.done():
                entry.future.set_result([entry.ended[each] for each in sorted(entry.ended)])
        elif entry.num_left == len(entry.returned):
            self._move(entry)

    def _fail(self, request_ids: Sequence[int], error: LagzeroError) -> None:
        for entry in [self._open[each] for each in request_ids if each in self._open]:
            self._leave(entry)
            if not entry.future.done():
                entry.future.set_exception(error)

    def _leave(self, entry: _Open) -> None:
        """Forget an entry, once, and take its load off its engine."""
        if self._open.pop(entry.sent.id, None) is not None and entry.engine is not None:
            router, number = self._router_of(entry.engine)
            router.left(number)


@dataclass(frozen=True, slots=True)
class PartBackend:
    """One part of a backend's engines."""

    backend: ProcessBackend
    number: int

    async def complete(
        self, prompt_ids: tuple[int, ...], seeds: Sequence[int], sampling: Sampling, *, label: str
    ) -> list[Rollout]:
        """Return one rollout for each seed, in order, as ``ProcessBackend.complete`` does."""
        return await self.backend.complete(
            prompt_ids, seeds, sampling, label=label, part=self.number
        )
