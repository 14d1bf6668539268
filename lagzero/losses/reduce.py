"""Reductions, apart from the losses: of per-token losses to a scalar, of metrics to floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]

Metrics = Mapping[str, tuple[Tensor, Reduction]]
"""Name -> (per-token values [N] without gradient, how they reduce over all tokens of the step)."""


def reduce(loss: Tensor, weights: Tensor) -> Tensor:
    """Return sum_n weights_n * loss_n as a scalar.

    The weights [N] already hold the step's denominator, so the sums of micro-batches and ranks add
    up to the step's loss however the batch was cut. Weights are cast to the loss's type.
    Raises ValueError when the shapes differ (broadcasting would change the denominator).
    """
    if loss.shape != weights.shape or loss.ndim != 1:
        raise ValueError(f"loss {tuple(loss.shape)} and weights {tuple(weights.shape)} must be [N]")
    return (loss * weights.to(loss.dtype)).sum()


def reduce_metrics(parts: Sequence[Metrics]) -> dict[str, float]:
    """Reduce the metrics of a step's micro-batches over all their tokens, in float64.

    A metric over no token at all is left out. Raises ValueError when micro-batches disagree on
    a metric's reduction.
    """
    values: dict[str, list[Tensor]] = {}
    reductions: dict[str, Reduction] = {}
    for part in parts:
        for name, (value, reduction) in part.items():
            if reductions.setdefault(name, reduction) != reduction:
                raise ValueError(f"metric {name} is both {reductions[name]} and {reduction}")
            values.setdefault(name, []).append(value.detach().to(torch.float64))
    out: dict[str, float] = {}
    for name, reduction in reductions.items():
        joined = torch.cat(values[name])
        if joined.numel() == 0:
            continue
        match reduction:
            case "mean":
                total = joined.mean()
            case "sum":
                total = joined.sum()
            case "max":
                total = joined.max()
            case "min":
                total = joined.min()
        out[name] = float(total)
    return out
