"""Objectives that are older than GRPO, or go back behind it: REINFORCE and PPO."""

from __future__ import annotations

from lagzero.algorithms.form import Algorithm, Setting

_PPO = "arXiv:1707.06347"
_C4 = "arXiv:2203.02155, App. C.4"
_CODE = "arXiv:1909.08593, its code"

PPO = Algorithm(
    "ppo",
    "PPO",
    "A critic's values and generalised advantages, a clipped ratio and a KL penalty in the reward.",
    f"Schulman et al. 2017, {_PPO}; for language models Ziegler et al. 2019, arXiv:1909.08593, and "
    "Ouyang et al. 2022, InstructGPT, arXiv:2203.02155",
    {
        "advantage.estimator": Setting("gae", _C4),
        "advantage.normalize_std": Setting(False, "no groups"),
        "advantage.normalize_batch": Setting(True, "advantage whitening, arXiv:2403.17031"),
        "advantage.gamma": Setting(1.0, f"{_C4}: no discount"),
        "advantage.lam": Setting(0.95, _CODE),
        "loss.policy": Setting("clip", f"{_PPO}, eq. 7"),
        "loss.clip_low": Setting(0.2, _C4),
        "loss.clip_high": Setting(0.2, _C4),
        "loss.ratio": Setting("token", f"{_PPO}, eq. 7"),
        "loss.proximal": Setting("behaviour", f"{_PPO}, eq. 7: the old policy sampled"),
        "loss.reduction": Setting("token_mean", f"{_PPO}, eq. 7: a mean over time steps"),
        "loss.kl.coefficient": Setting(0.02, _C4),
        "loss.kl.estimator": Setting("k1", "arXiv:2203.02155, eq. 2"),
        "loss.kl.where": Setting("reward", "arXiv:2203.02155, eq. 2"),
        "train.passes": Setting(4, _CODE),
        "critic.clip": Setting(0.2, _CODE),
        "critic.optimizer.lr": Setting(9e-6, _C4),
    },
    sizes="512 episodes in a batch (arXiv:2203.02155, App. C.4)",
    lacks=("a critic that starts from the reward model: give its folder as critic.path",),
)

RLOO = Algorithm(
    "rloo",
    "RLOO",
    "REINFORCE on whole sequences with the mean of the other members as baseline.",
    "Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019",
    {
        "advantage.estimator": Setting("leave_one_out", "Sec. 2 and 3"),
        "advantage.normalize_std": Setting(False, "Sec. 3"),
        "advantage.zero_spread": Setting("keep", "Sec. 3 is a mean over all samples"),
        "loss.policy": Setting("reinforce", "Sec. 3: neither ratio nor clip"),
        "loss.reduction": Setting("constant", "Sec. 3: a sequence is one action, so a sum"),
        "loss.constant": Setting(1.0, "Sec. 3: a sequence is one action, so a sum"),
        "loss.kl.coefficient": Setting(0.03, "App. C, for TL;DR; 0.1 for HH"),
        "loss.kl.estimator": Setting("k1", "Sec. 2: r - beta log(pi / ref)"),
        "loss.kl.where": Setting("reward", "Sec. 2: r - beta log(pi / ref)"),
    },
    sizes="2 or 4 samples a prompt, learning rate 1e-6 (App. C)",
)

REINFORCE = Algorithm(
    "reinforce",
    "REINFORCE",
    "The policy gradient itself: each sequence's log-probability times its reward.",
    "Williams 1992, Machine Learning 8",
    {
        "advantage.estimator": Setting("none", "no baseline"),
        "advantage.normalize_std": Setting(False, "no baseline"),
        "loss.policy": Setting("reinforce", "the REINFORCE estimator"),
        "loss.reduction": Setting("constant", "a sequence is one action, so a sum"),
        "loss.constant": Setting(1.0, "a sequence is one action, so a sum"),
        "loss.kl.coefficient": Setting(0.0, "no KL term"),
    },
)

REINFORCE_PP = Algorithm(
    "reinforce_pp",
    "REINFORCE++",
    "No groups: advantages are normalised over the whole batch, and KL is taken off the reward.",
    "Hu et al. 2025, arXiv:2501.03262 (v9)",
    {
        "advantage.estimator": Setting("none", "eq. 4"),
        "advantage.normalize_std": Setting(False, "Sec. 3.1"),
        "advantage.normalize_batch": Setting(True, "eq. 5"),
        "loss.policy": Setting("clip", "eq. 1"),
        "loss.clip_low": Setting(0.2, "v1, Table 1"),
        "loss.clip_high": Setting(0.2, "v1, Table 1"),
        "loss.ratio": Setting("token", "eq. 1"),
        "loss.proximal": Setting("behaviour", "eq. 1: the old policy sampled the outputs"),
        "loss.reduction": Setting("sequence_mean", "eq. 1: 1/|o| sum_t"),
        "loss.kl.coefficient": Setting(0.001, "v1, Table 1, for mathematics; 0.01 otherwise"),
        "loss.kl.estimator": Setting("k1", "eq. 4"),
        "loss.kl.where": Setting("reward", "eq. 4"),
    },
    lacks=(
        "the sum of eq. 4 begins at the token; here it is over the whole sequence, which has the "
        "same expected gradient and more variance",
    ),
)

REINFORCE_PP_BASELINE = Algorithm(
    "reinforce_pp_baseline",
    "REINFORCE++ with baseline",
    "The group's mean as baseline, the standard deviation of the whole batch, a k2 term in the "
    "loss.",
    "Hu et al. 2025, arXiv:2501.03262 (v9)",
    {
        "advantage.estimator": Setting("group_mean", "eq. 6"),
        "advantage.normalize_std": Setting(False, "eq. 6"),
        "advantage.normalize_batch": Setting(True, "eq. 7"),
        "advantage.zero_spread": Setting("keep", "eq. 7 is over all samples"),
        "loss.policy": Setting("clip", "eq. 1"),
        "loss.clip_low": Setting(0.2, "v1, Table 1"),
        "loss.clip_high": Setting(0.2, "v1, Table 1"),
        "loss.ratio": Setting("token", "eq. 1"),
        "loss.proximal": Setting("behaviour", "eq. 1: the old policy sampled the outputs"),
        "loss.reduction": Setting("sequence_mean", "eq. 1: 1/|o| sum_t"),
        "loss.kl.coefficient": Setting(0.001, "not stated; v1, Table 1, for the reward's penalty"),
        "loss.kl.estimator": Setting("k2", "eq. 8"),
        "loss.kl.where": Setting("loss", "eq. 8"),
    },
)
