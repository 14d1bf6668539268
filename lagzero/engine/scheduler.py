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
        work: list[Work] = []
        for seq in [s for s in self.running if s.num_pending == 1]:
            if seq in self.running and self._reserve(seq):
                work.append(Work(seq, seq.num_computed, 1))
        work = [w for w in work if w.sequence in self.running]  # a later one may preempt an earlier
        budget = self.chunk_tokens
        for seq in self.running:
            count = min(seq.num_pending, budget)
            if seq.num_pending > 1 and count:
                work.append(Work(seq, seq.num_computed, count))
                budget -= count
        self._admit(work, budget, version)
        return Schedule(tuple(work), tuple(self._copies))

    def _admit(self, work: list[Work], budget: int, version: int) -> None:
        """Start waiting sequences while slots, budget and pages for all their ids last.

        Having all its pages, a prefill never preempts; and what was preempted for one page does
        not come back to be preempted again in the next step.
        """
        while self.waiting and len(self.running) < self.max_running and budget > 0:
            seq = self.waiting[0]
            if not seq.pages:
                self._take_cached_prefix(seq, version)
            try:
                self._give_pages(seq, seq.num_pending)
            except OutOfPages:
                if self.running:
                    return
                others = [s for s in self.waiting if s is not seq and s.pages]
                if not others:
                    raise
                self._drop_pages(others[-1])
                continue
            self.waiting.popleft()
            self.running.append(seq)
            if not seq.is_counted:  # so it comes with its prompt alone
                seq.is_counted = True
                self.num_prompt_tokens += seq.num_prompt
                self.num_cached_tokens += seq.num_computed
            count = min(seq.num_pending, budget)
            work.append(Work(seq, seq.num_computed, count))
            budget -= count

    def _take_cached_prefix(self, seq: Sequence, version: int) -> None:
        """Share the cached pages that hold a prefix of ``seq``; its last id is always computed."""
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

    def _reserve(self, seq: Sequence) -> bool:
        """Give a decoding sequence its page, preempting if need be. False if it was preempted."""
        while True:
            try:
                self._give_pages(seq, 1)
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
        for page in reversed(seq.pages):  # a prefix is found from its start, so that goes last
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
            follower.is_counted = True
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
        """Forget a finished or aborted sequence, and its followers with it."""
        (self.running if seq in self.running else self.waiting).remove(seq)
        self._drop_pages(seq)

    def weights_changed(self) -> None:
        """Let only running sequences keep keys and values of the old version."""
        for seq in self.waiting:
            self._drop_pages(seq)
        for seq in self.running:
            seq.nameable = False
        self.pool.forget_all()

    def check_integrity(self) -> None:
        """Assert the invariants of pages and sequences."""
        everyone = (*self.running, *self.waiting)
        self.pool.check_integrity([s.pages for s in everyone])
        assert len(set(map(id, everyone))) == len(everyone), "a sequence is listed twice"
        assert len(self.running) <= self.max_running
        for seq in everyone:
            assert seq.num_computed <= len(seq.pages) * self.pool.page_size
