"""Speculative decoding: the next tokens are guessed cheaply, and judged in one forward pass.

The engine draws the token at each place with a random number that belongs to the place. So it can
draw behind every proposed id in the same pass, with the very numbers that it would use one pass
after the other, and keep what it drew up to and including the first token that is not the proposed
one. Whatever is proposed, the tokens, log-probs and versions are those of decoding without
proposals, given the same logits: nothing is resampled, and no correction is needed.

A proposal x is kept with the policy's probability p(x), which is what the rejection sampling of
Leviathan et al. 2023 (arXiv 2211.17192) gives for a proposal that is certain: the sum over y of
min(p(y), [x = y]). A draft model draws its proposals with the place's number too, so they are kept
whenever the number falls into the same token's interval of both distributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lagzero.engine.attention import KVCache
from lagzero.engine.blocks import PagePool
from lagzero.engine.request import Sequence
from lagzero.engine.runner import PolicyModel, cache_dtype, probe_kv_shapes, run
from lagzero.engine.sampler import NonFiniteLogits, sample, uniforms
from lagzero.engine.scheduler import Work
from lagzero.errors import LagzeroError


class Proposer(Protocol):
    """Guesses how sequences go on."""

    def propose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return at most ``limits[seq]`` ids for each sequence, which may be none."""
        ...

    def release(self) -> None:
        """Give memory back; what it held is made again when needed."""
        ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """When to guess, and how far ahead.

    While at most ``max_running`` sequences run, each is proposed up to ``num_tokens`` tokens. One
    more than twice as many as the last time were kept is enough: where guesses fail, little is
    computed in vain.
    """

    proposer: Proposer
    num_tokens: int
    max_running: int

    def propose(
        self, running: Seq[Sequence], context_limit: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return what may follow the decoding sequences, within their limits of tokens."""
        if len(running) > self.max_running:
            return {}
        limits: dict[Sequence, int] = {}
        for seq in running:
            most = min(seq.round_end, seq.request.sampling.max_new_tokens) - seq.num_new
            # A pass yields one token more than are proposed.
            room = min(self._wanted(seq), most - 1, context_limit - len(seq.ids) - 1)
            if seq.num_pending == 1 and not seq.followers and room > 0:
                limits[seq] = room
        proposals = self.proposer.propose(limits)
        return {seq: tuple(ids) for seq, ids in proposals.items() if ids}

    def _wanted(self, seq: Sequence) -> int:
        kept = seq.num_kept
        return self.num_tokens if kept is None else min(self.num_tokens, 2 * kept + 1)


class _Index:
    """Where a growing text last held each run of ``size`` ids that something follows."""

    def __init__(self, size: int):
        self._size = size
        self._num_read = 0
        self._after: dict[tuple[int, ...], int] = {}

    def read(self, ids: list[int]) -> None:
        """Take in what has been appended."""
        for end in range(max(self._num_read, self._size), len(ids)):
            self._after[tuple(ids[end - self._size : end])] = end
        self._num_read = len(ids)

    def find(self, key: tuple[int, ...]) -> int | None:
        """Return the place behind the latest ``key``."""
        return self._after.get(key)


class NgramProposer:
    """Copies what followed the newest ``match`` ids where they stood before.

    It looks in the sequence's own prompt and response first, then in those of the other members of
    its request, ended ones too. A copy may run into itself, so that a loop is continued.
    Source of the idea: Saxena 2023, "Prompt Lookup Decoding".
    """

    def __init__(self, match: int):
        self._match = match
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """See ``Proposer``."""
        texts = {member: None for seq in limits for member in (seq, *seq.group)}
        self._indices = {m: self._indices.get(m) or _Index(self._match) for m in texts}
        for member, index in self._indices.items():
            index.read(member.ids)
        return {seq: self._copy(seq, limit) for seq, limit in limits.items()}

    def _copy(self, seq: Sequence, limit: int) -> list[int]:
        key = tuple(seq.ids[-self._match :])
        for source in (seq, *seq.group):
            begin = self._indices[source].find(key)
            if begin is not None:
                copied = source.ids[begin : begin + limit]
                if source is seq:
                    for at in range(len(copied), limit):
                        copied.append(copied[at - (len(seq.ids) - begin)])
                return copied
        return []

    def release(self) -> None:
        """See ``Proposer``."""
        self._indices = {}


class DraftProposer:
    """Lets a smaller model with the same tokens write ahead, in a KV cache of its own.

    Each sequence has a mirror, with keys of what it held when it was last proposed for; those of
    ids that turned out otherwise are computed anew. ``num_ids`` is the size of the policy's
    vocabulary, of whose ids alone the draft draws.
    """

    def __init__(self, draft: PolicyModel, num_pages: int, page_size: int, num_ids: int):
        self._draft = draft
        self._num_ids = num_ids
        self._shapes = probe_kv_shapes(draft).shapes
        self._pool = PagePool(num_pages, page_size)
        self._cache: KVCache | None = None
        self._mirrors: dict[Sequence, Sequence] = {}

    def propose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """See ``Proposer``. Raises LagzeroError when the draft's logits are not finite."""
        for gone in self._mirrors.keys() - limits.keys():
            for page in self._mirrors.pop(gone).pages:
                self._pool.release(page)
        mirrors: dict[Sequence, Sequence] = {}
        ends: dict[Sequence, int] = {}
        for seq, limit in limits.items():
            # The last id that a draft writes is not computed.
            end = min(len(seq.ids) + limit, self._draft.context_limit + 1)
            mirror = self._mirror(seq, end) if end > len(seq.ids) else None
            if mirror is not None:
                mirrors[seq], ends[mirror] = mirror, end
        while writing := [mirror for mirror, end in ends.items() if len(mirror.ids) < end]:
            self._write(writing)
        return {seq: mirror.ids[len(seq.ids) :] for seq, mirror in mirrors.items()}

    def _mirror(self, seq: Sequence, end: int) -> Sequence | None:
        """Return a sequence's mirror, up to date and with pages for ``end`` ids, or None if there
        are not enough."""
        mirror = self._mirrors.setdefault(seq, Sequence(seq.request, seq.member, []))
        kept = min(mirror.num_computed, len(seq.ids) - 1)
        while mirror.ids[:kept] != seq.ids[:kept]:
            kept -= 1
        mirror.ids, mirror.num_computed = list(seq.ids), kept
        missing = -(-end // self._pool.page_size) - len(mirror.pages)
        if missing > self._pool.num_available:
            return None
        mirror.pages += [self._pool.allocate() for _ in range(missing)]
        return mirror

    def _write(self, writing: list[Sequence]) -> None:
        """Append one token to each mirror."""
        if self._cache is None:
            pool, draft = self._pool, self._draft
            kept = pool.num_pages, pool.page_size, cache_dtype(draft)
            self._cache = KVCache(self._shapes, *kept, draft.device)
        writing.sort(key=lambda mirror: mirror.num_pending > 1)
        works = [Work(m, m.num_computed, m.num_pending) for m in writing]
        logits = run(self._draft, self._cache, works)[:, : self._num_ids]
        seeds = np.array([m.request.seeds[m.member] for m in writing], np.uint64)
        places = np.array([m.num_new for m in writing], np.uint64)
        samplings = [m.request.sampling for m in writing]
        try:
            with torch.inference_mode():
                ids, _ = sample(logits, samplings, uniforms(seeds, places))
        except NonFiniteLogits as error:
            raise LagzeroError(
                "engine.speculate.path: the draft model returned non-finite logits; give another, "
                "or set engine.speculate.kind: ngram"
            ) from error
        for mirror, token in zip(writing, ids, strict=True):
            mirror.num_computed = len(mirror.ids)
            mirror.ids.append(token)

    def release(self) -> None:
        """See ``Proposer``."""
        for mirror in self._mirrors.values():
            for page in mirror.pages:
                self._pool.release(page)
        self._mirrors = {}
        self._cache = None
