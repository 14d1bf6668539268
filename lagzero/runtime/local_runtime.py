"""One machine, one process: a compute thread for the model, and a gate for taking turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import ParamSpec, Protocol, TypeVar

from lagzero.protocols import Gate
from lagzero.types import Batch, StepStats

P = ParamSpec("P")
R = TypeVar("R")


class ComputeThread:
    """The one thread that touches the model.

    Engine steps, optimiser steps and weight updates are calls on it, so no two of them overlap. A
    single thread also keeps one pool of math threads instead of one for each caller.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lagzero-compute")

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``function`` on the thread. A call that has begun ends before this returns, even
        when the caller is cancelled."""
        job = self._executor.submit(function, *args, **kwargs)
        ended = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            # Asked of the job itself: asyncio's future would say yes although the job runs.
            while not job.cancel() and not ended.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            raise

    def submit(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run ``function`` on the thread after what is already queued, without waiting for it."""
        self._executor.submit(function, *args, **kwargs)

    def close(self) -> None:
        """End the thread after what it runs now."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class TurnGate:
    """Stages that share run together; an exclusive stage waits for them and runs alone."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._num_shared = 0
        self._exclusive = False

    @asynccontextmanager
    async def shared(self, stage: str) -> AsyncGenerator[None]:
        """Enter beside other shared stages, once no exclusive stage runs."""
        while self._exclusive:
            await self._next_change()
        self._num_shared += 1
        try:
            yield
        finally:  # without an await, which a cancellation could interrupt
            self._num_shared -= 1
            self._changed.set()

    @asynccontextmanager
    async def exclusive(self, stage: str) -> AsyncGenerator[None]:
        """Enter alone, once every stage that runs has left."""
        while self._exclusive or self._num_shared:
            await self._next_change()
        self._exclusive = True
        try:
            yield
        finally:
            self._exclusive = False
            self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class FreeGate:
    """Each stage has processes or machines of its own: all may run at once."""

    def shared(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter at once."""
        return nullcontext()

    def exclusive(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter at once."""
        return nullcontext()


class Pausable(Protocol):
    """A sampling backend that can stand still between two engine steps."""

    async def pause(self, release: bool) -> None:
        """Stand still; with ``release``, give the KV cache's memory back."""
        ...

    async def resume(self) -> None:
        """Go on where it stood."""
        ...


class PauseGate:
    """An exclusive stage makes the engine stand still, unfinished sequences and all.

    Before that it enters ``inner``, which decides whether sequences are let finish first.
    """

    def __init__(self, inner: Gate, backend: Pausable, release: bool):
        self._inner = inner
        self._backend = backend
        self._release = release

    def shared(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter as ``inner`` allows."""
        return self._inner.shared(stage)

    @asynccontextmanager
    async def exclusive(self, stage: str) -> AsyncGenerator[None]:
        """Enter once the engine stands still."""
        async with self._inner.exclusive(stage):
            await self._backend.pause(self._release)
            try:
                yield
            finally:
                await self._backend.resume()


class PausableEngines(Protocol):
    """Numbered engines, some of which can stand still while others go on."""

    async def pause(self, engines: Sequence[int]) -> None:
        """Make these stand still; cancelled, let them go on."""
        ...

    def resume(self, engines: Sequence[int]) -> None:
        """Let these go on."""
        ...


class SwapGate:
    """Pools of engines take turns: a step is trained where one of them stands still meanwhile.

    ``move`` hears the number of the pool whose place the trainer takes, before each step; the
    first one is pool 0. The other pools generate on.
    """

    def __init__(
        self,
        pools: Sequence[Sequence[int]],
        engines: PausableEngines,
        move: Callable[[int], None],
    ):
        self._pools = pools
        self._engines = engines
        self._move = move
        self._num_turns = 0

    def shared(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter at once: what is played on engines that stand still waits there."""
        return nullcontext()

    @asynccontextmanager
    async def exclusive(self, stage: str) -> AsyncGenerator[None]:
        """Enter once the engines of the pool whose turn it is stand still."""
        number = self._num_turns % len(self._pools)
        self._num_turns += 1
        await self._engines.pause(self._pools[number])
        try:
            self._move(number)
            yield
        finally:
            self._engines.resume(self._pools[number])


class BlockingTrainer(Protocol):
    """A trainer whose step blocks its thread."""

    def step(self, batch: Batch) -> StepStats:
        """Take one optimiser step."""
        ...


class ThreadTrainer:
    """A blocking trainer on the compute thread, as the loop wants it."""

    def __init__(self, trainer: BlockingTrainer, compute: ComputeThread):
        self._trainer = trainer
        self._compute = compute

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimiser step without blocking the event loop."""
        return await self._compute.call(self._trainer.step, batch)
