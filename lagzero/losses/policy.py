"""The clipped policy-gradient loss and its three importance ratios."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lagzero.losses.inputs import LossInputs
from lagzero.losses.reduce import Metrics, Reduction
from lagzero.types import LOG_RATIO_BOUND

Ratio = Literal["token", "sequence_product", "sequence_mean"]


def log_ratios(logprobs: Tensor, inputs: LossInputs, ratio: Ratio) -> Tensor:
    """Return the log importance ratio [N] that each token's loss uses, in nats.

    With d_t = logprobs_t - behaviour_t and a sequence of L trained tokens::

        token             d_t                     one ratio a token (PPO, GRPO)
        sequence_product  sum_t d_t               exact: pi(sequence) / mu(sequence)
        sequence_mean     (1/L) sum_t d_t         length-normalised surrogate (GSPO)

    The two sequence ratios differ: log-ratios [.1, .2] give e^.3 = 1.3499 and e^.15 = 1.1618.
    Neither is a mean or sum of token ratios. Sums are taken in log space, so they cannot overflow.

    Source: Schulman et al. 2017, arXiv:1707.06347 (token); Zheng et al. 2025, arXiv:2507.18071
    (sequence_mean).
    """
    difference = logprobs - inputs.behaviour_logprobs.to(logprobs.dtype)
    if ratio == "token":
        return difference
    totals = difference.new_zeros(inputs.num_sequences)
    totals = totals.index_add(0, inputs.sequences, difference)
    if ratio == "sequence_mean":
        lengths = torch.zeros_like(totals)
        lengths = lengths.index_add(0, inputs.sequences, torch.ones_like(difference))
        totals = totals / lengths.clamp(min=1)
    return totals[inputs.sequences]


def clipped_policy_loss(
    logprobs: Tensor,
    inputs: LossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
) -> tuple[Tensor, Metrics]:
    """Return the per-token clipped surrogate [N] and its metrics.

    With rho = exp(min(log ratio, LOG_RATIO_BOUND)) and A the token's advantage::

        loss = -min(rho * A, clamp(rho, 1 - clip_low, 1 + clip_high) * A)
        loss = min(loss, dual_clip * |A|)          where A < 0, if dual_clip is given

    The gradient is that of the formula, the ratio included. With a sequence ratio every token of
    a sequence repeats the sequence's surrogate: ``sequence_mean`` reduction then gives the mean
    over sequences (GSPO, or the exact importance-weighted objective); ``token_mean`` weighs each
    sequence by its length besides.

    Args:
        logprobs: [N] float32 or float64, nats, under the policy being trained.
        inputs: the tokens' other facts.
        clip_low: in [0, 1). clip_high: >= 0. dual_clip: > 1, or None.
        ratio: see ``log_ratios``.

    Raises ValueError when ``logprobs`` is not [N] or has less precision than float32.
    Source: Schulman et al. 2017, arXiv:1707.06347; Ye et al. 2019, arXiv:1912.09729 (dual clip);
    Yu et al. 2025, arXiv:2503.14476 (asymmetric clip).
    """
    if logprobs.shape != inputs.advantages.shape:
        raise ValueError(
            f"{tuple(logprobs.shape)} log-probs for {tuple(inputs.advantages.shape)} tokens"
        )
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log-probs must be float32 or float64, not {logprobs.dtype}")
    advantages = inputs.advantages.to(logprobs.dtype)
    rho = log_ratios(logprobs, inputs, ratio).clamp(max=LOG_RATIO_BOUND).exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -torch.minimum(rho * advantages, rho.clamp(low, high) * advantages)
    flags = {
        "policy/clipped_low": (advantages < 0) & (rho < low),
        "policy/clipped_high": (advantages > 0) & (rho > high),
    }
    if dual_clip is not None:
        ceiling = dual_clip * advantages.abs()
        flags["policy/dual_clipped"] = (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    metrics: dict[str, tuple[Tensor, Reduction]] = {
        "policy/loss": (loss.detach(), "mean"),
        "policy/ratio_mean": (rho.detach(), "mean"),
        "policy/ratio_max": (rho.detach(), "max"),
        "policy/ratio_min": (rho.detach(), "min"),
    }
    for name, flag in flags.items():
        metrics[f"{name}_share"] = (flag.detach().to(logprobs.dtype), "mean")
    return loss, metrics
