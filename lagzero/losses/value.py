"""What a critic learns from: its loss, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from lagzero.losses.reduce import Metrics

_NO_VARIANCE = 1e-6
"""Returns whose standard deviation is at most this share of the largest |return| are all equal."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return the per-token loss [N] of a critic's values and its metrics.

    With V the value, V_old the one before the step and G the return::

        near = V_old + clamp(V - V_old, -clip, clip)
        loss = 0.5 * max((V - G)^2, (near - G)^2)

    Without ``clip`` it is 0.5 * (V - G)^2. Where the second one is larger, V has moved further from
    V_old than ``clip``, towards G: its gradient is 0. In the first update on a batch V is V_old, so
    the clip acts from the second one on.

    Args:
        values: [N] float32 or float64, with gradient.
        old_values: [N]. returns: [N].
        clip: > 0, in units of the reward; None: no bound.

    Raises ValueError when the three are not [N] of one length.
    Source: the value clipping of the PPO reference code, as described by Andrychowicz et al. 2020,
    arXiv:2006.05990, section B.1.
    """
    shapes = {tuple(t.shape) for t in (values, old_values, returns)}
    if len(shapes) != 1 or values.ndim != 1:
        raise ValueError(f"values, old values and returns are [N], not {sorted(shapes)}")
    old_values, returns = old_values.to(values.dtype), returns.to(values.dtype)
    loss = 0.5 * (values - returns).square()
    clipped = torch.zeros_like(values, dtype=torch.bool)
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        bounded = 0.5 * (near - returns).square()
        clipped = (bounded > loss) & ((values - old_values).abs() > clip)
        loss = torch.where(clipped, bounded, loss)
    return loss, {
        "value/loss": (loss.detach(), "mean"),
        "value/clipped_share": (clipped.to(values.dtype), "mean"),
        "value/mean": (values.detach(), "mean"),
        "value/return_mean": (returns, "mean"),
    }


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """Return the share of the returns' variance that the values [N] account for, at most 1.

    1 - Var(G - V) / Var(G), in float64: 1 for a perfect critic, 0 for a constant one, below 0 for
    one that is worse than a constant. None when the returns are all equal.
    """
    values, returns = values.double(), returns.double()
    if len(returns) < 2:
        return None
    spread = returns.std()
    if spread <= _NO_VARIANCE * returns.abs().max():
        return None
    return float(1 - (returns - values).var() / spread.square())
