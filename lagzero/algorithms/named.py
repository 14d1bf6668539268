"""``algorithm: <name>``: the published objectives by name, in the order of the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from lagzero.algorithms.classic import PPO, REINFORCE, REINFORCE_PP, REINFORCE_PP_BASELINE, RLOO
from lagzero.algorithms.form import Algorithm
from lagzero.algorithms.grouped import CISPO, DAPO, DR_GRPO, GRPO, GSPO
from lagzero.algorithms.recipes import AREAL, ICEPOP, OLMO3, SCALERL
from lagzero.algorithms.signals import DISTILL, ONLINE_DPO

ALGORITHMS: Mapping[str, Algorithm] = {
    each.name: each
    for each in (
        GRPO,
        DR_GRPO,
        DAPO,
        GSPO,
        CISPO,
        PPO,
        RLOO,
        REINFORCE,
        REINFORCE_PP,
        REINFORCE_PP_BASELINE,
        ONLINE_DPO,
        DISTILL,
        OLMO3,
        ICEPOP,
        SCALERL,
        AREAL,
    )
}

TIED: Mapping[str, tuple[str, ...]] = {
    "advantage.gamma": ("advantage.estimator",),
    "advantage.lam": ("advantage.estimator",),
    "critic.clip": ("advantage.estimator",),
    "critic.optimizer.lr": ("advantage.estimator", "critic.shared"),
    "loss.clip_low": ("loss.policy",),
    "loss.clip_high": ("loss.policy",),
    "loss.constant": ("loss.reduction",),
    "loss.correction.level": ("loss.correction.kind",),
    "loss.correction.low": ("loss.correction.kind",),
    "loss.correction.high": ("loss.correction.kind",),
    "loss.correction.weigh": ("loss.correction.kind",),
    "loss.dpo_beta": ("loss.policy",),
    "loss.kl.estimator": ("loss.kl.coefficient",),
    "loss.kl.where": ("loss.kl.coefficient",),
    "schedule.max_lag": ("staleness.preset",),
}
"""Keys that mean something only beside an algorithm's own choice of others."""
