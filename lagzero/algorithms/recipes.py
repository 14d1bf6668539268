"""Whole recipes of 2025: an objective with what it does about lag and engine mismatch."""

from __future__ import annotations

from lagzero.algorithms.form import Algorithm, Setting

_PPO = "not stated; PPO's (arXiv:1707.06347, Sec. 3)"

OLMO3 = Algorithm(
    "olmo3",
    "Olmo 3",
    "DAPO's sampling, bounds and token mean, Dr. GRPO's advantage, and truncated importance "
    "sampling against the engine.",
    "Olmo Team 2025, arXiv:2512.13961, Sec. 4.4.1; values of open-instruct 0063d12",
    {
        "advantage.estimator": Setting("group_mean", "Sec. 4.4.1"),
        "advantage.normalize_std": Setting(False, "Sec. 4.4.1: no standard deviation"),
        "advantage.zero_spread": Setting("resample", "Sec. 4.4.1: active sampling"),
        "loss.policy": Setting("clip", "Sec. 4.4.1"),
        "loss.clip_low": Setting(0.2, "open-instruct, clip_lower"),
        "loss.clip_high": Setting(0.272, "open-instruct, clip_higher"),
        "loss.ratio": Setting("token", "Sec. 4.4.1"),
        "loss.proximal": Setting("recomputed", "Sec. 4.4.1: the trainer's own old policy"),
        "loss.correction.kind": Setting("truncate", "Sec. 4.4.1"),
        "loss.correction.level": Setting("token", "Sec. 4.4.1"),
        "loss.correction.high": Setting(
            2.0, "open-instruct, truncated_importance_sampling_ratio_cap"
        ),
        "loss.reduction": Setting("token_mean", "Sec. 4.4.1: all tokens of the batch"),
        "loss.kl.coefficient": Setting(0.0, "Sec. 4.4.1: no KL term"),
    },
)

ICEPOP = Algorithm(
    "icepop",
    "IcePop",
    "GRPO whose tokens are left out where trainer and engine disagree too much.",
    "Ling Team 2025, Ring-1T, arXiv:2510.18855; Zhao et al. 2025, Small Leak Can Sink a Great Ship",
    {
        "advantage.estimator": Setting("group_mean", "as in GRPO"),
        "advantage.normalize_std": Setting(True, "as in GRPO"),
        "advantage.zero_spread": Setting("keep", "a mean over all groups"),
        "loss.policy": Setting("clip", "Zhao et al. 2025, objective"),
        "loss.clip_low": Setting(0.2, _PPO),
        "loss.clip_high": Setting(0.2, _PPO),
        "loss.ratio": Setting("token", "Zhao et al. 2025, objective"),
        "loss.proximal": Setting("recomputed", "Zhao et al. 2025: the trainer's own old policy"),
        "loss.correction.kind": Setting("mask", "Zhao et al. 2025, M(k)"),
        "loss.correction.level": Setting("token", "Zhao et al. 2025, M(k)"),
        "loss.correction.low": Setting(0.5, "AReaL's documentation of IcePop"),
        "loss.correction.high": Setting(5.0, "AReaL's documentation of IcePop"),
        "loss.correction.weigh": Setting(True, "Zhao et al. 2025: M(k) = k inside"),
        "loss.reduction": Setting("sequence_mean", "Zhao et al. 2025: 1/G sum_i 1/|y_i| sum_t"),
        "loss.kl.coefficient": Setting(0.0, "Zhao et al. 2025: GRPO without the KL term"),
    },
)

SCALERL = Algorithm(
    "scalerl",
    "ScaleRL",
    "Asynchronous CISPO: at most 8 versions of lag, float32 logits, batch-level normalisation.",
    "Khatri et al. 2025, arXiv:2510.13786",
    {
        "schedule.max_lag": Setting(8, "Sec. 3.1 and 4, PipelineRL-8"),
        "model.fp32_head": Setting(True, "Sec. 3.2, float32 logits"),
        "advantage.estimator": Setting("group_mean", "Sec. 4"),
        "advantage.normalize_std": Setting(False, "Sec. 3.2: not by prompt"),
        "advantage.normalize_batch": Setting(True, "Sec. 3.2: by batch"),
        "advantage.zero_spread": Setting("drop", "Sec. 3.2, zero-variance filtering"),
        "loss.policy": Setting("cispo", "Sec. 3.2 and 4"),
        "loss.clip_low": Setting(1.0, "App. A.17.2: lower bound 0"),
        "loss.clip_high": Setting(4.0, "App. A.17.2: eps_max 5 = 1 + 4; 4, 5 and 8 do alike"),
        "loss.ratio": Setting("token", "Sec. 4"),
        "loss.proximal": Setting("behaviour", "Sec. 4: against what sampled the token"),
        "loss.reduction": Setting("token_mean", "Sec. 3.2 has a mean over prompts; see below"),
        "loss.kl.coefficient": Setting(0.0, "Sec. 4: no KL term"),
    },
    sizes="16 generations to each of 48 prompts (Sec. 3.1)",
    lacks=(
        "a mean over tokens within each prompt, then over prompts: here over the step's tokens",
        "interruptions that end long thinking, and prompts with a pass rate of 0.9 or more are "
        "not taken out",
        "engines of their own: set placement.kind: disaggregated",
    ),
)

AREAL = Algorithm(
    "areal",
    "AReaL, decoupled PPO",
    "The clip is anchored at the policy just before the update; a weight corrects for what sampled "
    "the token.",
    "Fu et al. 2025, arXiv:2505.24298; Hilton et al. 2021, arXiv:2110.00641",
    {
        "advantage.estimator": Setting("none", "Table 3: no critic, so the reward itself"),
        "advantage.normalize_std": Setting(False, "AReaL's documentation: by batch"),
        "advantage.normalize_batch": Setting(True, "AReaL's documentation: by batch"),
        "loss.policy": Setting("clip", "eq. 5"),
        "loss.clip_low": Setting(0.2, "Table 3"),
        "loss.clip_high": Setting(0.2, "Table 3"),
        "loss.ratio": Setting("token", "eq. 5"),
        "loss.proximal": Setting("recomputed", "Sec. 5.2"),
        "loss.correction.kind": Setting("mask", "eq. 5; AReaL 001d59e, RejectionSamplingConfig"),
        "loss.correction.level": Setting("token", "eq. 5"),
        "loss.correction.low": Setting(0.0, "AReaL 001d59e, RejectionSamplingConfig"),
        "loss.correction.high": Setting(5.0, "no bound in eq. 5; RejectionSamplingConfig, upper"),
        "loss.correction.weigh": Setting(True, "eq. 5"),
        "loss.reduction": Setting("token_mean", "AReaL's documentation: no 1/|o_i|"),
        "loss.kl.coefficient": Setting(0.0, "Table 3: no reference model"),
    },
    sizes="16 answers to each of 512 prompts, rewards +5 and -5, 4 mini-batches (Table 3)",
    lacks=(
        "its schedule: staleness: {preset: areal, preset_options: {max_head_offpolicyness: 8}}",
        "mini-batches: with train.passes above 1 the clip can act",
    ),
)
