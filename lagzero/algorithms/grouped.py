"""Objectives that compare the rollouts of one prompt: GRPO and what came of it."""

from __future__ import annotations

from lagzero.algorithms.form import Algorithm, Like, Setting

_PPO = "not stated; PPO's (arXiv:1707.06347, Sec. 3)"
_EPS_MAX = "not stated; 5 = 1 + 4 is ScaleRL's (arXiv:2510.13786, App. A.17: 4, 5, 8 do alike)"

GRPO = Algorithm(
    "grpo",
    "GRPO",
    "The group's mean and standard deviation in place of a critic, and a KL term in the loss.",
    "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    {
        "advantage.estimator": Setting("group_mean", "Sec. 4.1.2"),
        "advantage.normalize_std": Setting(True, "Sec. 4.1.2"),
        "advantage.zero_spread": Setting("keep", "eq. 3 is a mean over all groups"),
        "loss.policy": Setting("clip", "eq. 3"),
        "loss.clip_low": Setting(0.2, _PPO),
        "loss.clip_high": Setting(0.2, _PPO),
        "loss.ratio": Setting("token", "eq. 3"),
        "loss.proximal": Setting("behaviour", "eq. 3: the old policy sampled the outputs"),
        "loss.reduction": Setting("sequence_mean", "eq. 3: 1/G sum_i 1/|o_i| sum_t"),
        "loss.kl.coefficient": Setting(0.04, "Sec. 4.2"),
        "loss.kl.estimator": Setting("k3", "eq. 4"),
        "loss.kl.where": Setting("loss", "eq. 3"),
        "train.passes": Setting(1, "Sec. 4.2: one update after each exploration stage"),
    },
    sizes="64 outputs a question, 1,024 in a batch, learning rate 1e-6 (Sec. 4.2)",
)

DR_GRPO = Algorithm(
    "dr_grpo",
    "Dr. GRPO",
    "GRPO without the two divisions that bias it: by a response's length and by the group's "
    "standard deviation.",
    "Liu et al. 2025, arXiv:2503.20783",
    {
        "advantage.estimator": Setting("group_mean", "Sec. 3.2"),
        "advantage.normalize_std": Setting(False, "Sec. 3.2"),
        "advantage.zero_spread": Setting("keep", "Sec. 3.2 is a mean over all groups"),
        "loss.policy": Setting("clip", "Sec. 3.2"),
        "loss.clip_low": Setting(0.2, "Table 6"),
        "loss.clip_high": Setting(0.2, "Table 6"),
        "loss.ratio": Setting("token", "Sec. 3.2"),
        "loss.proximal": Setting("behaviour", "Sec. 3.2: the old policy sampled the outputs"),
        "loss.reduction": Setting("constant", "Sec. 3.2 and Listing 1"),
        "loss.constant": Setting(
            Like("rollout.max_new_tokens", 256),
            "Listing 1: the most tokens of a response",
        ),
        "loss.kl.coefficient": Setting(0.0, "Table 6; beta = 0 throughout"),
    },
    sizes="8 responses a question of at most 3,000 tokens (Table 6)",
)

DAPO = Algorithm(
    "dapo",
    "DAPO",
    "GRPO with a higher upper bound, dynamic sampling, a mean over tokens and no KL term.",
    "Yu et al. 2025, arXiv:2503.14476",
    {
        "advantage.estimator": Setting("group_mean", "eq. 9"),
        "advantage.normalize_std": Setting(True, "eq. 9"),
        "advantage.zero_spread": Setting("resample", "Sec. 3.2, dynamic sampling"),
        "advantage.truncated": Setting("mask", "Sec. 3.4, overlong filtering"),
        "loss.policy": Setting("clip", "eq. 8"),
        "loss.clip_low": Setting(0.2, "Sec. 4.1"),
        "loss.clip_high": Setting(0.28, "Sec. 4.1; Sec. 3.1, clip-higher"),
        "loss.ratio": Setting("token", "eq. 8"),
        "loss.proximal": Setting("behaviour", "eq. 8: the old policy sampled the outputs"),
        "loss.reduction": Setting("token_mean", "Sec. 3.3"),
        "loss.kl.coefficient": Setting(0.0, "Sec. 2.3"),
    },
    sizes="16 responses to each of 512 prompts, 16 updates a batch, learning rate 1e-6 (Sec. 4.1)",
    lacks=(
        "the soft overlong punishment (Sec. 3.4), which is a reward: add one to score.rewards",
        "mini-batches: train.passes above 1 updates several times on the whole batch instead",
    ),
)

GSPO = Algorithm(
    "gspo",
    "GSPO",
    "One ratio a sequence, the geometric mean over its tokens, clipped within a narrow band.",
    "Zheng et al. 2025, arXiv:2507.18071",
    {
        "advantage.estimator": Setting("group_mean", "eq. 6"),
        "advantage.normalize_std": Setting(True, "eq. 6"),
        "advantage.zero_spread": Setting("keep", "eq. 5 is a mean over all groups"),
        "loss.policy": Setting("clip", "eq. 5"),
        "loss.clip_low": Setting(3e-4, "Sec. 5.1"),
        "loss.clip_high": Setting(4e-4, "Sec. 5.1"),
        "loss.ratio": Setting("sequence_mean", "eq. 7"),
        "loss.proximal": Setting("behaviour", "eq. 7: the old policy sampled the outputs"),
        "loss.reduction": Setting("sequence_mean", "eq. 5"),
        "loss.kl.coefficient": Setting(0.0, "eq. 5 leaves the term out"),
    },
    sizes="each batch in 4 mini-batches (Sec. 5.1)",
    lacks=("mini-batches: train.passes above 1 updates several times on the whole batch instead",),
)

CISPO = Algorithm(
    "cispo",
    "CISPO",
    "The importance weight is bounded instead of the update, so every token keeps its gradient.",
    "MiniMax 2025, MiniMax-M1, arXiv:2506.13585",
    {
        "advantage.estimator": Setting("group_mean", "Sec. 3.1, as in GRPO"),
        "advantage.normalize_std": Setting(True, "Sec. 3.1, as in GRPO"),
        "advantage.zero_spread": Setting("resample", "Sec. 3.1: dynamic sampling, as in DAPO"),
        "loss.policy": Setting("cispo", "eq. 4"),
        "loss.clip_low": Setting(1.0, "Sec. 3.1: no lower bound"),
        "loss.clip_high": Setting(4.0, _EPS_MAX),
        "loss.ratio": Setting("token", "eq. 5"),
        "loss.proximal": Setting("behaviour", "eq. 5: the old policy sampled the outputs"),
        "loss.reduction": Setting("token_mean", "eq. 4"),
        "loss.kl.coefficient": Setting(0.0, "Sec. 3.1: no KL term"),
    },
    lacks=("the length penalty of DAPO, which is a reward: add one to score.rewards",),
)
