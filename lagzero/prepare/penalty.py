"""Distance to the reference policy as a part of the reward."""

from __future__ import annotations

import numpy as np

from lagzero.config import KLEstimator
from lagzero.types import LOG_RATIO_BOUND, Array


def sequence_kl(behaviour: Array, reference: Array, estimator: KLEstimator) -> float:
    """Estimate KL(behaviour || reference) of one sequence from its sampled tokens, in nats.

    With d_t = reference_t - behaviour_t, summed over the T trained tokens::

        k1 = -d_t        k2 = d_t^2 / 2        k3 = exp(d_t) - 1 - d_t

    In k3, d_t is cut off at LOG_RATIO_BOUND: one impossible token cannot turn a reward infinite.

    ``behaviour`` and ``reference`` are log-probs [T] under the same temperature and truncation.
    Raises ValueError when they differ in length or hold a number that is not finite.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    if behaviour.shape != reference.shape:
        raise ValueError(f"{len(behaviour)} behaviour and {len(reference)} reference log-probs")
    difference = reference.astype(np.float64) - behaviour.astype(np.float64)
    if not np.isfinite(difference).all():
        raise ValueError("a behaviour or reference log-prob of a trained token is not finite")
    match estimator:
        case "k1":
            per_token = -difference
        case "k2":
            per_token = difference**2 / 2
        case "k3":
            cut = np.minimum(difference, LOG_RATIO_BOUND)
            per_token = np.expm1(cut) - cut
    return float(per_token.sum())
