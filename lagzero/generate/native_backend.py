"""The embedded engine as a sampling backend: many coroutines ask, one engine step at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lagzero.engine.engine import Engine, EngineCounters, Unfinished
from lagzero.engine.request import Completion, Request, Sampling
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.types import Array, Rollout


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A call of ``complete`` that waits."""

    label: str
    future: asyncio.Future[list[Completion]]
    num_members: int


class NativeBackend:
    """Feeds the engine and resolves each request when its last member ends."""

    def __init__(self, engine: Engine, compute: ComputeThread):
        self.engine = engine
        self._compute = compute
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}
        self._ended: dict[int, list[Completion]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._paused = False
        self._takers: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> EngineCounters:
        """Totals of the engine."""
        return self.engine.counters

    @property
    def num_moved(self) -> int:
        """Responses that went on at another engine: there is none."""
        return 0

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

        ``begun`` goes on after what the rollouts of an earlier call, with the same prompt, seeds
        and sampling, came back with: their ``tokens``, one a seed, of finished members as well.
        ``label`` names the request, among those that are open, to ``unfinished`` and ``take_back``.
        """
        request = Request(next(self._ids), prompt_ids, tuple(seeds), sampling, tuple(begun))
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._open[request.id] = _Open(label or f"request {request.id}", future, len(seeds))
        try:
            await self._compute.call(self.engine.add, request)
            self._start()
            completions = await future
        except asyncio.CancelledError:
            self._compute.submit(self.engine.abort, [request.id])
            raise
        finally:
            self._open.pop(request.id, None)
            self._ended.pop(request.id, None)
        ordered = sorted(completions, key=lambda c: c.member)
        return [Rollout(c.member, c.tokens, c.text, c.finish) for c in ordered]

    async def unfinished(self) -> dict[str, Unfinished]:
        """Return where the unfinished members of each open request are, by its label."""
        found = await self._compute.call(lambda: self.engine.unfinished)
        return {self._open[each].label: at for each, at in found.items() if each in self._open}

    def take_back(self, labels: Iterable[str]) -> None:
        """End the requests with these labels as they stand: their callers get what was sampled.

        Unfinished members end with ``Finish.ABORT``. It works in a pause as well.
        """
        wanted = set(labels)
        ids = [each for each, entry in self._open.items() if entry.label in wanted]
        taker = asyncio.create_task(self._take_back(ids))
        self._takers.add(taker)
        taker.add_done_callback(self._takers.discard)

    async def _take_back(self, ids: list[int]) -> None:
        for completion in await self._compute.call(self.engine.abort, ids):
            self._collect(completion)

    async def forget_prefixes(self) -> None:
        """Make later requests find no prefix that earlier ones computed."""
        await self._compute.call(self.engine.forget_prefixes)

    async def pause(self, release: bool) -> None:
        """Stop between two engine steps until ``resume``; see ``Engine.suspend`` for ``release``.

        Requests that come meanwhile wait, and cancelling works. A pause that is itself cancelled
        ends at once.
        """
        self._paused = True
        try:
            if self._driver is not None and not self._driver.done():
                await asyncio.wait([self._driver])  # the step that it is in
            await self._compute.call(self.engine.suspend, release)
        except asyncio.CancelledError:
            await self.resume()
            raise

    async def resume(self) -> None:
        """Go on after a pause. Without one, nothing happens."""
        self._paused = False
        self._start()

    def _start(self) -> None:
        if self._open and not self._paused and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        while self._open and not self._paused:
            try:
                completions = await self._compute.call(self.engine.step)
            except Exception as error:
                await self._fail(error)
            else:
                for completion in completions:
                    self._collect(completion)

    async def _fail(self, error: Exception) -> None:
        """Tell every present caller. Requests that come meanwhile reach the engine once reset."""
        for entry in self._open.values():
            if not entry.future.done():
                entry.future.set_exception(error)
        self._open.clear()
        self._ended.clear()
        await self._compute.call(self.engine.reset)

    def _collect(self, completion: Completion) -> None:
        entry = self._open.get(completion.request_id)
        if entry is None:  # cancelled while its last step ran
            return
        ended = self._ended.setdefault(completion.request_id, [])
        ended.append(completion)
        if len(ended) == entry.num_members:
            del self._open[completion.request_id], self._ended[completion.request_id]
            if not entry.future.done():
                entry.future.set_result(ended)
