"""An asyncio event loop whose time is virtual: sleeping costs nothing, waiting for ever is found.

Programs run on it unmodified. Time stands still while anything is ready and jumps to the next timer
when nothing is, so a run is a pure function of the program and of the order of ready callbacks.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """No callback is ready and no timer is set, so the tasks that it names wait for ever.

    ``tasks`` holds (name, where it waits), ``at_s`` the virtual time in seconds.
    """

    def __init__(self, at_s: float, tasks: tuple[tuple[str, str], ...]):
        self.at_s = at_s
        self.tasks = tasks
        waiting = [f"{name} waits in {where}" for name, where in tasks]
        super().__init__("\n".join([f"nothing can happen any more at {at_s:g} s", *waiting]))


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that starts at time 0 s and jumps.

    Ready callbacks run first in, first out, as asyncio's do. With ``order``, the next one is drawn
    at random among the ready ones: other schedules of the same program, replayed by the same seed.
    """

    def __init__(self, order: random.Random | None = None):
        self._now = 0.0
        self._order = order
        self._queue: deque[asyncio.Handle] = deque()  # first in, first out
        self._bag: list[asyncio.Handle] = []  # or drawn from
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0  # breaks ties by age
        self._halted = False
        self._inside = False
        self.num_callbacks = 0
        super().__init__()  # asks whether it runs

    def time(self) -> float:
        """Return the virtual time, seconds since the loop was made."""
        return self._now

    def is_running(self) -> bool:
        """Whether the loop runs now."""
        return self._inside

    def stop(self) -> None:
        """End ``run_forever`` after the callback that runs now."""
        self._halted = True

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run the callback at this instant, after the one that runs now."""
        handle = asyncio.Handle(callback, args, self, context)
        if self._order is None:
            self._queue.append(handle)
        else:
            self._bag.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run the callback at time ``when``, or at this instant if that has passed."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run the callback ``delay`` seconds from now."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        """Refuse: another thread's progress has no place on a virtual clock."""
        raise RuntimeError("a thread cannot take part in virtual time; model its work as a sleep")

    def run_forever(self) -> None:
        """Run until ``stop``. Raises Deadlock when nothing can happen any more."""
        if self._inside or asyncio._get_running_loop() is not None:
            raise RuntimeError("an event loop runs in this thread already")
        hooks = sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._finish)
        self._inside, self._halted = True, False
        try:
            self._turn()
        finally:
            self._inside = False
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)

    def _turn(self) -> None:
        queue, bag, order = self._queue, self._bag, self._order
        while not self._halted:
            if queue:
                handle = queue.popleft()
            elif bag and order is not None:
                at = int(order.random() * len(bag))
                handle, bag[at] = bag[at], bag[-1]
                bag.pop()
            else:
                self._jump()
                continue
            if not handle.cancelled():
                self.num_callbacks += 1
                handle._run()  # pyright: ignore[reportPrivateUsage]  # reports what it raises

    def _jump(self) -> None:
        """Go to the earliest timer, and make all timers of that instant ready in order of age."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(self._now, _waiting(self))
        self._now = max(self._now, timers[0][0])
        ready = self._queue if self._order is None else self._bag
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])

    def _finish(self, generator: AsyncGenerator[Any]) -> None:
        if not self.is_closed():
            self.create_task(generator.aclose())


def run_virtual(
    work: Coroutine[Any, Any, T],
    order: random.Random | None = None,
    loop: VirtualLoop | None = None,
) -> T:
    """Run a coroutine to its end under virtual time and cancel what it leaves behind.

    Raises what the coroutine raises, and Deadlock when it can never end. ``order`` permutes the
    ready callbacks; pass ``loop`` instead to look at its clock afterwards.
    """
    loop = loop or VirtualLoop(order)
    try:
        return loop.run_until_complete(work)
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    left = sorted(asyncio.all_tasks(loop), key=_age)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _waiting(loop: VirtualLoop) -> tuple[tuple[str, str], ...]:
    return tuple(
        (task.get_name(), _place(task)) for task in sorted(asyncio.all_tasks(loop), key=_age)
    )


def _age(task: asyncio.Task[Any]) -> tuple[int, str]:
    """Order that is the same in each replay: numbered names by number, given names by text."""
    number = task.get_name().rpartition("-")[2]
    return (int(number) if number.isdigit() else -1, task.get_name())


def _place(task: asyncio.Task[Any]) -> str:
    """Name the innermost coroutine that a task waits in, and its line."""
    inner: Any = task.get_coro()
    while (deeper := getattr(inner, "cr_await", None)) is not None and hasattr(deeper, "cr_frame"):
        inner = deeper
    frame = getattr(inner, "cr_frame", None)
    name = getattr(inner, "__qualname__", repr(inner))
    return name if frame is None else f"{name}, line {frame.f_lineno}"
