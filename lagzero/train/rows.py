"""What training reads of a packed row, and a term that others add to its loss."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from lagzero.losses.reduce import Metrics
from lagzero.numerics.attention import AttentionPlan
from lagzero.numerics.packed import PackedPlan
from lagzero.numerics.rows import RowPlan
from lagzero.train.model import Policy
from lagzero.types import Array, MicroBatch


def on_device(array: Array, device: torch.device) -> torch.Tensor:
    """Return ids or places as int64 where the model is."""
    return torch.as_tensor(array.astype(np.int64), device=device)


def predictor_hidden(policy: Policy, row: MicroBatch) -> torch.Tensor:
    """Return the hidden states [N, D] that the row's trained tokens are predicted from.

    Of all T, only these go through a head: the head of the vocabulary is the largest matrix.
    """
    device, facts = policy.device, (row.position_ids, row.segment_ids, row.parents)
    plan: AttentionPlan
    if policy.exact is not None and policy.exact.kernels is not None:
        plan = RowPlan(policy.exact.kernels, *facts, device)
    else:
        plan = PackedPlan(*facts, device, policy.exact)
    hidden = policy.hidden(
        on_device(row.token_ids, device), on_device(row.position_ids, device), plan
    )
    return hidden.index_select(0, on_device(row.predictors, device))


class Auxiliary(Protocol):
    """A further term of a policy's loss, with parameters and an optimiser of its own."""

    def term(self, row: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        """Return what to add to the per-token loss [N], given ``predictor_hidden``, and metrics."""
        ...

    def update(self) -> None:
        """Follow an update of the policy: the gradients of all rows have been added up."""
        ...
