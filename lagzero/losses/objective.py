"""The whole objective, composed from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lagzero.config import LossConfig
from lagzero.losses.correction import Correction, correction_weights, corrects, log_weights
from lagzero.losses.inputs import LossInputs
from lagzero.losses.kl import kl_per_token
from lagzero.losses.mismatch import (
    behaviour_metrics,
    effective_sample_share,
    lag_metrics,
    mismatch_metrics,
)
from lagzero.losses.policy import PolicyTerm, band_loss, cispo_loss, clip_loss, log_prob_loss
from lagzero.losses.preference import dpo_loss
from lagzero.losses.ratio import log_ratios
from lagzero.losses.reduce import Metrics, reduce_metrics

Loss = Callable[[Tensor, Tensor | None, LossInputs], tuple[Tensor, Metrics]]
"""(log-probs [N], entropies [N] or None, inputs) -> (per-token loss [N], metrics)."""


def needs_entropy(config: LossConfig) -> bool:
    """Say whether the loss needs entropies that carry a gradient."""
    return config.entropy_coefficient != 0


def needs_reference(config: LossConfig) -> bool:
    """Say whether anything of the objective is measured against a reference policy."""
    return config.kl.coefficient > 0 or config.policy == "dpo"


def make_loss(config: LossConfig) -> Loss:
    """Return the loss function that the configuration describes.

    Per token, before the step's weights, with w the correction's weight::

        loss = w * policy + kl.coefficient * KL(policy, reference) - entropy_coefficient * H

    The KL term is there with ``kl.where: loss`` only (a penalty elsewhere is part of the
    advantages by now). Entropies and reference log-probs that are given but have no coefficient
    are measured and nothing else.

    The function raises ValueError when a term with a coefficient lacks its input, and for log-probs
    that are not [N] or have less precision than float32.
    """

    def loss(
        logprobs: Tensor, entropies: Tensor | None, inputs: LossInputs
    ) -> tuple[Tensor, Metrics]:
        _check(logprobs, inputs)
        term = _policy_term(logprobs, inputs, config)
        per_token, stopped, capped = term.loss, term.stopped, term.capped
        metrics = {
            **term.metrics,
            **behaviour_metrics(logprobs, inputs),
            **mismatch_metrics(logprobs, inputs),
        }
        if corrects(config.correction):
            correction = _correction(logprobs, inputs, config)
            per_token = correction.apply(per_token)
            stopped = _either(stopped, correction.masked)
            capped = _either(capped, correction.truncated)
            metrics |= correction.metrics()
        metrics |= lag_metrics(logprobs, inputs, stopped, capped)
        per_token, more = _with_kl(per_token, logprobs, inputs, config)
        metrics |= more
        per_token, more = _with_entropy(per_token, entropies, config)
        return per_token, {**metrics, **more}

    return loss


def _policy_term(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> PolicyTerm:
    advantages = inputs.advantages.to(logprobs.dtype)
    low, high = config.clip_low, config.clip_high

    def ratios() -> Tensor:
        return log_ratios(logprobs, inputs, config.ratio, config.proximal)

    match config.policy:
        case "clip":
            return clip_loss(ratios(), advantages, low, high, config.dual_clip)
        case "cispo":
            return cispo_loss(ratios(), logprobs, advantages, low, high)
        case "band":
            return band_loss(ratios(), advantages, low, high)
        case "reinforce" | "cross_entropy":
            return log_prob_loss(logprobs, advantages)
        case "dpo":
            return dpo_loss(logprobs, inputs, config.dpo_beta)


def _correction(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> Correction:
    # The proximal policy itself, except where the ratio's anchor only stands in for it.
    stands_in = config.proximal == "interpolated" and config.policy != "reinforce"
    anchor = "interpolated" if stands_in else "recomputed"
    weights = log_weights(logprobs, inputs, config.correction, anchor)
    return correction_weights(weights, inputs.lags, config.correction)


def _with_kl(
    per_token: Tensor, logprobs: Tensor, inputs: LossInputs, config: LossConfig
) -> tuple[Tensor, Metrics]:
    in_loss = config.kl.coefficient > 0 and config.kl.where == "loss"
    if inputs.reference_logprobs is None:
        if in_loss:
            raise ValueError("the KL term needs reference log-probs, and the batch has none")
        return per_token, {}
    kl = kl_per_token(logprobs, inputs.reference_logprobs, config.kl.estimator)
    if in_loss:
        per_token = per_token + config.kl.coefficient * kl
    return per_token, {f"reference/kl_{config.kl.estimator}": (kl.detach(), "mean")}


def _with_entropy(
    per_token: Tensor, entropies: Tensor | None, config: LossConfig
) -> tuple[Tensor, Metrics]:
    if entropies is None:
        if needs_entropy(config):
            raise ValueError("the entropy term needs entropies, and none were given")
        return per_token, {}
    if entropies.shape != per_token.shape:
        raise ValueError(f"{tuple(entropies.shape)} entropies, {tuple(per_token.shape)}")
    if needs_entropy(config):
        per_token = per_token - config.entropy_coefficient * entropies
    return per_token, {"policy/entropy": (entropies.detach(), "mean")}


def _either(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one | other


def _check(logprobs: Tensor, inputs: LossInputs) -> None:
    if logprobs.shape != inputs.advantages.shape:
        raise ValueError(
            f"{tuple(logprobs.shape)} log-probs for {tuple(inputs.advantages.shape)} tokens"
        )
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log-probs must be float32 or float64, not {logprobs.dtype}")


def step_metrics(parts: Sequence[Metrics]) -> dict[str, float]:
    """Reduce the micro-batches' metrics to one number each for the step.

    A mean square stands for the effective sample size: ``<name>/<what>_square_mean`` becomes
    ``<name>/ess_share``, which is left out where every weight is 0.
    """
    reduced = reduce_metrics(parts)
    for square in [name for name in reduced if name.endswith("_square_mean")]:
        square_mean = reduced.pop(square)
        if square_mean > 0:
            mean = reduced[square.replace("_square_mean", "_mean")]
            room = square.rpartition("/")[0]
            reduced[f"{room}/ess_share"] = effective_sample_share(mean, square_mean)
    return reduced
