"""How far the distribution that sampled the tokens is from the one being trained."""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from lagzero.losses.inputs import LossInputs
from lagzero.losses.ratio import proximal_logprobs
from lagzero.losses.reduce import Metrics
from lagzero.types import LOG_RATIO_BOUND

LAST_LAG = 8
"""Lags from here on share one bucket, as in ``lag/share/*``."""


def behaviour_metrics(logprobs: Tensor, inputs: LossInputs, name: str = "behaviour") -> Metrics:
    """Measure the proximal policy against the behaviour policy on the sampled tokens; no gradient.

    The update under way is no part of it: ``policy/ratio_*`` is. With d = proximal - behaviour
    (nats), rho = exp(d), tokens sampled from behaviour::

        kl_k1        mean of -d             estimates KL(behaviour || proximal), can be negative
        kl_k3        mean of rho - 1 - d    the same, never negative, less spread
        gap_max      max of |d|
        ratio_mean, ratio_max, ratio_min, ratio_square_mean    of the token ratios rho

    d is cut off above LOG_RATIO_BOUND in everything but kl_k1 and gap_max.
    At equal policy version this is the engine-trainer mismatch; see ``mismatch_metrics``.
    """
    difference = _difference(logprobs, inputs)
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


def mismatch_metrics(logprobs: Tensor, inputs: LossInputs) -> Metrics:
    """Measure ``behaviour_metrics`` on the tokens that the trainer's own version sampled.

    Lag plays no part there: what remains is the difference in numerics between sampler and
    trainer.
    """
    same = inputs.versions == inputs.version
    return behaviour_metrics(logprobs[same], inputs.where(same), "mismatch")


def lag_metrics(
    logprobs: Tensor, inputs: LossInputs, stopped: Tensor | None, capped: Tensor | None
) -> Metrics:
    """Measure, for the tokens of each lag d apart, what staleness does: ``lag/d/*``.

    ``kl_k1``, ``kl_k3`` and the ratios are those of ``behaviour_metrics``. ``stopped`` and
    ``capped`` [N] bool say which tokens the objective's bounds or the correction leave without a
    gradient, or with a smaller weight; None where nothing could. Lags of LAST_LAG and more are
    one bucket, ``lag/8_up/*``.
    """
    difference = _difference(logprobs, inputs)
    cut = difference.clamp(max=LOG_RATIO_BOUND)
    rho = cut.exp()
    columns = {
        "kl_k1": -difference,
        "kl_k3": torch.expm1(cut) - cut,
        "ratio_mean": rho,
        "ratio_square_mean": rho.square(),
    }
    for name, flags in (("stopped_share", stopped), ("capped_share", capped)):
        if flags is not None:
            columns[name] = flags.to(rho.dtype)
    lags = inputs.lags.clamp(max=LAST_LAG)
    present: list[int] = torch.unique(lags).long().tolist()
    buckets = {f"{lag}_up" if lag == LAST_LAG else f"{lag}": lags == lag for lag in present}
    return {
        f"lag/{bucket}/{name}": (column[chosen], "mean")
        for bucket, chosen in buckets.items()
        for name, column in columns.items()
    }


def effective_sample_share(mean: float, square_mean: float) -> float:
    """Return the effective sample size of weights as a share of the tokens, in (0, 1].

    (sum rho)^2 / (N sum rho^2), from the mean and the mean square of a whole step; it cannot be
    averaged over micro-batches. Source: Kish 1965.
    """
    return mean**2 / square_mean


def _difference(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    proximal = proximal_logprobs(logprobs, inputs)
    return proximal - inputs.behaviour_logprobs.to(logprobs.dtype)
