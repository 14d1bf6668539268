"""Who computes what in the next engine step: continuous batching, chunked prefill, preemption.

Every running sequence has ids without keys in the cache. One such id means decoding; more mean
prefill, whether of a new prompt or of a sequence that lost its pages. Decoding goes first; prefill
takes what is left of ``chunk_tokens``; a free slot is filled at once from the waiting line.

With ``round_tokens``, a sequence that has written so many tokens in one round gives its slot away
and is parked, with its pages, until the round ends for all: when the weights change, or when there
is nothing else to do. Source of such partial rollouts: Kimi k1.5 (2025), arXiv 2501.12599.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lagzero.engine.blocks import OutOfPages, PagePool, chain_hash
from lagzero.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Compute ``count`` ids of a sequence, the last of them ``proposed``: not (yet) its own.

    If its own are all of them, its next token is sampled, and one behind each proposed id.
    """

    sequence: Sequence
    start: int
    count: int
    proposed: tuple[int, ...] = ()

    @property
    def num_own(self) -> int:
        """How many of the ids the sequence has."""
        return self.count - len(self.proposed)

    @property
    def ids(self) -> list[int]:
        """What is computed."""
        return [*self.sequence.ids[self.start : self.start + self.num_own], *self.proposed]

    @property
    def num_sampling(self) -> int:
        """How many of the ids, at the end, a token is sampled behind."""
        ends = self.start + self.num_own == len(self.sequence.ids)
        return 1 + len(self.proposed) if ends else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of one step, decoding first, and the page copies that must precede it."""

    work: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...]  # (from page, to page)


def _led(line: Iterable[Sequence]) -> list[Sequence]:
    """Return ``line`` with members of one request that have no pages behind their shortest.

    That one, at the place of the first of them, computes the prompt for all; see ``fork``.
    """
    groups: dict[int, list[Sequence]] = {}
    for seq in line:
        key = id(seq) if seq.pages else id(seq.request)
        groups.setdefault(key, []).extend((seq, *seq.followers))
    leaders: list[Sequence] = []
    for members in groups.values():
        leader = min(members, key=lambda seq: seq.num_new)
        for seq in members:
            seq.followers = []
        leader.followers = [seq for seq in members if seq is not leader]
        leaders.append(leader)
    return leaders


class Scheduler:
    """Owns the waiting line, the running set, the parked ones and the page tables."""

    def __init__(
        self,
        pool: PagePool,
        max_running: int,
        chunk_tokens: int,
        use_prefix_cache: bool,
        round_tokens: int | None = None,
        kv_on_update: Literal["keep", "recompute"] = "keep",
    ):
        self.pool = pool
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.use_prefix_cache = use_prefix_cache
        self.round_tokens = round_tokens
        self.kv_on_update = kv_on_update
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.num_preemptions = 0
        self.num_parked = 0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self._copies: list[tuple[int, int]] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is no sequence at all."""
        return not (self.running or self.waiting or self.parked)

    def listed(self) -> list[Sequence]:
        """Return all sequences but followers, which are behind their leaders."""
        return [*self.running, *self.waiting, *self.parked]

    def add(self, members: list[Sequence], version: int) -> None:
        """Put the members of a new request at the end of the line; park those whose round ended.

        Tokens of this version that a member comes with were written in the round that goes on.
        """
        for seq in members:
            self._start_round(seq, seq.num_sampled_by(version))
        self.parked.extend(seq for seq in members if seq.num_new == seq.round_end)
        self.waiting.extend(_led([seq for seq in members if seq.num_new < seq.round_end]))

    def schedule(
        self, version: int, proposals: Mapping[Sequence, tuple[int, ...]] | None = None
    ) -> Schedule:
        """Choose the next step's work and give it pages. Raises OutOfPages if one sequence alone
        cannot fit the pool.

        ``proposals`` are ids that may follow those of decoding sequences. They take pages that are
        free, and none that another sequence has.
        """
        if self.parked and not self.running and not self.waiting:
            self._new_round()
        self._copies = []
        work: list[Work] = []
        for seq in [s for s in self.running if s.num_pending == 1]:
            if seq in self.running and self._reserve(seq):
                work.append(Work(seq, seq.num_computed, 1))
        work = [w for w in work if w.sequence in self.running]  # a later one may preempt an earlier
        if proposals:
            work = [self._extended(w, proposals.get(w.sequence, ())) for w in work]
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
                if self._take_pages(self.parked):
                    continue
                if self.running:
                    return
                if not self._take_pages([s for s in self.waiting if s is not seq]):
                    raise
                continue
            self.waiting.popleft()
            self.running.append(seq)
            if not seq.is_counted:
                seq.is_counted = True
                self.num_prompt_tokens += seq.num_prompt
                self.num_cached_tokens += min(seq.num_computed, seq.num_prompt)
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
                if self._take_pages(self.parked) or self._take_pages(self.waiting):
                    continue
                victim = self.running[-1]
                if victim is seq and len(self.running) == 1:
                    raise
                self._preempt(victim)
                if victim is seq:
                    return False

    def _extended(self, work: Work, proposed: tuple[int, ...]) -> Work:
        """Let a decoding sequence compute proposed ids too, if there are pages for them."""
        count = work.count + len(proposed)
        try:
            self._give_pages(work.sequence, count)
        except OutOfPages:
            return work
        return Work(work.sequence, work.start, count, proposed)

    def _take_pages(self, line: list[Sequence] | deque[Sequence]) -> bool:
        """Take all pages of the last in a line that has some. False if none has."""
        holder = next((s for s in reversed(line) if s.pages), None)
        if holder is None:
            return False
        self._drop_pages(holder)
        return True

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

    def computed(self, seq: Sequence, count: int, version: int) -> None:
        """Record that the next ``count`` ids of a sequence have keys; name the pages they fill."""
        seq.num_computed += count
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

    def judged(self, seq: Sequence, kept: int, version: int) -> None:
        """Record that it kept the first of its proposed ids; free the pages of the others alone."""
        self.computed(seq, kept, version)
        while len(seq.pages) > -(-len(seq.ids) // self.pool.page_size):
            self.pool.release(seq.pages.pop())

    def fork(self, seq: Sequence) -> list[Sequence]:
        """Let the followers share the pages of the finished prompt.

        Those that have sampled nothing run at once, while there are slots; they are returned. The
        others wait with the shared pages. They compute the rest of their own tokens, or, if they
        have none, the prompt's last id again.
        """
        started: list[Sequence] = []
        held: list[Sequence] = []
        size, num_prompt = self.pool.page_size, seq.num_prompt
        if seq.followers and num_prompt % size and seq.num_named > num_prompt // size:
            # It ends with ids of the leader. A follower may be its only holder when it writes its
            # own there, and would not copy it then.
            self.pool.forget(seq.pages[num_prompt // size])
        for follower in seq.followers:
            follower.pages = [self.pool.share(p) for p in seq.pages[: -(-num_prompt // size)]]
            if seq.num_named <= num_prompt // size:
                follower.num_named, follower.name = seq.num_named, seq.name
            follower.nameable = seq.nameable
            follower.is_counted = True
            if not follower.num_new and len(self.running) < self.max_running:
                follower.num_computed = num_prompt
                self.running.append(follower)
                started.append(follower)
            else:
                follower.num_computed = min(num_prompt, len(follower.ids) - 1)
                held.append(follower)
        seq.followers = []
        self.waiting.extendleft(reversed(held))
        return started

    def park(self, seq: Sequence) -> None:
        """Take a running sequence out until its round ends; it keeps its pages while they last."""
        self.num_parked += 1
        self.running.remove(seq)
        self.parked.append(seq)

    def _start_round(self, seq: Sequence, written: int = 0) -> None:
        most, size = seq.request.sampling.max_new_tokens, self.round_tokens
        if size is None:
            seq.round_end = most  # there a sequence ends and is never parked
        else:
            seq.round_end = seq.num_new + (-written % size if written else size)

    def _new_round(self) -> None:
        """Put the parked back in line, before what has not begun, and start a round for all.

        Those that hold pages come first: behind one that waits for pages they would only keep them.
        """
        begun = [seq for seq in (*self.waiting, *self.parked) if seq.num_new]
        begun.sort(key=lambda seq: not seq.pages)
        fresh = [seq for seq in self.waiting if not seq.num_new]
        self.waiting = deque(_led([*begun, *fresh]))
        self.parked = []
        for seq in self.listed():
            for member in (seq, *seq.followers):
                self._start_round(member)

    def remove(self, seq: Sequence) -> None:
        """Forget a finished or aborted sequence, and its followers with it."""
        for line in (self.running, self.waiting, self.parked):
            if seq in line:
                line.remove(seq)
                break
        self._drop_pages(seq)

    def weights_changed(self) -> None:
        """End the round. What has sampled here keeps its keys and values or, with ``kv_on_update``
        "recompute", computes them anew, as what has not always does."""
        if self.kv_on_update == "recompute":
            self.drop_all_pages()
        for seq in self.waiting:
            if not (seq.num_sampled_here and seq.num_pending == 1):  # else its round ended before
                self._drop_pages(seq)
        self.forget_prefixes()
        self._new_round()

    def forget_prefixes(self) -> None:
        """Let nobody find content that was computed so far; who holds pages keeps them."""
        for seq in self.listed():
            seq.nameable = not seq.pages
        self.pool.forget_all()

    def drop_all_pages(self) -> None:
        """Take every page and forget all content. What ran is first in line to compute it anew."""
        for seq in self.listed():
            self._drop_pages(seq)
        self.waiting = deque(_led([*self.running, *self.waiting]))
        self.running = []
        self.pool.begin_again()

    def check_integrity(self) -> None:
        """Assert the invariants of pages and sequences."""
        listed = self.listed()
        followers = [f for seq in listed for f in seq.followers]
        self.pool.check_integrity([s.pages for s in listed])
        everyone = set(map(id, (*listed, *followers)))
        assert len(everyone) == len(listed) + len(followers), "a sequence is listed twice"
        assert len(self.running) <= self.max_running
        assert not any(f.pages or f.followers or f.num_computed for f in followers)
        for seq in listed:
            assert seq.num_computed <= len(seq.pages) * self.pool.page_size
            assert seq.num_computed < len(seq.ids)
            assert seq.num_new <= seq.request.sampling.max_new_tokens
            assert len(seq.logprobs) == len(seq.versions) == seq.num_new
        for seq in self.parked:
            assert not seq.followers
            assert seq.num_pending == 1 or not seq.pages, "parked in the middle of its prompt"
