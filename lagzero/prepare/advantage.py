"""How the rewards of one group become advantages."""

from __future__ import annotations

from typing import Literal

import numpy as np

from lagzero.types import Array

Estimator = Literal["group_mean", "leave_one_out", "none"]

SPREAD_FLOOR = 1e-6
"""Rewards that differ by no more than this share of the largest |reward| count as equal.

Float32 rewards carry a relative rounding error of 6e-8, so a real difference is far above it.
"""


def is_zero_spread(rewards: Array) -> bool:
    """Say whether the scored rewards are all equal: max - min <= SPREAD_FLOOR * max|r|.

    ``rewards`` is [G]; NaN entries are left out. Fewer than two scored members have no spread.
    """
    scored = rewards[~np.isnan(rewards)]
    if len(scored) < 2:
        return True
    half_range = scored.max() / 2 - scored.min() / 2  # halves: the range itself can overflow
    return bool(half_range <= SPREAD_FLOOR * np.abs(scored).max() / 2)


def group_advantages(rewards: Array, estimator: Estimator, normalize_std: bool) -> Array:
    """Turn the rewards [G] of one group into advantages [G], float64.

    With n scored members, b_i the baseline and s_i the scale::

        A_i = (r_i - b_i) / s_i
        group_mean     b_i = mean of all n        s_i = std of all n
        leave_one_out  b_i = mean of the others   s_i = std of the others
        none           b_i = 0                    s_i = 1

    ``std`` is the sample standard deviation (divisor n - 1, Bessel's correction). The GRPO paper
    leaves the divisor open; TRL and verl take n - 1 as well. With ``normalize_std`` off every
    s_i is 1. A standard deviation of at most SPREAD_FLOOR * max|r| is rounding residue or no
    spread at all and is treated as "no scale": the difference is left undivided. There is no
    epsilon, so scaling or shifting a group's rewards leaves its normalised advantages alone.

    Bounds: undivided |A| is at most the range of the rewards; with ``normalize_std`` |A| is at
    most sqrt(n). ``group_mean`` never reaches that bound (its largest value is (n-1)/sqrt(n));
    ``leave_one_out`` is clipped to it, because the spread of the others can be arbitrarily small.

    Members that are NaN (unscorable) are left out of every statistic and get 0; the caller drops
    them. A lone scored member and a group without spread get 0 under a group baseline.

    Raises ValueError for infinite rewards, an array that is not [G], or ``none`` with
    ``normalize_std`` (there is no baseline to measure a spread about).

    Sources: Shao et al. 2024, arXiv:2402.03300 (group_mean); Kool et al. 2019 and Ahmadian et al.
    2024, arXiv:2402.14740 (leave_one_out); Liu et al. 2025, arXiv:2503.20783 (no std).
    """
    if rewards.ndim != 1:
        raise ValueError(f"the rewards of one group are an array [G], not {rewards.shape}")
    if np.isinf(rewards).any():
        raise ValueError("a reward must be finite, or NaN where there is none")
    if estimator == "none" and normalize_std:
        raise ValueError("estimator none has no baseline: set normalize_std to false")
    rewards = rewards.astype(np.float64)
    scored = ~np.isnan(rewards)
    advantages = np.zeros(len(rewards))
    if estimator == "none":
        advantages[scored] = rewards[scored]
    elif not is_zero_spread(rewards):
        advantages[scored] = _relative(rewards[scored], estimator, normalize_std)
    return advantages


def pair_advantages(rewards: Array) -> Array:
    """Return +1 for the best and -1 for the worst reward of [G], 0 for the others: [G] float64.

    The first in member order wins a tie. NaN entries are left out. A group that has fewer than two
    scored members, or no spread, has no pair: all are 0.
    """
    advantages = np.zeros(len(rewards))
    if not is_zero_spread(rewards):
        advantages[int(np.nanargmax(rewards))] = 1.0
        advantages[int(np.nanargmin(rewards))] = -1.0
    return advantages


def standardized(advantages: Array) -> Array:
    """Shift and scale the advantages [N] of all trained tokens of a step, float64.

    ::

        A_n' = (A_n - mean) / std        std with divisor N - 1

    As within a group, a standard deviation of at most SPREAD_FLOOR * max|A| is no scale: the
    difference is left undivided, and so is a lone token's, which is 0.

    Source: Hu et al. 2025, arXiv:2501.03262 (REINFORCE++); Andrychowicz et al. 2020,
    arXiv:2006.05990, section 3.5 (PPO).
    """
    largest = float(np.abs(advantages).max(initial=0.0))
    if largest == 0:
        return advantages.astype(np.float64)
    _, exponent = np.frexp(largest)
    scaled = np.ldexp(advantages.astype(np.float64), -exponent)
    difference = scaled - scaled.mean()
    spread = float(scaled.std(ddof=1)) if len(scaled) > 1 else 0.0
    if spread > SPREAD_FLOOR * float(np.abs(scaled).max()):
        return difference / spread
    return np.ldexp(difference, exponent)


def _relative(rewards: Array, estimator: Estimator, normalize_std: bool) -> Array:
    """Advantages [n] of n >= 2 finite rewards that are not all equal."""
    n = len(rewards)
    # A power of two brings max|r| into [0.5, 1): exact, and no square over- or underflows.
    _, exponent = np.frexp(np.abs(rewards).max())
    scaled = np.ldexp(rewards, -exponent)
    if estimator == "group_mean":
        baseline = np.full(n, scaled.mean())
        spread = np.full(n, scaled.std(ddof=1))
    else:
        others = np.stack([np.delete(scaled, member) for member in range(n)])
        baseline = others.mean(axis=1)
        spread = others.std(axis=1, ddof=1) if n > 2 else np.zeros(n)
    difference = scaled - baseline
    if not normalize_std:
        return np.ldexp(difference, exponent)
    has_scale = spread > SPREAD_FLOOR * np.abs(scaled).max()
    divided = difference / np.where(has_scale, spread, 1.0)
    bound = float(np.sqrt(n))
    raw: Array = np.where(has_scale, divided, np.ldexp(difference, exponent))
    return np.minimum(np.maximum(raw, -bound), bound)
