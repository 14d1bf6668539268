"""The policy-gradient objectives, one function each, on ratios that ``ratio`` has made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lagzero.losses.reduce import Metrics
from lagzero.types import LOG_RATIO_BOUND


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """The policy's part of the loss, per token, and what its bounds did."""

    loss: Tensor  # [N]
    metrics: Metrics
    stopped: Tensor | None = None  # [N] bool, the bounds leave no gradient; None: there are none
    capped: Tensor | None = (
        None  # [N] bool, the bounds cut the token's weight; None: there are none
    )


def clip_loss(
    log_ratios: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyTerm:
    """Return the clipped surrogate.

    With r = exp(min(log ratio, LOG_RATIO_BOUND)) and A the token's advantage::

        loss = -min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, dual_clip |A|)          where A < 0, if dual_clip is given

    The gradient is that of the formula, the ratio included: 0 where A > 0 and r is above its
    bound, where A < 0 and r is below it, and at the dual bound. With a sequence ratio every token
    of a sequence repeats the sequence's surrogate: ``sequence_mean`` reduction then gives the mean
    over sequences (GSPO, or the exact importance-weighted objective); ``token_mean`` weighs each
    sequence by its length besides.

    Args:
        log_ratios: [N] nats, with gradient.
        advantages: [N].
        clip_low: in [0, 1]. clip_high: >= 0. dual_clip: > 1, or None.

    Source: Schulman et al. 2017, arXiv:1707.06347; Ye et al. 2019, arXiv:1912.09729 (dual clip);
    Yu et al. 2025, arXiv:2503.14476 (asymmetric clip).
    """
    ratios = _ratios(log_ratios)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
    flags = {
        "policy/clipped_low": (advantages < 0) & (ratios < low),
        "policy/clipped_high": (advantages > 0) & (ratios > high),
    }
    if dual_clip is not None:
        ceiling = dual_clip * advantages.abs()
        flags["policy/dual_clipped"] = (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    stopped = torch.stack(list(flags.values())).any(0)
    return PolicyTerm(loss, _metrics(loss, ratios, flags), stopped=stopped)


def cispo_loss(
    log_ratios: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyTerm:
    """Return the policy gradient with a bounded importance weight; every token keeps a gradient.

    With r as in ``clip_loss`` and sg a value without gradient::

        loss = -sg(clamp(r, 1 - clip_low, 1 + clip_high)) A log p

    Args as in ``clip_loss``; logprobs: [N] nats, with gradient.
    Source: MiniMax 2025, arXiv:2506.13585.
    """
    ratios = _ratios(log_ratios).detach()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -ratios.clamp(low, high) * advantages * logprobs
    flags = {"policy/clipped_low": ratios < low, "policy/clipped_high": ratios > high}
    return PolicyTerm(loss, _metrics(loss, ratios, flags), capped=(ratios < low) | (ratios > high))


def band_loss(
    log_ratios: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> PolicyTerm:
    """Return the importance-weighted objective, without the tokens outside the ratio's bounds.

    With r as in ``clip_loss``::

        loss = -r A      where 1 - clip_low <= r <= 1 + clip_high, else 0

    Unlike the clip, which leaves the way back into the bounds open, the sign of A plays no part.

    Args as in ``clip_loss``.
    Source: Kimi Team 2026, arXiv:2602.02276.
    """
    ratios = _ratios(log_ratios)
    below, above = ratios < 1.0 - clip_low, ratios > 1.0 + clip_high
    loss = torch.where(below | above, 0.0, -ratios * advantages)
    flags = {"policy/clipped_low": below, "policy/clipped_high": above}
    return PolicyTerm(loss, _metrics(loss, ratios, flags), stopped=below | above)


def log_prob_loss(logprobs: Tensor, advantages: Tensor) -> PolicyTerm:
    """Return -A log p [N]: the policy gradient itself, or weighted cross-entropy.

    With A an advantage this is REINFORCE; with A a weight such as the reward it is supervised
    training on the samples. It holds no ratio: tokens of other policies need a correction.

    Args: logprobs: [N] nats, with gradient. advantages: [N].
    Source: Williams 1992.
    """
    loss = -advantages * logprobs
    return PolicyTerm(loss, {"policy/loss": (loss.detach(), "mean")})


def _ratios(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(max=LOG_RATIO_BOUND).exp()


def _metrics(loss: Tensor, ratios: Tensor, flags: dict[str, Tensor]) -> Metrics:
    return {
        "policy/loss": (loss.detach(), "mean"),
        "policy/ratio_mean": (ratios.detach(), "mean"),
        "policy/ratio_max": (ratios.detach(), "max"),
        "policy/ratio_min": (ratios.detach(), "min"),
        **{f"{name}_share": (flag.to(loss.dtype), "mean") for name, flag in flags.items()},
    }
