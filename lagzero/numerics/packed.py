"""Attention over a packed row: many sequences side by side, prompts shared, nothing crosses.

A token sees the tokens of its own segment up to itself, and all tokens of the parent segment. With
a window w it sees, of these, the ones at a position greater than its own minus w.

Letters: T tokens of the row, S segments, B segments of one padded batch, H query heads, K key/value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from lagzero.numerics.exact import BLOCK, ExactNumerics, pad_rows
from lagzero.numerics.exact_attention import attend_exactly
from lagzero.types import Array

_LARGEST_MASK = 1 << 25  # elements of one padded batch's mask


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Segments of similar size, padded with copies of their first token."""

    queries: torch.Tensor  # [B, q] places in the row
    keys: torch.Tensor  # [B, k] places in the row: the parent's tokens, then the segment's own
    real: torch.Tensor  # [B, k] false where a key is padding
    alone: bool  # no segment here has a parent


class _Row:
    """Which token sees which."""

    def __init__(
        self,
        position_ids: Array,
        segment_ids: Array,
        parents: Array,
        device: torch.device,
    ):
        self.positions = torch.as_tensor(position_ids.astype(np.int64), device=device)
        self.segments = torch.as_tensor(segment_ids.astype(np.int64), device=device)
        self.parents = torch.as_tensor(parents.astype(np.int64), device=device)

    def visible(
        self, queries: torch.Tensor, keys: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Return bool [..., q, k] for places [..., q] and [..., k]."""
        own_q, own_k = (
            self.segments[queries].unsqueeze(-1),
            self.segments[keys].unsqueeze(-2),
        )
        earlier = keys.unsqueeze(-2) <= queries.unsqueeze(-1)
        seen = (own_q == own_k) & earlier | (self.parents[own_q] == own_k)
        if window is None:
            return seen
        at_q, at_k = (
            self.positions[queries].unsqueeze(-1),
            self.positions[keys].unsqueeze(-2),
        )
        return seen & (at_k > at_q - window)


class PackedPlan:
    """Attention of one packed row; satisfies ``AttentionPlan``.

    Segments are gathered into padded batches of similar size, whose indices are made once for all
    layers. On a CPU the scores of half-precision inputs are computed in float32, which is both
    faster there and more exact.

    Args:
        position_ids: [T] integers, counted from the start of each sequence.
        segment_ids: [T] integers, non-decreasing from 0.
        parents: [S] integers, the parent segment or -1. A parent has no parent.
        exact: attend as the engine does under exact numerics, bit for bit. Tokens of a row beyond
            ``position_ids`` are padding then.

    Raises ValueError for ids or parents that do not describe such a row.
    """

    def __init__(
        self,
        position_ids: Array,
        segment_ids: Array,
        parents: Array,
        device: torch.device,
        exact: ExactNumerics | None = None,
    ):
        starts, lengths = _check(position_ids, segment_ids, parents)
        self._exact = exact
        self._row = _Row(position_ids, segment_ids, parents, device)
        parts = _partition(lengths, parents)
        whole = 1 if exact is None else BLOCK
        self._buckets = [_bucket(part, starts, lengths, parents, device, whole) for part in parts]
        self._queries = torch.cat([b.queries.flatten() for b in self._buckets])
        self._keys = torch.cat([b.keys.flatten() for b in self._buckets])
        self._places = _inverse(parts, self._buckets, starts, lengths, device)
        self._masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return [T, H, D]; see ``AttentionPlan``. Differentiable."""
        dtype, num_tokens = query.dtype, len(query)
        if query.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
            query, key, value = query.float(), key.float(), value.float()
        num_queries = [b.queries.numel() for b in self._buckets]
        num_keys = [b.keys.numel() for b in self._buckets]
        # One gather and one split, so that the backward pass is one scatter.
        queries = torch.split(query.index_select(0, self._queries), num_queries)
        keys = torch.split(key.index_select(0, self._keys), num_keys)
        values = torch.split(value.index_select(0, self._keys), num_keys)
        outputs: list[torch.Tensor] = []
        for number, (bucket, q, k, v) in enumerate(
            zip(self._buckets, queries, keys, values, strict=True)
        ):
            batch = len(bucket.queries)
            if self._exact is not None:
                q, k, v = (t.view(batch, -1, *t.shape[1:]) for t in (q, k, v))
                seen = self._seen(number, window)
                k, v = k.transpose(1, 2), v.transpose(1, 2)
                attended = attend_exactly(q, k, v, seen, scale, self._exact.attention)
                outputs.append(attended.flatten(0, 1))
                continue
            causal = bucket.alone and window is None
            attended = F.scaled_dot_product_attention(
                q.view(batch, -1, *q.shape[1:]).transpose(1, 2),
                k.view(batch, -1, *k.shape[1:]).transpose(1, 2),
                v.view(batch, -1, *v.shape[1:]).transpose(1, 2),
                attn_mask=None if causal else self._mask(number, window, q.dtype),
                is_causal=causal,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        out = torch.cat(outputs).index_select(0, self._places).to(dtype)
        return out if self._exact is None else pad_rows(out, num_tokens)

    def _seen(self, number: int, window: int | None) -> torch.Tensor:
        name = (number, window, torch.bool)
        if name not in self._masks:
            bucket = self._buckets[number]
            seen = self._row.visible(bucket.queries, bucket.keys, window) & bucket.real[:, None]
            self._masks[name] = seen
        return self._masks[name]

    def _mask(self, number: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        name = (number, window, dtype)
        if name not in self._masks:
            seen = self._seen(number, window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._masks[name] = mask.masked_fill_(~seen, float("-inf")).unsqueeze(1)
        return self._masks[name]


class DensePlan:
    """The slow twin of ``PackedPlan``: every token against every token under one [T, T] mask."""

    def __init__(
        self,
        position_ids: Array,
        segment_ids: Array,
        parents: Array,
        device: torch.device,
    ):
        _check(position_ids, segment_ids, parents)
        self._row = _Row(position_ids, segment_ids, parents, device)
        self._places = torch.arange(len(position_ids), device=device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return [T, H, D]; see ``AttentionPlan``. Differentiable."""
        groups = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(groups, 1)
        values = value.repeat_interleave(groups, 1)
        seen = self._row.visible(self._places, self._places, window)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, values)


def _check(position_ids: Array, segment_ids: Array, parents: Array) -> tuple[Array, Array]:
    """Return the first place and the length of each segment, [S] each."""
    if position_ids.shape != segment_ids.shape or position_ids.ndim != 1 or not len(position_ids):
        raise ValueError(
            f"a row needs one position and one segment a token, not {position_ids.shape} "
            f"and {segment_ids.shape}"
        )
    steps = np.diff(segment_ids)
    if segment_ids[0] != 0 or ((steps != 0) & (steps != 1)).any():
        raise ValueError("segment ids must count 0, 1, 2, ... along the row")
    if len(parents) != segment_ids[-1] + 1:
        raise ValueError(f"{segment_ids[-1] + 1} segments and {len(parents)} parents")
    inside = (parents >= -1) & (parents < len(parents))
    if not inside.all() or (parents[parents[parents >= 0]] >= 0).any():
        raise ValueError("a parent must be a segment of the row that has no parent itself")
    starts = np.flatnonzero(np.concatenate([[1], steps]))
    return starts, np.diff(np.append(starts, len(segment_ids)))


def _partition(lengths: Array, parents: Array) -> list[Array]:
    """Split the segments so that padding stays small, those with a parent apart."""
    num_keys = lengths + np.where(parents >= 0, lengths[parents], 0)
    order = np.lexsort((lengths, num_keys, parents >= 0))
    # What a segment costs: its scores, and some for each token that is gathered.
    costs = lengths * num_keys + 32 * (lengths + num_keys)
    parts: list[Array] = []
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            inside, new = order[begin : end + 1], order[end]
            q, k = int(lengths[inside].max()), int(num_keys[inside].max())
            padded = len(inside) * (q * k + 32 * (q + k))
            fits = padded <= 1.25 * costs[inside].sum() or padded <= 1 << 14
            small = len(inside) * q * k <= _LARGEST_MASK
            if fits and small and (parents[new] >= 0) == (parents[order[begin]] >= 0):
                continue
        parts.append(order[begin:end])
        begin = end
    return parts


def _places(starts: Array, lengths: Array, segment: int) -> Array:
    return np.arange(int(lengths[segment])) + starts[segment]


def _bucket(
    members: Array,
    starts: Array,
    lengths: Array,
    parents: Array,
    device: torch.device,
    whole: int,
) -> _Bucket:
    """Gather segments; the number of keys is a multiple of ``whole``."""
    rows_q: list[Array] = []
    rows_k: list[Array] = []
    for segment in members:
        own = _places(starts, lengths, int(segment))
        parent = int(parents[segment])
        rows_q.append(own)
        rows_k.append(
            own if parent < 0 else np.concatenate([_places(starts, lengths, parent), own])
        )
    num_q, num_k = max(map(len, rows_q)), -(-max(map(len, rows_k)) // whole) * whole
    queries = np.stack([np.append(r, np.full(num_q - len(r), r[0])) for r in rows_q])
    keys = np.stack([np.append(r, np.full(num_k - len(r), r[0])) for r in rows_k])
    real = np.arange(num_k) < np.array([len(r) for r in rows_k])[:, None]
    return _Bucket(
        torch.as_tensor(queries, device=device),
        torch.as_tensor(keys, device=device),
        torch.as_tensor(real, device=device),
        bool((parents[members] < 0).all()),
    )


def _inverse(
    parts: Sequence[Array],
    buckets: Sequence[_Bucket],
    starts: Array,
    lengths: Array,
    device: torch.device,
) -> torch.Tensor:
    """Return [T]: where in the buckets' joined outputs each token of the row is."""
    places = np.empty(int(lengths.sum()), np.int64)
    offset = 0
    for members, bucket in zip(parts, buckets, strict=True):
        for row, segment in enumerate(members):
            first = offset + row * bucket.queries.shape[1]
            own = _places(starts, lengths, int(segment))
            places[own] = first + np.arange(len(own))
        offset += bucket.queries.numel()
    return torch.as_tensor(places, device=device)
