"""The engine: requests in, completions out, one model forward a step.

A request's life: ``add`` puts it in the waiting line; ``step`` computes its prompt once, forks its
members onto the shared pages, draws one token for each running member and returns those that ended.
With ``speculation`` a step may draw several; they are the same tokens.
A member may be parked between rounds, and taken back and begun again elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
import torch

from lagzero.engine.attention import KVCache
from lagzero.engine.blocks import PagePool
from lagzero.engine.request import Completion, Request, Sequence
from lagzero.engine.runner import PolicyModel, cache_dtype, probe_kv_shapes, run
from lagzero.engine.sampler import sample, uniforms
from lagzero.engine.scheduler import Scheduler
from lagzero.engine.speculation import Speculation
from lagzero.engine.stopping import Decoder, final_text, finish_reason
from lagzero.errors import LagzeroError
from lagzero.types import Finish, sampled_tokens


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of one engine."""

    max_running: int = 128  # sequences decoded together
    page_size: int = 32  # tokens a page
    kv_cache_tokens: int = 65536  # in all sequences together
    prefill_chunk_tokens: int = 512  # prompt tokens computed in one step
    prefix_cache: bool = True
    round_tokens: int | None = None  # most tokens that a sequence writes in one round
    kv_on_update: Literal["keep", "recompute"] = "keep"  # what becomes of keys of the old weights
    kv_reserve: bool = False  # take the memory of the KV cache before it is used

    def __post_init__(self) -> None:
        if self.round_tokens is not None and self.round_tokens < 1:
            raise ValueError(f"round_tokens={self.round_tokens} is not >= 1")


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Totals since the engine was made.

    A request's prompt is counted once, however many members share it, when its first member gets a
    slot: ``num_prompt_tokens`` its ids, ``num_cached_tokens`` those of them whose keys and values
    were found in the prefix cache. Members that take over their group's prompt, and sequences that
    come back after preemption, add nothing to either. ``num_parked`` counts rounds that ended at
    ``round_tokens``. ``num_proposed`` counts tokens that were guessed and judged, ``num_accepted``
    those of them that saved a forward pass.
    """

    num_steps: int
    num_sampled_tokens: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    max_used_pages: int
    num_parked: int
    num_proposed: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """How many members of a request have not ended, and how many tokens those have sampled."""

    num_running: int
    num_waiting: int  # for a slot, for pages, or for the prompt that another member computes
    num_parked: int
    num_tokens: int


class Engine:
    """Continuous batching on one device. Not thread-safe: one thread calls it at a time."""

    def __init__(
        self,
        policy: PolicyModel,
        decoder: Decoder,
        limits: EngineLimits,
        version: int = 0,
        speculation: Speculation | None = None,
    ):
        self.policy = policy
        self._context_limit = policy.context_limit  # wanted for each token; a config looks long
        self.limits = limits
        self.version = version
        self._decoder = decoder
        self._speculation = speculation
        self._shapes = probe_kv_shapes(policy).shapes
        self._cache: KVCache | None = None
        if policy.native is not None:
            policy.native.weights_changed()  # since an engine before this one, perhaps
        num_pages = -(-limits.kv_cache_tokens // limits.page_size)
        self._scheduler = Scheduler(
            PagePool(num_pages, limits.page_size),
            limits.max_running,
            limits.prefill_chunk_tokens,
            limits.prefix_cache,
            limits.round_tokens,
            limits.kv_on_update,
        )
        self._finished: list[Completion] = []
        self._num_steps = 0
        self._num_sampled = 0
        self._max_used_pages = 0
        self._num_proposed = 0
        self._num_accepted = 0
        if limits.kv_reserve:
            self._cache = self._make_cache()

    def _make_cache(self) -> KVCache:
        pool = self._scheduler.pool
        kept = pool.num_pages, pool.page_size, cache_dtype(self.policy)
        cache = KVCache(self._shapes, *kept, self.policy.device)
        if self.limits.kv_reserve:
            cache.take(pool.num_pages)
        return cache

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do or return anything."""
        return bool(self._finished) or not self._scheduler.is_idle

    @property
    def counters(self) -> EngineCounters:
        """Totals since the engine was made."""
        s = self._scheduler
        return EngineCounters(
            self._num_steps,
            self._num_sampled,
            s.num_preemptions,
            s.num_prompt_tokens,
            s.num_cached_tokens,
            self._max_used_pages,
            s.num_parked,
            self._num_proposed,
            self._num_accepted,
        )

    @property
    def unfinished(self) -> dict[int, Unfinished]:
        """Where the unfinished members of each request are, by request id."""
        scheduler = self._scheduler
        found: dict[int, list[int]] = {}
        for place, line in enumerate((scheduler.running, scheduler.waiting, scheduler.parked)):
            for seq in line:
                counts = found.setdefault(seq.request.id, [0, 0, 0, 0])
                counts[place] += 1
                counts[1] += len(seq.followers)
                counts[3] += sum(member.num_new for member in (seq, *seq.followers))
        return {request_id: Unfinished(*counts) for request_id, counts in found.items()}

    def add(self, request: Request) -> None:
        """Accept a request. Members that have no more to sample finish at the next ``step``.

        Raises LagzeroError for an empty prompt, and when one sequence of this request, at its
        longest, would not fit the whole KV cache.
        """
        if not request.prompt_ids:
            raise LagzeroError(f"request {request.id}: the prompt has no tokens")
        unfinished: list[Sequence] = []
        finished: list[Completion] = []
        for seq in Sequence.all_of(request):
            ended = finish_reason(seq, self._decoder, self._context_limit)
            if ended is None:
                unfinished.append(seq)
            else:
                finished.append(self._completion(seq, ended))
        longest = min(
            len(request.prompt_ids) + request.sampling.max_new_tokens, self._context_limit
        )
        if unfinished and longest > self._scheduler.pool.num_pages * self.limits.page_size:
            raise LagzeroError(
                f"request {request.id} may grow to {longest} tokens, but the KV cache holds "
                f"{self.limits.kv_cache_tokens}; raise engine.kv_cache_tokens or lower "
                "rollout.max_new_tokens"
            )
        self._finished.extend(finished)
        self._scheduler.add(unfinished, self.version)

    def step(self) -> list[Completion]:
        """Compute one forward pass and return the members that ended.

        Raises NonFiniteLogits, and OutOfPages when a sequence that runs alone does not fit. After
        any exception the engine must be ``reset``.
        """
        finished, self._finished = self._finished, []
        scheduler = self._scheduler
        if scheduler.is_idle:
            return finished
        proposals = {}
        if self._speculation is not None:
            proposals = self._speculation.propose(scheduler.running, self._context_limit)
        schedule = scheduler.schedule(self.version, proposals)
        if self._cache is None:
            self._cache = self._make_cache()
        self._cache.take(scheduler.pool.num_begun)
        self._cache.copy_pages(schedule.copies)
        logits = run(self.policy, self._cache, schedule.work)
        self._num_steps += 1
        self._max_used_pages = max(self._max_used_pages, scheduler.pool.num_used)
        drawing: list[tuple[Sequence, tuple[int, ...]]] = []
        rows: list[int] = []
        row = 0
        for work in schedule.work:
            scheduler.computed(work.sequence, work.num_own, self.version)
            if work.sequence.num_pending == 0:
                for seq in (work.sequence, *scheduler.fork(work.sequence)):
                    drawing.append((seq, work.proposed))
                    rows.extend(range(row, row + work.num_sampling))
                row += work.num_sampling
        if drawing:
            if len(rows) != logits.shape[0]:
                logits = logits[torch.tensor(rows, device=logits.device)]
            finished += self._draw(logits, drawing)
        return finished

    def _draw(
        self, logits: torch.Tensor, drawing: list[tuple[Sequence, tuple[int, ...]]]
    ) -> list[Completion]:
        """Sample behind each sequence and each id proposed for it; return the members that end."""
        rows = [(s, s.num_new + ahead) for s, ids in drawing for ahead in range(1 + len(ids))]
        seeds = np.array([s.request.seeds[s.member] for s, _ in rows], np.uint64)
        places = np.array([place for _, place in rows], np.uint64)
        with torch.inference_mode():
            ids, logprobs = sample(
                logits,
                [s.request.sampling for s, _ in rows],
                uniforms(seeds, places),
                exact=self.policy.exact,
                native=self.policy.native is not None,
            )
        drawn = zip(ids, logprobs, strict=True)
        finished: list[Completion] = []
        for seq, proposed in drawing:
            ended = self._append(seq, proposed, list(islice(drawn, 1 + len(proposed))))
            if ended is not None:
                finished.append(self._completion(seq, ended))
                self._scheduler.remove(seq)
            elif seq.num_new >= seq.round_end:
                self._scheduler.park(seq)
        return finished

    def _append(
        self, seq: Sequence, proposed: tuple[int, ...], drawn: list[tuple[int, float]]
    ) -> Finish | None:
        """Append what was drawn until it is not what was proposed there, or the sequence ends.

        Return why it ends, or None while it goes on.
        """
        ended, before = None, seq.num_new
        for (token, logprob), guess in zip(drawn, (*proposed, None), strict=True):
            seq.ids.append(token)
            seq.logprobs.append(logprob)
            seq.versions.append(self.version)
            ended = finish_reason(seq, self._decoder, self._context_limit)
            if ended is not None or token != guess:
                break
        kept = seq.num_new - before - 1
        self._num_sampled += kept + 1
        if proposed:
            self._scheduler.judged(seq, kept, self.version)
            seq.num_kept = kept
            self._num_proposed += len(proposed)
            self._num_accepted += kept
        return ended

    def _completion(self, seq: Sequence, finish: Finish) -> Completion:
        tokens = sampled_tokens(seq.ids[seq.num_prompt :], seq.logprobs, seq.versions)
        text = final_text(seq, self._decoder)
        return Completion(seq.request.id, seq.member, tokens, text, finish, self.version)

    def abort(self, request_ids: Iterable[int]) -> list[Completion]:
        """Take requests back and return all of their members that ``step`` has not returned.

        Unfinished ones come with what they sampled so far; see ``Request.begun`` for how to go on.
        """
        wanted = set(request_ids)
        stopped = [c for c in self._finished if c.request_id in wanted]
        self._finished = [c for c in self._finished if c.request_id not in wanted]
        for seq in self._scheduler.listed():
            if seq.request.id not in wanted:
                continue
            for member in (seq, *seq.followers):
                stopped.append(self._completion(member, Finish.ABORT))
            self._scheduler.remove(seq)
        return stopped

    def reset(self) -> None:
        """Forget every request, and all keys and values, as must be done when a step has raised."""
        for seq in self._scheduler.listed():
            self._scheduler.remove(seq)
        self._finished = []
        self.suspend(release=True)

    def weights_changed(self, version: int) -> None:
        """Announce that the policy's weights are now those of ``version``, and end the round.

        Cached prefixes of the old weights are no longer found, and sequences that have sampled
        nothing here compute all anew. The others go on under the new version, which tags their next
        tokens; with ``kv_on_update`` "keep" they keep their keys and values, with "recompute" they
        compute them again, so that their next tokens depend on the new weights alone. What was
        sampled keeps its log-probs and versions in both.
        """
        self.version = version
        self._scheduler.weights_changed()
        if self.policy.native is not None:
            self.policy.native.weights_changed()

    def forget_prefixes(self) -> None:
        """Let later requests find no cached prefix. Nothing else changes, and no round ends."""
        self._scheduler.forget_prefixes()

    def suspend(self, release: bool) -> None:
        """Stand by between two steps; the next ``step`` goes on and nothing is lost.

        With ``release``, every sequence gives up its pages and the KV cache's memory is given back.
        The next steps take it again and compute the sequences' keys and values anew, under the
        weights of then. Without, all stays in place.
        """
        if release:
            self._scheduler.drop_all_pages()
            self._cache = None
            if self.policy.native is not None:
                self.policy.native.release()
            if self._speculation is not None:
                self._speculation.proposer.release()

    def release_memory(self) -> None:
        """Give the KV cache's memory back while no sequence needs it. Raises if one does."""
        if not self._scheduler.is_idle:
            raise LagzeroError("the KV cache cannot be released while sequences are unfinished")
        self.suspend(release=True)

    def check_integrity(self) -> None:
        """Assert that pages, references and sequences agree."""
        self._scheduler.check_integrity()
