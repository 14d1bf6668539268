"""The embedded engine as a sampling backend: many coroutines ask, one engine step at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from lagzero.engine.engine import Engine
from lagzero.engine.request import Completion, Request, Sampling
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.types import Rollout


class NativeBackend:
    """Feeds the engine and resolves each request when its last member ends."""

    def __init__(self, engine: Engine, compute: ComputeThread):
        self.engine = engine
        self._compute = compute
        self._ids = itertools.count()
        self._open: dict[int, tuple[asyncio.Future[list[Completion]], int]] = {}
        self._ended: dict[int, list[Completion]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def complete(
        self, prompt_ids: tuple[int, ...], seeds: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """Return one rollout for each seed, in order. Cancelling it aborts the request."""
        request = Request(next(self._ids), prompt_ids, tuple(seeds), sampling)
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._open[request.id] = (future, len(seeds))
        try:
            await self._compute.call(self.engine.add, request)
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive())
            completions = await future
        except asyncio.CancelledError:
            self._compute.submit(self.engine.abort, [request.id])
            raise
        finally:
            self._open.pop(request.id, None)
            self._ended.pop(request.id, None)
        ordered = sorted(completions, key=lambda c: c.member)
        return [Rollout(c.member, c.tokens, c.text, c.finish) for c in ordered]

    async def _drive(self) -> None:
        while self._open:
            try:
                completions = await self._compute.call(self.engine.step)
            except Exception as error:
                await self._fail(error)
            else:
                for completion in completions:
                    self._collect(completion)

    async def _fail(self, error: Exception) -> None:
        """Tell every present caller. Requests that come meanwhile reach the engine once reset."""
        for future, _ in self._open.values():
            if not future.done():
                future.set_exception(error)
        self._open.clear()
        self._ended.clear()
        await self._compute.call(self.engine.reset)

    def _collect(self, completion: Completion) -> None:
        entry = self._open.get(completion.request_id)
        if entry is None:  # cancelled while its last step ran
            return
        future, num_members = entry
        ended = self._ended.setdefault(completion.request_id, [])
        ended.append(completion)
        if len(ended) == num_members:
            del self._open[completion.request_id], self._ended[completion.request_id]
            if not future.done():
                future.set_result(ended)
