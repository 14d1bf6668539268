"""Turn one schedule into tensors, run the model once, return the logits of the rows that sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lagzero.engine.attention import KernelPlan, KVCache, PagedPlan, ShapeProbe
from lagzero.engine.scheduler import Work
from lagzero.native.decoder import Decoder, row_of
from lagzero.numerics.attention import AttentionPlan
from lagzero.numerics.exact import ExactNumerics, Places


class PolicyModel(Protocol):
    """What the engine needs of a language model."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, keys and values."""
        ...

    @property
    def exact(self) -> ExactNumerics | None:
        """How its log-probs are those of training bit for bit, or None if they are not."""
        ...

    @property
    def native(self) -> Decoder | None:
        """What computes the forward pass in place of the model's own modules, or None."""
        ...

    @property
    def context_limit(self) -> int:
        """Most tokens of one sequence."""
        ...

    def hidden(
        self, ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Return the last hidden states [T, D] of ids [T]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of hidden states [N, D]."""
        ...


def probe_kv_shapes(policy: PolicyModel) -> ShapeProbe:
    """Run one token through the model and see what keys and values its layers make."""
    probe = ShapeProbe()
    zero = torch.zeros(1, dtype=torch.long, device=policy.device)
    with torch.inference_mode():
        policy.hidden(zero, zero, probe)
    return probe


def cache_dtype(policy: PolicyModel) -> torch.dtype:
    """Return the type of the keys and values that ``run`` caches."""
    return policy.dtype if policy.native is None else policy.native.cache_dtype


def run(policy: PolicyModel, cache: KVCache, works: Sequence[Work]) -> torch.Tensor:
    """Compute ``works`` and return the logits [N, V] of the ids that a token is sampled behind."""
    ids: list[int] = []
    positions: list[int] = []
    samples: list[int] = []
    for work in works:
        ids.extend(work.ids)
        positions.extend(range(work.start, work.start + work.count))
        samples.extend(range(len(ids) - work.num_sampling, len(ids)))
    device, exact = policy.device, policy.exact
    kernels = None if exact is None else exact.kernels
    if policy.native is None and kernels is None:
        plan = PagedPlan(cache, works, device, exact)
    else:
        pages = [w.sequence.pages[: -(-(w.start + w.count) // cache.page_size)] for w in works]
        row = row_of(ids, positions, samples, [w.count for w in works], pages)
        if policy.native is not None:
            return policy.native.logits(cache.keys, cache.values, cache.page_size, row)
        assert kernels is not None
        where = (each.to(device) for each in (row.positions, row.sequences, row.tables))
        plan = KernelPlan(cache, Places(*where), kernels)
    with torch.inference_mode():
        hidden = policy.hidden(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            plan,
        )
        if len(samples) != len(ids):  # the head is the largest matrix: only rows that sample
            hidden = hidden[torch.tensor(samples, dtype=torch.long, device=device)]
        return policy.logits(hidden)
