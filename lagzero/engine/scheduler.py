"""Who computes what in the next engine step: continuous batching, chunked prefill, preemption.

Every running sequence has ids without keys in the cache. One such id means decoding; more mean
prefill, whether of a new prompt or of a sequence that lost its pages. Decoding goes first; prefill
takes what is left of ``chunk_tokens``; a free slot is filled at once from the waiting line.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lagzero.engine.blocks import OutOfPages, PagePool, chain_hash
from lagzero.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Compute ``count`` ids of a sequence; if that is all of them, its next token is sampled."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of one step, decoding first, and the page copies that must precede it."""

    work: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...]  # (from page, to page)


class Scheduler:
    """Owns the waiting line, the running set and the page tables."""

    def __init__(self, pool: PagePool, max_running: int, chunk_tokens: int, use_prefix_cache: bool):
        self.pool = pool
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.use_prefix_cache = use_prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self._copies: list[tuple[int, int]] = []

    def schedule(self, version: int) -> Schedule:
        """Choose the next step's work and give it pages. Raises OutOfPages if one sequence alone
        cannot fit the pool."""
        self._copies = []
        budget = self.chunk_tokens
        work: list[Work] = []
        for seq in [s for s in self.running if s.num_pending == 1]:
            if seq in self.running and self._reserve(seq, 1):
                work.append(Work(seq, seq.num_computed, 1))
        work = [w for w in work if w.sequence in self.running]  # a later one may preempt an earlier
        for seq in [s for s in self.running if s.num_pending > 1]:
            count = min(seq.num_pending, budget)
            if count and seq in self.running and self._reserve(seq, count):
                work.append(Work(seq, seq.num_computed, count))
                budget -= count
        budget = self._admit(work, budget, version)
        live = set(map(id, self.running))
        return Schedule(tuple(w for w in work if id(w.sequence) in live), tuple(self._copies))

    def _admit(self, work: list[Work], budget: int, version: int) -> int:
        while self.waiting and len(self.running) < self.max_running and budget > 0:
            seq = self.waiting[0]
            if not seq.pages:
                self._take_cached_prefix(seq, version)
            count = min(seq.num_pending, budget)
            try:
                self._give_pages(seq, count)
            except OutOfPages:
                if not work and not self.running:
                    others = [s for s in self.waiting if s is not seq and s.pages]
                    if not others:
                        raise
                    self._drop_pages(others[-1])
                    continue
                break
            self.waiting.popleft()
            self.running.append(seq)
            work.append(Work(seq, seq.num_computed, count))
            budget -= count
        return budget

    def _take_cached_prefix(self, seq: Sequence, version: int) -> None:
        """Share the cached pages that hold a prefix of ``seq``; its last id is always computed."""
        self.num_prompt_tokens += len(seq.ids)
        if not (self.use_prefix_cache and seq.nameable):
            return
        size = self.pool.page_size
        while (seq.num_named + 1) * size < len(seq.ids):
            start = seq.num_named * size
            name = chain_hash(version, seq.name, seq.ids[start : start + size])
            page = self.pool.find(name)
            if page is None:
                break
            seq.pages.append(self.pool.share(page))
            seq.name, seq.num_named = name, seq.num_named + 1
        seq.num_computed = seq.num_named * size
        self.num_cached_tokens += seq.num_computed

    def _reserve(self, seq: Sequence, count: int) -> bool:
        """Give a running sequence pages, preempting if need be. False if it was itself preempted."""
        while True:
            try:
                self._give_pages(seq, count)
                return True
            except OutOfPages:
                holder = next((s for s in reversed(self.waiting) if s.pages), None)
                if holder is not None:
                    self._drop_pages(holder)
                    continue
                victim = self.running[-1]
                if victim is seq and len(self.running) == 1:
                    raise
                self._preempt(victim)
                if victim is seq:
                    return False

    def _give_pages(self, seq: Sequence, count: int) -> None:
        """Make the pages of the next ``count`` ids exist and be the sequence's own."""
        size = self.pool.page_size
        first = seq.num_computed // size
        needed = -(-(seq.num_computed + count) // size)
        shared = [i for i in range(first, len(seq.pages)) if self.pool.is_shared(seq.pages[i])]
        if self.pool.num_available < needed - len(seq.pages) + len(shared):
            raise OutOfPages
        for i in shared:
            old, new = seq.pages[i], self.pool.allocate()
            self._copies.append((old, new))
            seq.pages[i] = new
            self.pool.release(old)
        while len(seq.pages) < needed:
            seq.pages.append(self.pool.allocate())

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(seq)
        self._drop_pages(seq)
        self.waiting.appendleft(seq)

    def _drop_pages(self, seq: Sequence) -> None:
        self._copies = [c for c in self._copies if c[1] not in seq.pages]
        for page in seq.pages:
            self.pool.release(page)
        seq.pages, seq.num_computed, seq.num_named, seq.name = [], 0, 0, b""
        seq.nameable = True

    def computed(self, work: Work, version: int) -> None:
        """Record that a piece of work is done and name the pages that it filled."""
        seq = work.sequence
        seq.num_computed += work.count
        size = self.pool.page_size
        while (
            self.use_prefix_cache
            and seq.nameable
            and (seq.num_named + 1) * size <= seq.num_computed
        ):
            start = seq.num_named * size
            seq.name = chain_hash(version, seq.name, seq.ids[start : start + size])
            self.pool.remember(seq.pages[seq.num_named], seq.name)
            seq.num_named += 1

    def fork(self, seq: Sequence) -> list[Sequence]:
        """Let the followers share the finished prompt. Those that have a slot run at once.

        The others wait with the shared pages and compute only the prompt's last id again.
        Returns those that run.
        """
        started: list[Sequence] = []
        held: list[Sequence] = []
        for follower in seq.followers:
            follower.pages = [self.pool.share(page) for page in seq.pages]
            follower.num_named, follower.name = seq.num_named, seq.name
            follower.nameable = seq.nameable
            follower.num_computed = seq.num_computed
            if len(self.running) < self.max_running:
                self.running.append(follower)
                started.append(follower)
            else:
                follower.num_computed -= 1
                held.append(follower)
        seq.followers = []
        self.waiting.extendleft(reversed(held))
        return started

    def remove(self, seq: Sequence) -> None:
        """Forget a finished or aborted sequence. Its followers, if any, go on under the first."""
        if seq.followers:
            heir, *rest = seq.followers
            heir.followers, seq.followers = rest, []
            self.waiting.appendleft(heir)
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._drop_pages(seq)

    def weights_changed(self) -> None:
        """Stop cached content of the old version from being found; running sequences keep theirs."""
        self.pool.forget_all()
        for seq in (*self.running, *self.waiting):
            seq.nameable = seq.nameable and not seq.pages

    def check_integrity(self) -> None:
        """Assert the invariants of pages and sequences."""
        everyone = (*self.running, *self.waiting)
        self.pool.check_integrity([s.pages for s in everyone])
        assert len(set(map(id, everyone))) == len(everyone), "a sequence is listed twice"
        assert len(self.running) <= self.max_running
        for seq in everyone:
            assert seq.num_computed <= len(seq.pages) * self.pool.page_size
