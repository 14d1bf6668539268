"""The whole objective, composed from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lagzero.config import LossConfig
from lagzero.losses.inputs import LossInputs
from lagzero.losses.kl import kl_per_token
from lagzero.losses.mismatch import behaviour_metrics, effective_sample_share
from lagzero.losses.policy import clipped_policy_loss
from lagzero.losses.reduce import Metrics, reduce_metrics

Loss = Callable[[Tensor, Tensor | None, LossInputs], tuple[Tensor, Metrics]]
"""(log-probs [N], entropies [N] or None, inputs) -> (per-token loss [N], metrics)."""


def needs_entropy(config: LossConfig) -> bool:
    """Say whether the loss needs entropies that carry a gradient."""
    return config.entropy_coefficient != 0


def make_loss(config: LossConfig) -> Loss:
    """Return the loss function that the configuration describes.

    Per token, before the step's weights::

        loss = policy + kl.coefficient * KL(policy, reference) - entropy_coefficient * H

    The KL term is there with ``kl.where: loss`` only (a penalty in the reward is part of the
    advantages by now). Entropies and reference log-probs that are given but have no coefficient
    are measured and nothing else. The function raises ValueError when a term with a coefficient
    lacks its input.
    """

    def loss(
        logprobs: Tensor, entropies: Tensor | None, inputs: LossInputs
    ) -> tuple[Tensor, Metrics]:
        per_token, policy_metrics = clipped_policy_loss(
            logprobs, inputs, config.clip_low, config.clip_high, config.dual_clip, config.ratio
        )
        metrics = {**policy_metrics, **behaviour_metrics(logprobs, inputs)}
        in_loss = config.kl.coefficient > 0 and config.kl.where == "loss"
        if inputs.reference_logprobs is not None:
            kl = kl_per_token(logprobs, inputs.reference_logprobs, config.kl.estimator)
            metrics[f"reference/kl_{config.kl.estimator}"] = (kl.detach(), "mean")
            if in_loss:
                per_token = per_token + config.kl.coefficient * kl
        elif in_loss:
            raise ValueError("the KL term needs reference log-probs, and the batch has none")
        if entropies is not None:
            if entropies.shape != logprobs.shape:
                raise ValueError(f"{tuple(entropies.shape)} entropies, {tuple(logprobs.shape)}")
            metrics["policy/entropy"] = (entropies.detach(), "mean")
            if needs_entropy(config):
                per_token = per_token - config.entropy_coefficient * entropies
        elif needs_entropy(config):
            raise ValueError("the entropy term needs entropies, and none were given")
        return per_token, metrics

    return loss


def step_metrics(parts: Sequence[Metrics]) -> dict[str, float]:
    """Reduce the micro-batches' metrics to one number each for the step.

    Adds ``<name>/ess_share`` wherever ratios were measured, and drops their mean square.
    """
    reduced = reduce_metrics(parts)
    for name in ("behaviour", "mismatch"):
        if f"{name}/ratio_square_mean" in reduced:
            reduced[f"{name}/ess_share"] = effective_sample_share(reduced, name)
            del reduced[f"{name}/ratio_square_mean"]
    return reduced
