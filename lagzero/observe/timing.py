"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


class StageClock:
    """Adds up, for each stage, the wall time in which at least one task is inside it.

    Sixteen prompts played at once for a second count as one second of generating. Stages may
    overlap each other, so their times may add up to more than the step. ``now`` returns seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._inside: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._step_began = now()

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncGenerator[None]:
        """Count the time of the block towards a stage, however the block ends."""
        if not self._inside.get(name):
            self._since[name] = self._now()
        self._inside[name] = self._inside.get(name, 0) + 1
        try:
            yield
        finally:
            self._inside[name] -= 1
            if not self._inside[name]:
                self._add(name, self._now())

    def running(self) -> tuple[str, ...]:
        """Return the stages that some task is inside, in the order of their first use."""
        return tuple(name for name, count in self._inside.items() if count)

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, and of ``step``; start anew.

        A stage that is running is split: what it has spent belongs to this step.
        """
        now = self._now()
        for name in self.running():
            self._add(name, now)
        spent, self._spent = self._spent, {}
        spent["step"] = now - self._step_began
        self._step_began = now
        return spent

    def _add(self, name: str, now: float) -> None:
        self._spent[name] = self._spent.get(name, 0.0) + now - self._since[name]
        self._since[name] = now
