"""Importance ratios: against which policy, and over what stretch of tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lagzero.losses.inputs import LossInputs

Level = Literal["token", "sequence_product", "sequence_mean"]
Anchor = Literal["behaviour", "recomputed", "interpolated"]


def proximal_logprobs(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Return log prox [N], nats, without gradient: the policy just before the step's first update.

    In the first update that is the policy itself, so no forward pass is spent on it; in later ones
    it is what the first one computed.
    """
    if inputs.proximal_logprobs is None:
        return logprobs.detach()
    return inputs.proximal_logprobs.detach().to(logprobs.dtype)


def anchor_logprobs(logprobs: Tensor, inputs: LossInputs, anchor: Anchor) -> Tensor:
    """Return the log-probs a [N] that a ratio is taken against, nats, without gradient.

    With l the policy's, m the behaviour's and p the proximal log-prob, and d the token's lag::

        behaviour     a = m
        recomputed    a = p
        interpolated  a = alpha m + (1 - alpha) l,   alpha = 0 where d = 0, else 1 / d

    ``interpolated`` stands in for the policy one version before: of d versions between the
    sampler and the trainer, d - 1 are taken as done, on a line in log space. At lag 1 it is the
    behaviour policy.

    Source: Hilton et al. 2021, arXiv:2110.00641 (a proximal policy apart from the behaviour);
    A-3PO, arXiv:2512.06547 (interpolated).
    """
    match anchor:
        case "behaviour":
            return inputs.behaviour_logprobs.to(logprobs.dtype)
        case "recomputed":
            return proximal_logprobs(logprobs, inputs)
        case "interpolated":
            current, behaviour = logprobs.detach(), inputs.behaviour_logprobs.to(logprobs.dtype)
            lags = inputs.lags.to(logprobs.dtype)
            alpha = torch.where(lags > 0, 1.0 / lags.clamp(min=1), 0.0)
            return torch.lerp(current, behaviour, alpha)


def at_level(log_ratios: Tensor, inputs: LossInputs, level: Level) -> Tensor:
    """Turn the log-ratios d [N] of tokens into those of a level [N], one for each token still.

    With a sequence of L trained tokens::

        token             d_t
        sequence_product  sum_t d_t               exact: the ratio of the sequences' probabilities
        sequence_mean     (1/L) sum_t d_t         their geometric mean over tokens

    The two sequence ratios differ: log-ratios [.1, .2] give e^.3 = 1.3499 and e^.15 = 1.1618.
    Neither is a mean or sum of token ratios. Sums are taken in log space, so they cannot overflow.
    """
    if level == "token":
        return log_ratios
    totals = log_ratios.new_zeros(inputs.num_sequences)
    totals = totals.index_add(0, inputs.sequences, log_ratios)
    if level == "sequence_mean":
        lengths = torch.zeros_like(totals)
        lengths = lengths.index_add(0, inputs.sequences, torch.ones_like(log_ratios))
        totals = totals / lengths.clamp(min=1)
    return totals[inputs.sequences]


def log_ratios(
    logprobs: Tensor, inputs: LossInputs, level: Level, anchor: Anchor = "behaviour"
) -> Tensor:
    """Return the log importance ratio [N] of the policy to its anchor, in nats, with gradient.

    d_t = logprobs_t - a_t (``anchor_logprobs``), taken to its level (``at_level``): ``token`` is
    PPO's and GRPO's ratio, ``sequence_product`` the exact importance weight of a sequence,
    ``sequence_mean`` GSPO's length-normalised surrogate.

    Source: Schulman et al. 2017, arXiv:1707.06347 (token); Zheng et al. 2025, arXiv:2507.18071
    (sequence_mean).
    """
    return at_level(logprobs - anchor_logprobs(logprobs, inputs, anchor), inputs, level)
