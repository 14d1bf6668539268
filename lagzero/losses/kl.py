"""Per-token estimators of the distance to the reference policy."""

from __future__ import annotations

import torch
from torch import Tensor

from lagzero.config import KLEstimator
from lagzero.types import LOG_RATIO_BOUND


def kl_per_token(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token: [N], nats, to be added to the loss.

    With l the policy's log-prob, r the reference's and d = r - l::

        k1 = -d                 value unbiased, can be negative
        k2 = d^2 / 2            value biased, never negative
        k3 = exp(d) - 1 - d     value unbiased, never negative

    What each does when it is *differentiated in a loss*, for tokens sampled from the policy
    itself (the value being unbiased says nothing about the gradient)::

        k1   dk/dl = 1            expected gradient 0: noise, no pull to the reference
        k2   dk/dl = l - r        expected gradient = gradient of KL(policy || reference)
        k3   dk/dl = 1 - exp(d)   expected gradient = gradient of KL(reference || policy)

    No importance weight is applied, so off-policy tokens count as if the policy had drawn them.
    In k3, d is cut off above LOG_RATIO_BOUND: there the value is constant and the gradient 0.
    Signs: with l = -1, r = -1.5, k3 = 0.1065 and dk3/dl = +0.3935, so descent lowers l towards
    r; with l < r the sign turns.

    Raises ValueError when the shapes differ.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    if logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"{tuple(logprobs.shape)} log-probs and {tuple(reference_logprobs.shape)} references"
        )
    difference = reference_logprobs.detach().to(logprobs.dtype) - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            cut = difference.clamp(max=LOG_RATIO_BOUND)
            return torch.expm1(cut) - cut
