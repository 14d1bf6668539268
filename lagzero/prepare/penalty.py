"""Distance to the reference policy as a part of rewards and advantages."""

from __future__ import annotations

import numpy as np

from lagzero.config import KLEstimator
from lagzero.types import LOG_RATIO_BOUND, Array, Sample


def token_kl(behaviour: Array, reference: Array, estimator: KLEstimator) -> Array:
    """Estimate KL(behaviour || reference) at each sampled token: [N] float64, nats.

    With d_t = reference_t - behaviour_t::

        k1 = -d_t        k2 = d_t^2 / 2        k3 = exp(d_t) - 1 - d_t

    In k3, d_t is cut off at LOG_RATIO_BOUND: one impossible token cannot turn a reward infinite.

    ``behaviour`` and ``reference`` are log-probs [N] under the same temperature and truncation.
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
            return -difference
        case "k2":
            return difference**2 / 2
        case "k3":
            cut = np.minimum(difference, LOG_RATIO_BOUND)
            return np.expm1(cut) - cut


def sequence_kl(behaviour: Array, reference: Array, estimator: KLEstimator) -> float:
    """Estimate KL(behaviour || reference) of one sequence: the sum of its tokens' ``token_kl``."""
    return float(token_kl(behaviour, reference, estimator).sum())


def sample_kl(sample: Sample, reference: Array, estimator: KLEstimator) -> Array:
    """Return ``token_kl`` of a sample's tokens and their references [T]: [T], 0 if untrained."""
    trained = sample.tokens["trained"]
    out = np.zeros(len(trained))
    out[trained] = token_kl(sample.tokens["logprob"][trained], reference[trained], estimator)
    return out
