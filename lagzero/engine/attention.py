"""The paged KV cache and attention over it.

Letters: P pages of the cache, S tokens a page, K key/value heads, H query heads, D head size, T
tokens of the flat row, B decoding sequences, W pages of the longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lagzero.engine.scheduler import Work
from lagzero.native.kernels import cache_shape
from lagzero.numerics.exact import BLOCK, ExactNumerics, Kernels, Places
from lagzero.numerics.exact_attention import attend_exactly
from lagzero.numerics.memory import lazy_zeros, take_memory

_STRETCH = 1 << 26  # bytes of a cache that are taken at once, or 1/16 of it


@dataclass(frozen=True, slots=True)
class KVShape:
    """Key/value heads and head size of one layer."""

    num_heads: int
    head_size: int


class ShapeProbe:
    """An attention plan that records each layer's KV shape during a one-token forward."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Record the shape. With one token, attention returns its value."""
        self.shapes[layer] = KVShape(key.shape[1], key.shape[2])
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class KVCache:
    """Keys and values of every layer, [P, K, S, D] each: a head's tokens of a page lie together.

    Of int16 they have the shape that ``cache_shape`` says.
    """

    def __init__(
        self,
        shapes: dict[int, KVShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        self._num_taken = num_pages if device.type != "cpu" else 0
        page_bytes = max(1, page_size * self.bytes_per_token(shapes, dtype))
        self._stretch = max(1, min(num_pages // 16, _STRETCH // page_bytes))

        def make(shape: KVShape) -> torch.Tensor:
            # Zeros: a masked slot is still multiplied by 0, and 0 * NaN is NaN.
            size = (num_pages, shape.num_heads, page_size, shape.head_size)
            return lazy_zeros(cache_shape(dtype, *size), dtype, device)

        self.keys = {layer: make(shape) for layer, shape in shapes.items()}
        self.values = {layer: make(shape) for layer, shape in shapes.items()}

    def take(self, num_pages: int) -> None:
        """Take the memory of the first pages, and of some more, before they are used."""
        if num_pages <= self._num_taken:
            return
        first, least = self._num_taken, self._num_taken + self._stretch
        last = self._num_taken = min(self.num_pages, max(num_pages, least))
        take_memory(each[first:last] for each in (*self.keys.values(), *self.values.values()))

    @staticmethod
    def bytes_per_token(shapes: dict[int, KVShape], dtype: torch.dtype) -> int:
        """Bytes that one token takes in all layers."""
        sizes = (cache_shape(dtype, s.num_heads, s.head_size) for s in shapes.values())
        return sum(2 * math.prod(each) for each in sizes) * dtype.itemsize

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to); all are read before any is written."""
        if not copies:
            return
        source = torch.tensor([c[0] for c in copies])
        target = torch.tensor([c[1] for c in copies])
        for cache in (*self.keys.values(), *self.values.values()):
            cache[target.to(cache.device)] = cache[source.to(cache.device)]


@dataclass(frozen=True, slots=True)
class _Decode:
    """Decoding sequences of similar length: rows [B] of the flat row and their padded pages."""

    rows: torch.Tensor  # [B]
    table: torch.Tensor  # [B, W]
    last: torch.Tensor  # [B, 1, 1, 1] position of the newest token
    num_filled: int  # tokens of the shortest of them


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's chunk of several tokens."""

    start: int  # first place in the flat row
    count: int
    table: torch.Tensor  # [1, W]
    positions: torch.Tensor  # [1, 1, count, 1]


def _buckets(lengths: list[int], waste: float = 0.25, smallest: int = 16) -> list[list[int]]:
    """Split indices, sorted by length, so that padding adds at most ``waste`` to a bucket.

    A bucket of fewer than ``smallest`` is not split off: each costs calls of its own.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    buckets: list[list[int]] = []
    begin, useful = 0, 0
    for end, index in enumerate(order):
        padded = lengths[index] * (end + 1 - begin)
        if end - begin >= smallest and padded > (1 + waste) * (useful + lengths[index]):
            buckets.append(order[begin:end])
            begin, useful = end, 0
        useful += lengths[index]
    if order:
        buckets.append(order[begin:])
    return buckets


class PagedPlan:
    """Attention of one engine step: writes the new keys and values, then reads whole pages.

    ``works`` lists decoding sequences (one id each) first. With ``exact`` the pages are read as
    whole blocks of keys and attended as in training, bit for bit; tokens of the flat row beyond
    those of ``works`` are padding then.
    """

    def __init__(
        self,
        cache: KVCache,
        works: Sequence[Work],
        device: torch.device,
        exact: ExactNumerics | None = None,
    ):
        self._cache = cache
        self._exact = exact
        # Pages in which whole blocks of keys end.
        self._whole = 1 if exact is None else BLOCK // math.gcd(BLOCK, cache.page_size)
        size = cache.page_size
        slots: list[int] = []
        starts: list[int] = []
        for work in works:
            starts.append(len(slots))
            pages = work.sequence.pages
            slots.extend(
                pages[p // size] * size + p % size
                for p in range(work.start, work.start + work.count)
            )
        self._slots = torch.tensor(slots, device=device)
        decoding = [(row, w) for row, w in zip(starts, works, strict=True) if w.count == 1]
        self._decodes = self._plan_decodes(decoding, device)
        self._prefills = [
            _Prefill(
                row,
                w.count,
                self._table([w.sequence.pages[: -(-(w.start + w.count) // size)]], device),
                torch.arange(w.start, w.start + w.count, device=device).view(1, 1, -1, 1),
            )
            for row, w in zip(starts, works, strict=True)
            if w.count > 1
        ]
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._indices: dict[tuple[int, int], torch.Tensor] = {}

    def _plan_decodes(
        self, decoding: Sequence[tuple[int, Work]], device: torch.device
    ) -> list[_Decode]:
        plans: list[_Decode] = []
        num_pages = [w.start // self._cache.page_size + 1 for _, w in decoding]
        for bucket in _buckets(num_pages):
            pages = [decoding[j][1].sequence.pages[: num_pages[j]] for j in bucket]
            plans.append(
                _Decode(
                    torch.tensor([decoding[j][0] for j in bucket], device=device),
                    self._table(pages, device),
                    torch.tensor([decoding[j][1].start for j in bucket], device=device).view(
                        -1, 1, 1, 1
                    ),
                    min(decoding[j][1].start for j in bucket) + 1,
                )
            )
        return plans

    def _table(self, pages: Sequence[list[int]], device: torch.device) -> torch.Tensor:
        """Return [B, W], filled up with page 0, whose keys are masked there."""
        width = -(-max(map(len, pages)) // self._whole) * self._whole
        return torch.tensor([p + [0] * (width - len(p)) for p in pages], device=device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return [T, H, D]; see ``AttentionPlan``."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._write(keys, key)
        self._write(values, value)
        out = torch.empty_like(query) if self._exact is None else torch.zeros_like(query)
        for number, decode in enumerate(self._decodes):
            self._decode(decode, number, query, keys, values, scale, window, out)
        for number, prefill in enumerate(self._prefills, len(self._decodes)):
            self._prefill(prefill, number, query, keys, values, scale, window, out)
        return out

    def _write(self, cache: torch.Tensor, new: torch.Tensor) -> None:
        _, num_heads, size, head_size = cache.shape
        index = self._indices.get((-1, num_heads))
        if index is None:
            heads = torch.arange(num_heads, device=cache.device)
            page, offset = self._slots // size, self._slots % size
            index = ((page.unsqueeze(1) * num_heads + heads) * size + offset.unsqueeze(1)).flatten()
            self._indices[-1, num_heads] = index
        new = new[: len(self._slots)]
        cache.view(-1, head_size).index_copy_(0, index, new.to(cache.dtype).reshape(-1, head_size))

    def _read(self, number: int, table: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Gather pages [B, W] into [B, K, W * S, D], contiguous."""
        _, num_heads, size, head_size = cache.shape
        index = self._indices.get((number, num_heads))
        if index is None:
            heads = torch.arange(num_heads, device=cache.device).view(1, -1, 1)
            index = (table.unsqueeze(1) * num_heads + heads).flatten()
            self._indices[number, num_heads] = index
        rows = cache.view(-1, size * head_size).index_select(0, index)
        return rows.view(table.shape[0], num_heads, -1, head_size)

    def _decode(
        self,
        plan: _Decode,
        number: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """The query heads that share a key head become the rows of one matrix, [B, K, H/K, D].

        Two batched products beat torch's fused CPU kernel about threefold here: with one query
        token a sequence, that kernel's blocks are nearly empty.
        """
        if self._exact is not None:
            q = query.index_select(0, plan.rows).unsqueeze(1)
            k, v = self._read(number, plan.table, keys), self._read(number, plan.table, values)
            mask = self._mask(number, k.shape[2], plan.last, window)
            _clear(v, plan.num_filled, plan.last)
            attended = attend_exactly(q, k, v, mask[:, 0], scale, self._exact.attention)
            out.index_copy_(0, plan.rows, attended[:, 0].to(out.dtype))
            return
        k = self._read(number, plan.table, keys).flatten(0, 1)
        v = self._read(number, plan.table, values).flatten(0, 1)
        num, kv_heads = len(plan.rows), keys.shape[1]
        q = query.index_select(0, plan.rows).view(num * kv_heads, -1, query.shape[-1])
        scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
        mask = self._mask(number, k.shape[1], plan.last, window)
        scores = scores.view(num, kv_heads, -1, k.shape[1]).masked_fill_(~mask, -torch.inf)
        weights = scores.softmax(-1).to(v.dtype).flatten(0, 1)
        out.index_copy_(0, plan.rows, torch.bmm(weights, v).view(num, -1, v.shape[-1]))

    def _prefill(
        self,
        plan: _Prefill,
        number: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """The chunk's tokens attend to all earlier ones and, causally, to each other."""
        rows = slice(plan.start, plan.start + plan.count)
        k = self._read(number, plan.table, keys)
        v = self._read(number, plan.table, values)
        mask = self._mask(number, k.shape[2], plan.positions, window)
        if self._exact is not None:
            last = plan.positions[:, :, -1:]
            _clear(v, 0, last)
            q = query[rows].unsqueeze(0)
            attended = attend_exactly(q, k, v, mask[:, 0], scale, self._exact.attention)
            out[rows] = attended[0].to(out.dtype)
            return
        q = query[rows].transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out[rows] = attended[0].transpose(0, 1)

    def _mask(
        self, number: int, num_keys: int, positions: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        mask = self._masks.get((number, window))
        if mask is None:
            at = torch.arange(num_keys, device=positions.device)
            mask = at <= positions
            if window is not None:
                mask &= at > positions - window
            self._masks[number, window] = mask
        return mask


class KernelPlan:
    """Attention of one engine step by kernels that follow page tables; see ``PagedPlan``."""

    def __init__(self, cache: KVCache, places: Places, kernels: Kernels):
        self._cache, self._places, self._kernels = cache, places, kernels
        pages = places.tables[places.sequences, places.positions // cache.page_size]
        self._to = pages, places.positions % cache.page_size

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return [T, H, D]; see ``AttentionPlan``."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        page, offset = self._to
        keys[page, :, offset] = key
        values[page, :, offset] = value
        return self._kernels.attend(query, keys, values, self._places, scale, window)


def _clear(values: torch.Tensor, num_filled: int, last: torch.Tensor) -> None:
    """Zero what lies in pages [B, K, L, D] behind ``last`` [B, 1, 1, 1]: 0 times NaN is NaN.

    The first ``num_filled`` are in use by every sequence.
    """
    at = torch.arange(num_filled, values.shape[2], device=values.device).view(1, 1, -1, 1)
    values[:, :, num_filled:].masked_fill_(at > last, 0)
