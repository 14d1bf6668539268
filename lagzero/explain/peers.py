"""Which library's default each choice is: facts read in their sources, by commit.

A peer appears at a key only where its default was found; a peer that is not named there is not
known, or has no such choice. ``name`` is what the peer calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lagzero.config import Config
from lagzero.config_schema import dotted, keys


@dataclass(frozen=True, slots=True)
class Default:
    """One default of a peer: in our terms, and what the peer calls it."""

    value: Any
    name: str


@dataclass(frozen=True, slots=True)
class Peer:
    """A library, the commit that was read, and where."""

    name: str
    version: str
    source: str
    defaults: Mapping[str, Default]  # by our dotted path


_TRL = Peer(
    "TRL",
    "006d32c",
    "huggingface/trl, trl/trainer/grpo_config.py",
    {
        "advantage.estimator": Default("group_mean", "GRPOTrainer"),
        "advantage.normalize_std": Default(True, "scale_rewards group"),
        "advantage.truncated": Default("keep", "mask_truncated_completions"),
        "loss.policy": Default("clip", "loss_type dapo"),
        "loss.clip_low": Default(0.2, "epsilon"),
        "loss.clip_high": Default(0.2, "epsilon_high None: epsilon"),
        "loss.ratio": Default("token", "importance_sampling_level"),
        "loss.proximal": Default("recomputed", "recomputed training logprobs"),
        "loss.correction.kind": Default("mask", "vllm_importance_sampling_mode sequence_mask"),
        "loss.correction.high": Default(3.0, "vllm_importance_sampling_cap"),
        "loss.reduction": Default("token_mean", "loss_type dapo"),
        "loss.kl.coefficient": Default(0.0, "beta"),
        "train.passes": Default(1, "num_iterations"),
        "model.fp32_head": Default(False, "cast_lm_head_to_fp32"),
        "rollout.group_size": Default(8, "num_generations"),
        "rollout.temperature": Default(1.0, "temperature"),
        "train.optimizer.lr": Default(1e-6, "learning_rate"),
    },
)

_VERL = Peer(
    "verl",
    "018f23b, 05a1edd, 0482624, 07d02df",
    "verl-project/verl, verl/trainer/config: actor/actor.yaml, ppo_trainer.yaml, "
    "algorithm/rollout_correction.yaml, critic/critic.yaml",
    {
        "advantage.estimator": Default("gae", "adv_estimator"),
        "advantage.normalize_std": Default(True, "norm_adv_by_std_in_grpo"),
        "advantage.zero_spread": Default("keep", "filter_groups.enable False"),
        "advantage.gamma": Default(1.0, "gamma"),
        "advantage.lam": Default(1.0, "lam"),
        "loss.policy": Default("clip", "policy_loss.loss_mode vanilla"),
        "loss.clip_low": Default(0.2, "clip_ratio_low"),
        "loss.clip_high": Default(0.2, "clip_ratio_high"),
        "loss.dual_clip": Default(3.0, "clip_ratio_c"),
        "loss.proximal": Default("recomputed", "rollout_correction.bypass_mode false"),
        "loss.correction.kind": Default("none", "rollout_correction.rollout_is null"),
        "loss.correction.high": Default(2.0, "rollout_correction.rollout_is_threshold"),
        "loss.reduction": Default("token_mean", "loss_agg_mode"),
        "loss.kl.coefficient": Default(0.0, "use_kl_loss, use_kl_in_reward false"),
        "loss.entropy_coefficient": Default(0.0, "entropy_coeff"),
        "train.passes": Default(1, "ppo_epochs"),
        "train.optimizer.lr": Default(1e-6, "actor.optim.lr"),
        "critic.clip": Default(0.5, "cliprange_value"),
    },
)

_OPENRLHF = Peer(
    "OpenRLHF",
    "021d1b0",
    "OpenRLHF/OpenRLHF, openrlhf/cli/train_ppo_ray.py",
    {
        "advantage.estimator": Default("gae", "advantage_estimator"),
        "advantage.zero_spread": Default("keep", "dynamic_filtering False"),
        "advantage.gamma": Default(1.0, "gamma"),
        "advantage.lam": Default(1.0, "lambd"),
        "loss.policy": Default("clip", "policy_loss_type ppo"),
        "loss.clip_low": Default(0.2, "eps_clip"),
        "loss.clip_high": Default(0.2, "eps_clip"),
        "loss.dual_clip": Default(None, "dual_clip"),
        "loss.ratio": Default("token", "policy_loss_type ppo"),
        "loss.correction.kind": Default("none", "enable_vllm_is_correction False"),
        "loss.correction.high": Default(2.0, "vllm_is_truncated_threshold"),
        "loss.kl.coefficient": Default(0.01, "init_kl_coef"),
        "loss.kl.estimator": Default("k1", "kl_estimator"),
        "loss.kl.where": Default("reward", "use_kl_loss False"),
        "train.passes": Default(1, "max_epochs"),
        "train.optimizer.lr": Default(1e-6, "actor_learning_rate"),
        "rollout.group_size": Default(1, "n_samples_per_prompt"),
        "rollout.temperature": Default(1.0, "temperature"),
        "critic.clip": Default(0.5, "value_clip"),
    },
)

_AREAL = Peer(
    "AReaL",
    "001d59e",
    "areal-project/AReaL, areal/api/cli_args.py, PPOActorConfig",
    {
        "advantage.gamma": Default(1.0, "discount"),
        "advantage.lam": Default(1.0, "gae_lambda"),
        "advantage.truncated": Default("keep", "mask_no_eos_with_zero False"),
        "loss.policy": Default("clip", "use_sapo_loss False"),
        "loss.clip_low": Default(0.2, "eps_clip"),
        "loss.clip_high": Default(0.2, "eps_clip_higher None: eps_clip"),
        "loss.dual_clip": Default(None, "c_clip"),
        "loss.ratio": Default("token", "importance_sampling_level"),
        "loss.proximal": Default("behaviour", "use_decoupled_loss, recompute_logprob False"),
        "loss.correction.kind": Default("none", "rejection_sampling None"),
        "loss.kl.coefficient": Default(0.1, "kl_ctl"),
        "loss.kl.estimator": Default("k1", "kl_estimator"),
        "loss.kl.where": Default("reward", "docs/en/algorithms/grpo_series.md"),
    },
)

_SLIME = Peer(
    "slime",
    "002fa9d",
    "THUDM/slime, slime/utils/arguments.py",
    {
        "advantage.estimator": Default("group_mean", "advantage-estimator grpo"),
        "advantage.normalize_std": Default(True, "disable-grpo-std-normalization off"),
        "advantage.normalize_batch": Default(False, "normalize-advantages"),
        "advantage.gamma": Default(1.0, "gamma"),
        "advantage.lam": Default(1.0, "lambd"),
        "loss.policy": Default("clip", "pg-loss-type None"),
        "loss.clip_low": Default(0.2, "eps-clip"),
        "loss.clip_high": Default(0.2, "eps-clip-high None: eps-clip"),
        "loss.dual_clip": Default(None, "eps-clip-c"),
        "loss.proximal": Default("recomputed", "use-rollout-logprobs False"),
        "loss.correction.kind": Default("none", "use-tis False"),
        "loss.correction.high": Default(2.0, "tis-clip"),
        "loss.reduction": Default("sequence_mean", "sum_of_sample_mean"),
        "loss.kl.coefficient": Default(0.0, "kl-coef, kl-loss-coef"),
        "loss.entropy_coefficient": Default(0.0, "entropy-coef"),
        "rollout.group_size": Default(1, "n-samples-per-prompt"),
        "train.optimizer.lr": Default(1e-6, "lr"),
        "critic.clip": Default(0.2, "value-clip"),
    },
)

_PRIME_RL = Peer(
    "prime-rl",
    "004274e",
    "PrimeIntellect-ai/prime-rl, docs/algorithms.md",
    {
        "advantage.estimator": Default("group_mean", "algorithms grpo"),
        "advantage.normalize_std": Default(False, "algorithms grpo: minus the mean"),
        "advantage.zero_spread": Default("drop", "filters zero_advantage"),
        "loss.ratio": Default("token", "default loss"),
        "loss.proximal": Default("behaviour", "default loss: pi / mu"),
        "loss.reduction": Default("token_mean", "default loss: 1 / sum |y|"),
        "schedule.max_lag": Default(1, "one step overlapped"),
    },
)

_OPEN_INSTRUCT = Peer(
    "open-instruct",
    "0063d12",
    "allenai/open-instruct, open_instruct/grpo_utils.py",
    {
        "loss.policy": Default("clip", "loss_fn dapo"),
        "loss.clip_low": Default(0.2, "clip_lower"),
        "loss.clip_high": Default(0.272, "clip_higher"),
        "loss.proximal": Default("recomputed", "use_vllm_logprobs False"),
        "loss.correction.kind": Default("truncate", "truncated_importance_sampling_ratio_cap"),
        "loss.correction.high": Default(2.0, "truncated_importance_sampling_ratio_cap"),
        "loss.reduction": Default("token_mean", "loss_denominator token"),
        "loss.kl.coefficient": Default(0.05, "beta"),
        "loss.kl.where": Default("loss", "beta of the objective"),
        "model.fp32_head": Default(False, "lm_head_fp32"),
    },
)

PEERS: tuple[Peer, ...] = (_TRL, _VERL, _OPENRLHF, _AREAL, _SLIME, _PRIME_RL, _OPEN_INSTRUCT)


def known_paths() -> list[str]:
    """Return every choice that some peer's default is known of, in the order of a file."""
    known = {path for peer in PEERS for path in peer.defaults}
    return [dotted(path) for path, _ in keys(Config) if dotted(path) in known]
