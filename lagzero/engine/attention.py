"""The paged KV cache and attention over it.

Letters: L layers, P pages, S tokens a page, K key/value heads, H query heads, D head size, T tokens
of the flat row, B decoding sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from lagzero.engine.scheduler import Work


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
    """Keys and values of every layer, [P, S, K, D] each."""

    def __init__(
        self,
        shapes: dict[int, KVShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.page_size = page_size

        # Zeros, not empty: a masked slot is still multiplied by 0, and 0 * NaN is NaN.
        def make(shape: KVShape) -> torch.Tensor:
            size = (num_pages, page_size, shape.num_heads, shape.head_size)
            return torch.zeros(size, dtype=dtype, device=device)

        self.keys = {layer: make(shape) for layer, shape in shapes.items()}
        self.values = {layer: make(shape) for layer, shape in shapes.items()}

    @staticmethod
    def bytes_per_token(shapes: dict[int, KVShape], dtype: torch.dtype) -> int:
        """Bytes that one token takes in all layers."""
        return sum(2 * s.num_heads * s.head_size for s in shapes.values()) * dtype.itemsize

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
    table: torch.Tensor  # [B * pages]
    last: torch.Tensor  # [B, 1, 1, 1] position of the newest token


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's chunk of several tokens."""

    start: int  # first place in the flat row
    count: int
    table: torch.Tensor  # [pages]
    position: int  # of the chunk's first token


def _buckets(lengths: np.ndarray, waste: float = 0.25, smallest: int = 16) -> list[np.ndarray]:
    """Split indices, sorted by length, so that padding adds at most ``waste`` to a bucket."""
    order = np.argsort(lengths, kind="stable")
    buckets: list[np.ndarray] = []
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order):
            buckets.append(order[begin:end])
        else:
            padded = lengths[order[end]] * (end + 1 - begin)
            useful = lengths[order[begin : end + 1]].sum()
            if end - begin >= smallest and padded > (1 + waste) * useful:
                buckets.append(order[begin:end])
                begin = end
    return buckets


class PagedPlan:
    """Attention of one engine step: writes the new keys and values, then reads whole pages.

    ``works`` lists decoding sequences (one id each) first.
    """

    def __init__(self, cache: KVCache, works: Sequence[Work], device: torch.device):
        self._cache = cache
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
                torch.tensor(w.sequence.pages[: -(-(w.start + w.count) // size)], device=device),
                w.start,
            )
            for row, w in zip(starts, works, strict=True)
            if w.count > 1
        ]
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def _plan_decodes(
        self, decoding: Sequence[tuple[int, Work]], device: torch.device
    ) -> list[_Decode]:
        size = self._cache.page_size
        num_pages = np.array([w.start // size + 1 for _, w in decoding], np.int64)
        plans: list[_Decode] = []
        for bucket in _buckets(num_pages) if len(decoding) else []:
            width = int(num_pages[bucket].max())
            table = np.zeros((len(bucket), width), np.int64)
            for i, j in enumerate(bucket):
                table[i, : num_pages[j]] = decoding[j][1].sequence.pages[: num_pages[j]]
            plans.append(
                _Decode(
                    torch.tensor([decoding[j][0] for j in bucket], device=device),
                    torch.from_numpy(table.ravel()).to(device),
                    torch.tensor([decoding[j][1].start for j in bucket], device=device).view(
                        -1, 1, 1, 1
                    ),
                )
            )
        return plans

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
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self._slots, key.to(keys.dtype))
        values.view(-1, *values.shape[2:]).index_copy_(0, self._slots, value.to(values.dtype))
        out = torch.empty_like(query)
        for number, decode in enumerate(self._decodes):
            self._decode(decode, number, query, keys, values, scale, window, out)
        for number, prefill in enumerate(self._prefills, len(self._decodes)):
            self._prefill(prefill, number, query, keys, values, scale, window, out)
        return out

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
        """The query heads that share a key head become query rows: [B, K, H/K, D]."""
        _, _, kv_heads, head_size = keys.shape
        num = len(plan.rows)
        k = keys.index_select(0, plan.table).view(num, -1, kv_heads, head_size).transpose(1, 2)
        v = values.index_select(0, plan.table).view(num, -1, kv_heads, head_size).transpose(1, 2)
        q = query.index_select(0, plan.rows).view(num, kv_heads, -1, head_size)
        mask = self._masks.get((number, window))
        if mask is None:
            mask = self._mask(k.shape[2], plan.last, window)
            self._masks[number, window] = mask
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out.index_copy_(0, plan.rows, attended.reshape(num, -1, head_size))

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
        k = keys.index_select(0, plan.table).flatten(0, 1).transpose(0, 1).unsqueeze(0)
        v = values.index_select(0, plan.table).flatten(0, 1).transpose(0, 1).unsqueeze(0)
        q = query[rows].transpose(0, 1).unsqueeze(0)
        mask = self._masks.get((number, window))
        if mask is None:
            positions = torch.arange(
                plan.position, plan.position + plan.count, device=query.device
            ).view(1, 1, -1, 1)
            mask = self._mask(k.shape[2], positions, window)
            self._masks[number, window] = mask
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out[rows] = attended[0].transpose(0, 1)

    @staticmethod
    def _mask(num_keys: int, positions: torch.Tensor, window: int | None) -> torch.Tensor:
        at = torch.arange(num_keys, device=positions.device)
        mask = at <= positions
        return mask if window is None else mask & (at > positions - window)
