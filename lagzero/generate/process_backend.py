"""Engine processes as a sampling backend: many coroutines ask, a router spreads them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from lagzero.schedule.router import Policy, Router
from lagzero.types import Array, Rollout

if TYPE_CHECKING:
    from lagzero.engine.engine import EngineCounters


@dataclass(slots=True, eq=False)
class _Open:
    """A call of ``complete`` that waits. What has ended of it is kept should its engine die."""

    label: str
    future: asyncio.Future[list[Rollout]]
    asked: Request
    sent: Request  # the members that had not ended when it was last sent
    members: tuple[int, ...]  # of ``asked``, in the order of ``sent``
    engine: int | None = None  # None while there is none to send it to
    ended: dict[int, Rollout] = field(default_factory=dict[int, Rollout])


class ProcessBackend:
    """Sends each request to one engine process and resolves it when its last member ends.

    When that process dies and the pool's rule is to restart, the members that had not ended are
    sampled again, with the same seeds, elsewhere; what they had sampled is lost with the process.
    """

    def __init__(self, pool: EnginePool, policy: Policy = "least_loaded"):
        self._pool = pool
        self._router = Router(pool.num_engines, policy)
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}  # by the id of ``sent``

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

    async def complete(
        self,
        prompt_ids: tuple[int, ...],
        seeds: Sequence[int],
        sampling: Sampling,
        begun: Sequence[Array] = (),
        *,
        label: str = "",
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
        members = tuple(range(len(seeds)))
        entry = _Open(label or f"request {request.id}", future, request, request, members)
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

    def take_back(self, labels: Iterable[str]) -> None:
        """End the requests with these labels as they stand: their callers get what was sampled.

        Members end with ``Finish.ABORT``. One whose engine is being replaced goes on.
        """
        wanted = set(labels)
        for entry in self._open.values():
            if entry.label in wanted and entry.engine is not None:
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
        self._router.lost(engine)
        for entry in [each for each in self._open.values() if each.engine == engine]:
            entry.engine = None
            del self._open[entry.sent.id]
            entry.members = tuple(
                member for member in range(len(entry.asked.seeds)) if member not in entry.ended
            )
            begun = entry.asked.begun
            entry.sent = dataclasses.replace(
                entry.asked,
                id=next(self._ids),
                seeds=tuple(entry.asked.seeds[member] for member in entry.members),
                begun=tuple(begun[member] for member in entry.members) if begun else (),
            )
            self._open[entry.sent.id] = entry
            self._send(entry)

    def joined(self, engine: int) -> None:
        """Use a new engine; requests that had none go to it."""
        self._router.joined(engine)
        for entry in self._open.values():
            if entry.engine is None:
                self._send(entry)

    def stopped(self, error: EngineDied) -> None:
        """Tell every caller that no engine is left."""
        entries = dict(self._open)
        self._fail(list(entries), error)
        for entry in entries.values():
            entry.engine = None  # nothing is left to be aborted

    def _send(self, entry: _Open) -> None:
        if self._router.num_live:
            entry.engine = self._router.pick()
            self._pool.send(entry.engine, AddRequest(entry.sent))

    def _collect(self, completion: Completion) -> None:
        entry = self._open.get(completion.request_id)
        if entry is None:  # cancelled while its last step ran
            return
        member = entry.members[completion.member]
        entry.ended[member] = Rollout(member, completion.tokens, completion.text, completion.finish)
        if len(entry.ended) == len(entry.asked.seeds):
            self._leave(entry)
            if not entry.future.done():
                entry.future.set_result([entry.ended[each] for each in sorted(entry.ended)])

    def _fail(self, request_ids: Sequence[int], error: LagzeroError) -> None:
        for entry in [self._open[each] for each in request_ids if each in self._open]:
            self._leave(entry)
            if not entry.future.done():
                entry.future.set_exception(error)

    def _leave(self, entry: _Open) -> None:
        """Forget an entry, once, and take its load off its engine."""
        if self._open.pop(entry.sent.id, None) is not None and entry.engine is not None:
            self._router.left(entry.engine)
