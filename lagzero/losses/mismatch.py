"""How far the distribution that sampled the tokens is from the one being trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lagzero.losses.inputs import LossInputs
from lagzero.losses.reduce import Metrics
from lagzero.types import LOG_RATIO_BOUND


def behaviour_metrics(logprobs: Tensor, inputs: LossInputs, name: str = "behaviour") -> Metrics:
    """Measure trainer against behaviour policy on the sampled tokens; no gradient.

    With d = logprobs - behaviour (nats), rho = exp(d), tokens sampled from behaviour::

        kl_k1        mean of -d             estimates KL(behaviour || trainer), can be negative
        kl_k3        mean of rho - 1 - d    the same, never negative, less spread
        gap_max      max of |d|
        ratio_mean, ratio_max, ratio_min, ratio_square_mean    of the token ratios rho

    d is cut off above LOG_RATIO_BOUND in everything but kl_k1 and gap_max.
    At equal policy version this is the engine-trainer mismatch; see ``mismatch_metrics``.
    """
    difference = (logprobs - inputs.behaviour_logprobs.to(logprobs.dtype)).detach()
    cut = difference.clamp(max=LOG_RATIO_BOUND)
    rho = cut.exp()
    return {
        f"{name}/kl_k1": (-difference, "mean"),
        f"{name}/kl_k3": (torch.expm1(cut) - cut, "mean"),
        f"{name}/gap_max": (difference.abs(), "max"),
        f"{name}/ratio_mean": (rho, "mean"),
        f"{name}/ratio_max": (rho, "max"),
        f"{name}/ratio_min": (rho, "min"),
        f"{name}/ratio_square_mean": (rho.square(), "mean"),
    }


def mismatch_metrics(logprobs: Tensor, inputs: LossInputs, version: int) -> Metrics:
    """Measure ``behaviour_metrics`` on the tokens that policy ``version`` itself sampled.

    ``version`` is the trainer's before the update, so lag plays no part: what remains is the
    difference in numerics between sampler and trainer.
    """
    same = inputs.versions == version
    return behaviour_metrics(logprobs[same], inputs.where(same), "mismatch")


def effective_sample_share(reduced: Mapping[str, float], name: str = "behaviour") -> float:
    """Return the effective sample size of the token ratios as a share of the tokens, in (0, 1].

    (sum rho)^2 / (N sum rho^2), from the reduced ``ratio_mean`` and ``ratio_square_mean`` of a
    whole step; it cannot be averaged over micro-batches. Source: Kish 1965.
    """
    return reduced[f"{name}/ratio_mean"] ** 2 / reduced[f"{name}/ratio_square_mean"]
