"""Objectives that learn from something else than the reward itself: a preference, a teacher."""

from __future__ import annotations

from lagzero.algorithms.form import Algorithm, Setting

ONLINE_DPO = Algorithm(
    "online_dpo",
    "Online DPO",
    "The best against the worst rollout of each group, as a preference.",
    "Noukhovitch et al. 2024, Asynchronous RLHF, arXiv:2410.18252; Rafailov et al. 2023, "
    "arXiv:2305.18290",
    {
        "advantage.normalize_std": Setting(False, "only the order of the rewards counts"),
        "advantage.zero_spread": Setting("drop", "equal rewards are no preference"),
        "loss.policy": Setting("dpo", "arXiv:2305.18290, eq. 7"),
        "loss.dpo_beta": Setting(0.1, "arXiv:2305.18290, App. B; arXiv:2410.18252, its code"),
        "loss.reduction": Setting("sequence_mean", "arXiv:2305.18290, eq. 7: a mean over pairs"),
        "loss.kl.coefficient": Setting(0.0, "beta is the distance to the reference"),
    },
)

DISTILL = Algorithm(
    "distill",
    "On-policy distillation",
    "The student's own samples, each token judged by the teacher: its advantage is minus the "
    "reverse KL.",
    "Thinking Machines 2025, On-Policy Distillation; Agarwal et al. 2023, GKD, arXiv:2306.13649",
    {
        "advantage.estimator": Setting("none", "the teacher is the only signal"),
        "advantage.normalize_std": Setting(False, "the teacher is the only signal"),
        "loss.policy": Setting("reinforce", "Thinking Machines 2025: the policy gradient"),
        "loss.correction.kind": Setting("truncate", "Thinking Machines 2025: importance sampling"),
        "loss.correction.level": Setting("token", "Thinking Machines 2025: importance sampling"),
        "loss.correction.high": Setting(2.0, "not in the source; 2 is TIS's (Yao et al. 2025)"),
        "loss.reduction": Setting("token_mean", "the source sums, a constant factor"),
        "loss.kl.coefficient": Setting(1.0, "tinker-cookbook, kl_penalty_coef"),
        "loss.kl.estimator": Setting("k1", "Thinking Machines 2025: log-prob minus the teacher's"),
        "loss.kl.where": Setting("advantage", "Thinking Machines 2025: discount 0"),
    },
    lacks=(
        "a reward: what score.rewards gives is added, so a weight of 0 leaves the teacher alone",
    ),
    needs={"model.reference": "the teacher there, a folder or hub id with the same tokenizer"},
)
