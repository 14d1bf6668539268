"""The slow twin of ``engine``: one event a token, nothing in closed form.

It states what the fast engine must compute and costs as much as the rollouts are long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from lagzero.plan.engine import Visit
from lagzero.plan.pace import Roofline


@dataclass(slots=True, eq=False)
class _Rollout:
    visit: Visit
    length: float
    written: int = 0
    round_left: float = 0.0


class PerTokenEngine:
    """Decodes token by token. Same rules of admission, caps and weights as ``engine.Engine``."""

    def __init__(self, pace: Roofline, max_running: int, cap: float | None = None):
        self.version = 0
        self.num_carried = 0
        self._pace, self._max, self._cap = pace, max_running, cap
        self._queue: deque[_Rollout] = deque()
        self._carried: deque[_Rollout] = deque()
        self._running: list[_Rollout] = []
        self._task: asyncio.Task[None] | None = None

    def submit(self, visit: Visit) -> None:
        """Queue all rollouts of a group."""
        visit.left = len(visit.lengths)
        self._queue.extend(_Rollout(visit, length) for length in visit.lengths)
        self._wake()

    def take_weights(self, version: int) -> None:
        """Go on with another version from the next step boundary; carried rollouts go on too."""
        self.version = version
        self._queue.extend(self._carried)
        self._carried.clear()
        self._wake()

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._decode())

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        while self._admit():
            version = self.version
            context = sum(each.visit.prompt_tokens + each.written for each in self._running)
            done = loop.create_future()
            end = loop.time() + self._pace.step_s(len(self._running), context)
            loop.call_at(end, done.set_result, None)
            await done
            for each in self._running:
                each.written += 1
                each.round_left -= 1
                each.visit.token_versions += version
            self._let_go()

    def _admit(self) -> bool:
        if not self._running and not self._queue:
            self._queue, self._carried = self._carried, self._queue
        while self._queue and len(self._running) < self._max:
            rollout = self._queue.popleft()
            left = rollout.length - rollout.written
            rollout.round_left = left if self._cap is None else min(left, self._cap)
            if not rollout.written:
                rollout.visit.start_versions += self.version
                if rollout.visit.oldest is None:
                    rollout.visit.oldest = self.version
            self._running.append(rollout)
        return bool(self._running)

    def _let_go(self) -> None:
        ended = [each for each in self._running if each.round_left <= 0]
        self._running = [each for each in self._running if each.round_left > 0]
        for each in ended:
            if each.written < each.length:
                self._carried.append(each)
                self.num_carried += 1
                continue
            each.visit.left -= 1
            if not each.visit.left:
                each.visit.done.set_result(None)
