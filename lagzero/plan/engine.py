"""A modelled inference engine: continuous batching that advances from event to event.

Between two events the set of running rollouts is fixed, so the time of all decode steps between
them is a closed form (``pace``). The cost is a few microseconds a rollout, whatever its length.
``per_token`` is the slow twin.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from lagzero.plan.meter import Meter
from lagzero.plan.pace import Pace
from lagzero.plan.timeline import Recorder


@dataclass(slots=True, eq=False)
class Visit:
    """One group at an engine, and what became of its rollouts."""

    index: int
    lengths: Sequence[float]  # tokens, one a rollout
    prompt_tokens: int
    done: asyncio.Future[None]
    engine: int = 0  # where it is
    prompt_at: int | None = None  # the engine that has computed its prompt
    left: int = 0  # rollouts that have not finished
    oldest: int | None = None  # lowest version at which a rollout began
    newest: int | None = None  # lowest version at which a rollout ended
    written: float = 0.0  # tokens, of all rollouts and rounds
    start_versions: int = 0  # sum over rollouts of the version at which it began
    token_versions: float = 0.0  # sum over tokens of the version that the engine had


# (visit, rollout, tokens to write now, tokens left for later rounds, context before it, and
# whether the keys and values of that context are gone)
Waiting = tuple[Visit, int, float, float, float, bool]
# (count at which it finishes, order, what was waiting, sum of versions when it began)
Running = tuple[float, int, Waiting, float]
# who takes rollouts that leave for another engine: those in or before a round, those between two
Receive = Callable[[Sequence[Waiting], Sequence[Waiting]], None]


class Engine:
    """``max_running`` rollouts decode together; others wait, first in, first out.

    Every running rollout gets one token a step, so a rollout ends when the count of steps reaches
    a number that is known when it begins: a heap of those numbers gives the next event. With
    ``cap`` a rollout writes at most so many tokens a round; the rest waits, its KV cache kept,
    until new weights come or the engine has nothing else to do.

    ``kv_tokens`` bounds the contexts of all running rollouts, tokens. One that does not fit waits;
    when the next step does not fit, the one that began last goes back to the head of the queue
    without its cache, and nobody begins until a rollout has left. One alone always runs.
    Before a step, decoding stands still for prompts and lost contexts, ``prefill_tok_per_s``;
    a group's prompt is computed once. None: no limit, no cost.
    """

    def __init__(
        self,
        number: int,
        pace: Pace,
        max_running: int,
        meter: Meter,
        cap: float | None = None,
        recorder: Recorder | None = None,
        kv_tokens: float | None = None,
        prefill_tok_per_s: float | None = None,
    ):
        self.number = number
        self.version = 0
        self.num_tokens = 0.0  # written by finished rounds
        self.num_carried = 0  # rounds that ended at the cap
        self.num_evicted = 0  # rounds that ended because the cache was full
        self.on_end: Callable[[], None] | None = None  # called when rounds have ended
        self._pace, self._max, self._meter, self._cap = pace, max_running, meter, cap
        self._kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self._prefill_s = 1 / prefill_tok_per_s if prefill_tok_per_s else 0.0
        self._full = False  # somebody was evicted, and nobody has left since
        self._recorder, self._name = recorder, f"engine {number}/"
        self._loop = asyncio.get_running_loop()
        self._nowhere = contextvars.Context()  # of its timers: one, rather than a copy each
        self._queue: deque[Waiting] = deque()
        self._carried: deque[Waiting] = deque()
        self._running: list[Running] = []
        self._dead: set[Visit] = set()
        self._leaving: tuple[Set[Visit], Receive] | None = None
        self._order = 0
        self._idle = True
        meter.idle_engines += 1
        self._at_s = 0.0  # time of the last boundary that was settled
        self._count = 0.0  # steps up to it
        self._context = 0.0  # tokens of all running rollouts at it
        self._goal = 0.0  # count at the next event
        self._timer: asyncio.TimerHandle | None = None
        self._holds = 0  # without a timer it stands still already
        self._marked, self._version_sum = 0.0, 0.0  # count, and sum of versions over steps to it

    def submit(self, visit: Visit) -> None:
        """Queue all rollouts of a group."""
        visit.left = len(visit.lengths)
        cap = self._cap
        for rollout, length in enumerate(visit.lengths):
            now = length if cap is None else min(length, cap)
            self._queue.append((visit, rollout, now, length - now, visit.prompt_tokens, False))
        self._meter.advance(self._loop.time())
        self._meter.queued += visit.left
        if len(self._running) < self._max:
            self._look_soon()

    def abort(self, visit: Visit) -> None:
        """Take a group back: its rollouts leave at the next step boundary."""
        before = len(self._queue)
        self._queue = deque(each for each in self._queue if each[0] is not visit)
        self._carried = deque(each for each in self._carried if each[0] is not visit)
        self._meter.advance(self._loop.time())
        self._meter.queued -= before - len(self._queue)
        self._dead.add(visit)
        self._look_soon()

    def give(self, visits: Set[Visit], receive: Receive) -> None:
        """Hand the rollouts of groups over at the next step boundary, with what they have written.

        They leave their keys and values behind.
        """
        self._leaving = visits, receive
        self._look_soon()

    def join(self, queued: Sequence[Waiting], carried: Sequence[Waiting]) -> None:
        """Take over rollouts that another engine has handed over."""
        self._queue.extend(queued)
        self._carried.extend(carried)
        self._meter.advance(self._loop.time())
        self._meter.queued += len(queued)
        if len(self._running) < self._max:
            self._look_soon()

    def hold(self) -> float:
        """Stand still from the next step boundary on, and return its time, seconds.

        Each hold ends with a ``release`` of its own.
        """
        self._holds += 1
        if self._timer is None:
            return self._loop.time()
        steps = self._boundary() - self._count
        still_s = self._at_s + self._pace.span_s(len(self._running), self._context, steps)
        self._look_soon()
        return still_s

    def release(self) -> None:
        """Go on, once every hold is released."""
        self._holds -= 1
        if not self._holds and self._timer is None:
            self._at_s = self._loop.time()
            self._start_or_hold()

    def take_weights(self, version: int) -> None:
        """Go on with another version from the next step boundary; carried rollouts go on too."""
        count = self._boundary()
        self._version_sum += self.version * (count - self._marked)
        self._marked, self.version = count, version
        self._queue.extend(self._carried)
        self._meter.advance(self._loop.time())
        self._meter.queued += len(self._carried)
        self._carried.clear()
        if len(self._running) < self._max:
            self._look_soon()

    def _versions(self) -> float:
        return self._version_sum + self.version * (self._count - self._marked)

    def _boundary(self) -> float:
        """Return the count of steps at the first step boundary that is not past."""
        now = self._loop.time()
        if self._timer is None or now <= self._at_s:
            return self._count
        steps = self._pace.steps_until(len(self._running), self._context, now - self._at_s)
        return min(self._count + steps, self._goal)

    def _look_soon(self) -> None:
        """See to it that the engine looks at its queue at the next step boundary."""
        if self._timer is not None:
            goal = self._boundary()
            if goal < self._goal:
                self._set_timer(goal)
                if self._pace.continuous:  # this instant is a boundary
                    self._timer.cancel()
                    self._event()
        elif not self._holds:
            self._at_s = self._loop.time()
            self._start_or_hold()

    def _set_timer(self, goal: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        span = self._pace.span_s(len(self._running), self._context, goal - self._count)
        self._goal = goal
        self._timer = self._loop.call_at(self._at_s + span, self._event, context=self._nowhere)

    def _event(self) -> None:
        """Settle the steps since the last event, let finished rollouts go, and look around."""
        self._timer = None
        now = self._loop.time()
        running, goal = self._running, self._goal
        self._context += len(running) * (goal - self._count)
        self._count, self._at_s = goal, now
        self._meter.advance(now)
        before = len(running)
        while running and running[0][0] <= goal:
            self._leave(heapq.heappop(running), now)
        if self.on_end is not None and len(running) < before:
            self.on_end()
        self._start_or_hold()

    def _start_or_hold(self) -> None:
        now = self._loop.time()
        if self._dead:
            self._bury(now)
        if self._leaving is not None:
            self._hand_over(now, *self._leaving)
        if self._holds:
            return
        if not self._running and not self._queue and self._carried:
            self._queue.extend(self._carried)
            self._meter.advance(now)
            self._meter.queued += len(self._carried)
            self._carried.clear()
        while len(self._running) > 1 and self._context + len(self._running) > self._kv_tokens:
            self._evict(now)
        if self._queue:
            self._start(now)
        if self._running:
            goal = self._running[0][0]
            if self._kv_tokens < math.inf:
                goal = min(goal, self._count + self._steps_that_fit())
            self._set_timer(goal)
        elif not self._idle:
            self._idle = True
            self._meter.advance(now)
            self._meter.idle_engines += 1

    def _steps_that_fit(self) -> float:
        num = len(self._running)
        if num == 1:
            return math.inf
        return (self._kv_tokens - self._context) // num

    def _fits(self, waiting: Waiting) -> bool:
        """Whether a rollout may begin: its context, and one step of all that then run."""
        num = len(self._running)
        return not num or self._context + waiting[4] + num + 1 <= self._kv_tokens

    def _start(self, now: float) -> None:
        queue, running = self._queue, self._running
        free = min(self._max - len(running), len(queue))
        if free <= 0 or self._full:
            return
        before, versions, prefill = len(running), self._versions(), 0.0
        bounded = self._kv_tokens < math.inf
        for _ in range(free):
            if bounded and not self._fits(queue[0]):
                break
            waiting = queue.popleft()
            visit, rollout, length, _, context, lost = waiting
            self._order += 1
            heapq.heappush(running, (self._count + length, self._order, waiting, versions))
            self._context += context
            if lost:
                prefill += context
                visit.prompt_at = self.number
            elif context == visit.prompt_tokens:  # its first round
                visit.start_versions += self.version
                if visit.oldest is None:
                    visit.oldest = self.version
                if visit.prompt_at != self.number:
                    visit.prompt_at = self.number
                    prefill += context
            if self._recorder is not None:
                self._recorder.begin(self._name, _label(visit, rollout), now)
        meter, began = self._meter, len(running) - before
        meter.advance(now)
        meter.busy += began
        meter.queued -= began
        if began and self._idle:
            self._idle = False
            meter.idle_engines -= 1
        self._at_s = now + prefill * self._prefill_s

    def _leave(self, running: Running, now: float) -> None:
        visit, rollout, length, rest, context, _ = running[2]
        self._settle(running, length, now)
        self._full = False
        if rest > 0:
            more = rest if self._cap is None else min(rest, self._cap)
            self._carried.append((visit, rollout, more, rest - more, context + length, False))
            self.num_carried += 1
            return
        visit.left -= 1
        if visit.newest is None:
            visit.newest = self.version
        if not visit.left and not visit.done.done():
            visit.done.set_result(None)

    def _settle(self, running: Running, written: float, now: float) -> None:
        """Account for a rollout that stops running with ``written`` tokens of its round."""
        _, _, (visit, rollout, _, _, context, _), versions = running
        self._meter.busy -= 1
        self._context -= context + written
        self.num_tokens += written
        visit.written += written
        visit.token_versions += self._versions() - versions
        if self._recorder is not None:
            self._recorder.end(self._name, _label(visit, rollout), now)

    def _evict(self, now: float) -> None:
        """Send the rollout that began last back to the head of the queue."""
        last = max(self._running, key=_began)
        self._running.remove(last)
        heapq.heapify(self._running)
        self._meter.advance(now)
        self._queue.appendleft(self._cut(last, now))
        self._meter.queued += 1
        self._full = True
        self.num_evicted += 1

    def _written(self, running: Running) -> float:
        """Return the tokens of its round so far, which may round to -1e-16 where it only began."""
        return max(running[2][2] - (running[0] - self._count), 0.0)

    def _cut(self, running: Running, now: float) -> Waiting:
        """Stop a rollout in the middle of its round; it waits without its cache then."""
        visit, rollout, length, rest, context, _ = running[2]
        written = self._written(running)
        self._settle(running, written, now)
        return visit, rollout, length - written, rest, context + written, True

    def _take(self, visits: Set[Visit]) -> list[Running]:
        """Take the running rollouts of groups out, in the order in which they began."""
        taken = sorted((each for each in self._running if each[2][0] in visits), key=_began)
        if taken:
            self._running = [each for each in self._running if each[2][0] not in visits]
            heapq.heapify(self._running)
            self._full = False
        return taken

    def _bury(self, now: float) -> None:
        for each in self._take(self._dead):
            self._settle(each, self._written(each), now)
        self._dead.clear()

    def _hand_over(self, now: float, visits: Set[Visit], receive: Receive) -> None:
        self._leaving = None
        self._meter.advance(now)
        ran = [self._cut(each, now) for each in self._take(visits)]
        queued = [_without_cache(each) for each in self._queue if each[0] in visits]
        carried = [_without_cache(each) for each in self._carried if each[0] in visits]
        self._queue = deque(each for each in self._queue if each[0] not in visits)
        self._carried = deque(each for each in self._carried if each[0] not in visits)
        self._meter.queued -= len(queued)
        receive([*ran, *queued], carried)


def _without_cache(waiting: Waiting) -> Waiting:
    visit, rollout, length, rest, context, lost = waiting
    return visit, rollout, length, rest, context, lost or context > visit.prompt_tokens


def _began(running: Running) -> int:
    return running[1]


def _label(visit: Visit, rollout: int) -> str:
    return f"r{visit.index}" if len(visit.lengths) == 1 else f"r{visit.index}.{rollout}"
