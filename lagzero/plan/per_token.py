"""The slow twin of ``engine``: one event a token, nothing in closed form.

It states what the fast engine must compute and costs as much as the rollouts are long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from lagzero.plan.engine import Receive, Visit, Waiting
from lagzero.plan.pace import Roofline


@dataclass(slots=True, eq=False)
class _Rollout:
    visit: Visit
    length: float
    written: int = 0
    round_left: float = 0.0
    lost: bool = False  # its keys and values are gone

    @property
    def context(self) -> int:
        return self.visit.prompt_tokens + self.written

    def without_cache(self) -> Waiting:
        """Return it as it goes to another engine."""
        rest = self.length - self.written - self.round_left
        return self.visit, 0, self.round_left, rest, self.context, self.lost or self.written > 0


class PerTokenEngine:
    """Decodes token by token. Same rules of admission, caps, cache and weights as ``Engine``."""

    def __init__(
        self,
        pace: Roofline,
        max_running: int,
        cap: float | None = None,
        kv_tokens: float | None = None,
        prefill_tok_per_s: float | None = None,
        number: int = 0,
    ):
        self.number = number
        self.version = 0
        self.num_carried = 0
        self.num_evicted = 0
        self.on_end: Callable[[], None] | None = None
        self._pace, self._max, self._cap = pace, max_running, cap
        self._kv_tokens, self._prefill_tok_per_s = kv_tokens, prefill_tok_per_s
        self._full = False
        self._queue: deque[_Rollout] = deque()
        self._carried: deque[_Rollout] = deque()
        self._running: list[_Rollout] = []  # in the order in which they began
        self._leaving: tuple[Set[Visit], Receive] | None = None
        self._task: asyncio.Task[None] | None = None

    def submit(self, visit: Visit) -> None:
        """Queue all rollouts of a group."""
        visit.left = len(visit.lengths)
        self._queue.extend(_Rollout(visit, length) for length in visit.lengths)
        self._wake()

    def give(self, visits: Set[Visit], receive: Receive) -> None:
        """Hand the rollouts of groups over at the next step boundary."""
        self._leaving = visits, receive
        self._wake()

    def join(self, queued: Sequence[Waiting], carried: Sequence[Waiting]) -> None:
        """Take over rollouts that another engine has handed over."""
        for line, arrived in ((self._queue, queued), (self._carried, carried)):
            for visit, _, now, rest, context, lost in arrived:
                written = int(context) - visit.prompt_tokens
                line.append(_Rollout(visit, written + now + rest, written, now, lost))
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
        while True:
            if self._leaving is not None:
                self._hand_over(*self._leaving)
            prompt_tokens = self._admit()
            if not self._running:
                return
            if prompt_tokens and self._prefill_tok_per_s:
                await self._spend(prompt_tokens / self._prefill_tok_per_s)
                continue  # who came meanwhile joins before the step
            version = self.version
            context = sum(each.context for each in self._running)
            await self._spend(self._pace.step_s(len(self._running), context))
            for each in self._running:
                each.written += 1
                each.round_left -= 1
                each.visit.token_versions += version
            self._let_go()

    async def _spend(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_at(loop.time() + seconds, done.set_result, None)
        await done

    def _is_over(self, more: Sequence[_Rollout] = ()) -> bool:
        all_of_them = [*self._running, *more]
        if self._kv_tokens is None or len(all_of_them) == 1:
            return False
        return sum(each.context + 1 for each in all_of_them) > self._kv_tokens

    def _admit(self) -> int:
        """Let rollouts begin; return the tokens to compute before the next step."""
        if not self._running and not self._queue:
            self._queue, self._carried = self._carried, self._queue
        while self._is_over():
            last = self._running.pop()
            last.lost = self._full = True
            self._queue.appendleft(last)
            self.num_evicted += 1
        tokens = 0
        while self._queue and len(self._running) < self._max and not self._full:
            rollout = self._queue[0]
            if self._is_over([rollout]):
                break
            tokens += self._begin(self._queue.popleft())
        return tokens

    def _begin(self, rollout: _Rollout) -> int:
        visit = rollout.visit
        self._running.append(rollout)
        if rollout.round_left <= 0:
            left = rollout.length - rollout.written
            rollout.round_left = left if self._cap is None else min(left, self._cap)
        if rollout.lost:
            rollout.lost, visit.prompt_at = False, self.number
            return rollout.context
        if rollout.written:
            return 0
        visit.start_versions += self.version
        if visit.oldest is None:
            visit.oldest = self.version
        is_new, visit.prompt_at = visit.prompt_at != self.number, self.number
        return visit.prompt_tokens if is_new else 0

    def _hand_over(self, visits: Set[Visit], receive: Receive) -> None:
        self._leaving = None
        for each in self._running:
            if each.visit in visits:
                each.lost, self._full = True, False
        lines = ([*self._running, *self._queue], self._carried)
        queued, carried = (
            [each.without_cache() for each in line if each.visit in visits] for line in lines
        )
        self._running = [each for each in self._running if each.visit not in visits]
        self._queue = deque(each for each in self._queue if each.visit not in visits)
        self._carried = deque(each for each in self._carried if each.visit not in visits)
        receive(queued, carried)

    def _let_go(self) -> None:
        ended = [each for each in self._running if each.round_left <= 0]
        self._running = [each for each in self._running if each.round_left > 0]
        for each in ended:
            self._full = False
            if each.written < each.length:
                self._carried.append(each)
                self.num_carried += 1
                continue
            each.visit.left -= 1
            if each.visit.newest is None:
                each.visit.newest = self.version
            if not each.visit.left:
                each.visit.done.set_result(None)
        if ended and self.on_end is not None:
            self.on_end()
