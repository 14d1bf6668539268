"""Importance weights for tokens that another policy sampled than the one being trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lagzero.config import CorrectionConfig
from lagzero.losses.inputs import LossInputs
from lagzero.losses.ratio import Anchor, anchor_logprobs, at_level
from lagzero.losses.reduce import Metrics
from lagzero.types import LOG_RATIO_BOUND


@dataclass(frozen=True, slots=True)
class Correction:
    """What is done to the policy term of each token; no gradient anywhere."""

    weights: Tensor  # [N] >= 0, multiply the policy term; 0 where masked
    truncated: Tensor  # [N] bool, weight cut to ``high``
    masked: Tensor  # [N] bool, not trained

    def apply(self, per_token: Tensor) -> Tensor:
        """Return weights * per_token [N], with an exact 0 and no gradient where masked."""
        return torch.where(self.masked, 0.0, self.weights * per_token)

    def metrics(self) -> Metrics:
        """Return what was done, over all trained tokens, masked ones included."""
        weights = self.weights
        return {
            "correction/weight_mean": (weights, "mean"),
            "correction/weight_max": (weights, "max"),
            "correction/weight_square_mean": (weights.square(), "mean"),
            "correction/truncated_share": (self.truncated.to(weights.dtype), "mean"),
            "correction/masked_share": (self.masked.to(weights.dtype), "mean"),
        }


def corrects(config: CorrectionConfig) -> bool:
    """Say whether the configuration asks for any correction."""
    return config.kind != "none" or config.max_token_lag is not None


def log_weights(
    logprobs: Tensor, inputs: LossInputs, config: CorrectionConfig, anchor: Anchor
) -> Tensor:
    """Return log w [N], nats, without gradient: the anchor against what sampled the tokens.

    d_t = a_t - behaviour_t (``anchor_logprobs``), taken to ``config.level`` (``at_level``).
    """
    anchors = anchor_logprobs(logprobs, inputs, anchor)
    return at_level(anchors - inputs.behaviour_logprobs.to(logprobs.dtype), inputs, config.level)


def correction_weights(log_weights: Tensor, lags: Tensor, config: CorrectionConfig) -> Correction:
    """Return the weights [N] that ``config`` makes of log weights [N] and lags [N].

    With w = exp(min(log w, LOG_RATIO_BOUND))::

        none       1
        truncate   min(w, high)
        mask       w where low <= w <= high, else 0;  with ``weigh`` off 1 in place of w

    and, with any of them, 0 where lag > max_token_lag. A masked token still counts in the step's
    denominator, so masking more makes the step smaller.

    Args:
        log_weights: [N] nats, at the level wanted (``log_weights``).
        lags: [N] versions between sampler and trainer.
        config: kind, bounds and the largest lag.

    Source: Espeholt et al. 2018, arXiv:1802.01561, and Yao et al. 2025 (truncation, TIS); Ling
    Team 2025, arXiv:2510.18855 (mask, IcePop).
    """
    weights = log_weights.detach().clamp(max=LOG_RATIO_BOUND).exp()
    nothing = torch.zeros_like(weights, dtype=torch.bool)
    truncated, masked = nothing, nothing
    match config.kind:
        case "none":
            weights = torch.ones_like(weights)
        case "truncate":
            truncated = weights > config.high
            weights = weights.clamp(max=config.high)
        case "mask":
            masked = ~((weights >= config.low) & (weights <= config.high))
            weights = weights if config.weigh else torch.ones_like(weights)
    if config.max_token_lag is not None:
        masked = masked | (lags > config.max_token_lag)
    return Correction(weights.masked_fill(masked, 0.0), truncated & ~masked, masked)
