"""The inputs of step.json: groups of rollouts, and settings from rewards to the loss."""

from __future__ import annotations

from typing import Any

from naive import step

Case = dict[str, Any]


def member(
    reward: float | None,
    columns: list[tuple[int, int, int, int] | None],
    truncated: bool = False,
) -> Case:
    """(behaviour, policy, reference, value) in 64ths of each sampled token; None: not sampled."""
    names = ("behaviour", "logprob", "reference", "value")
    return {
        "reward": reward,
        "truncated": truncated,
        "trained": [c is not None for c in columns],
        **{
            name: [None if c is None else c[place] / 64 for c in columns]
            for place, name in enumerate(names)
        },
    }


def step_groups() -> list[list[Case]]:
    """A whole, a short and a flat group; observations; a truncated and an empty member."""
    return [
        [
            member(1.0, [(-60, -56, -90, 30), (-20, -24, -20, 44), None, (-8, -9, -30, 50)]),
            member(0.0, [(-70, -90, -60, 30)]),
            member(-0.25, [(-12, -10, -44, 28), (-90, -70, -80, -8)], truncated=True),
            member(1.0, [(-35, -35, -10, 16), None, (-64, -60, -100, 20), None]),
        ],
        [
            member(0.5, [(-5, -5, -5, 10), (-33, -40, -22, 12)]),
            member(None, [(-17, -11, -13, 0)]),
            member(-0.5, [(-80, -50, -120, 5), (-6, -7, -3, -20), (-41, -41, -66, -40)]),
            member(2.0, [None, None]),
        ],
        [
            member(1.0, [(-25, -20, -16, 60), (-52, -44, -70, 64)]),
            member(1.0, [(-61, -66, -51, 58)]),
        ],
    ]


CONFIGS: dict[str, Case] = {
    "grpo": {
        "advantage": {},
        "loss": {
            "reduction": "sequence_mean",
            "kl": {"coefficient": 0.125, "estimator": "k3", "where": "loss"},
        },
    },
    "dr_grpo": {
        "advantage": {"normalize_std": False},
        "loss": {"reduction": "constant", "constant": 4.0},
    },
    "dapo": {
        "advantage": {"truncated": "mask"},
        "loss": {"clip_high": 0.28, "reduction": "token_mean"},
    },
    "gspo": {
        "advantage": {},
        "loss": {"ratio": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04,
                 "reduction": "sequence_mean"},
    },
    "rloo": {
        "advantage": {"estimator": "leave_one_out", "normalize_std": False},
        "loss": {"policy": "reinforce", "reduction": "constant", "constant": 1.0,
                 "kl": {"coefficient": 0.125, "estimator": "k1", "where": "reward"}},
    },
    "leave_one_out_std": {"advantage": {"estimator": "leave_one_out"}, "loss": {}},
    "flat_groups_kept": {
        "advantage": {"zero_spread": "keep"},
        "loss": {"reduction": "sequence_mean", "kl": {"coefficient": 0.5, "estimator": "k2"}},
    },
    "short_groups_dropped": {"advantage": {"short_group": "drop"}, "loss": {}},
    "reinforce": {
        "advantage": {"estimator": "none", "normalize_std": False},
        "loss": {"policy": "reinforce"},
    },
    "reinforce_pp": {
        "advantage": {"estimator": "none", "normalize_std": False, "normalize_batch": True},
        "loss": {"kl": {"coefficient": 0.125, "estimator": "k2", "where": "reward"}},
    },
    "penalty_decides_about_spread": {
        "advantage": {},
        "loss": {"kl": {"coefficient": 0.125, "estimator": "k3", "where": "reward"}},
    },
    "distill": {
        "advantage": {"estimator": "none", "normalize_std": False},
        "loss": {"policy": "reinforce",
                 "kl": {"coefficient": 1.0, "estimator": "k1", "where": "advantage"}},
    },
    "distill_beside_rewards": {
        "advantage": {"normalize_batch": True},
        "loss": {"kl": {"coefficient": 0.25, "estimator": "k3", "where": "advantage"}},
    },
    "ppo": {
        "advantage": {"estimator": "gae", "normalize_std": False, "normalize_batch": True,
                      "lam": 0.95},
        "loss": {"kl": {"coefficient": 0.125, "estimator": "k1", "where": "reward"}},
    },
    "gae_discounted": {
        "advantage": {"estimator": "gae", "normalize_std": False, "gamma": 0.5, "lam": 0.5},
        "loss": {"reduction": "sequence_mean"},
    },
    "gae_without_truncated": {
        "advantage": {"estimator": "gae", "normalize_std": False, "truncated": "mask"},
        "loss": {"kl": {"coefficient": 0.5, "estimator": "k1", "where": "advantage"}},
    },
    "online_dpo": {
        "advantage": {"normalize_std": False},
        "loss": {"policy": "dpo", "dpo_beta": 0.5, "reduction": "sequence_mean"},
    },
    "online_dpo_without_truncated": {
        "advantage": {"normalize_std": False, "truncated": "mask"},
        "loss": {"policy": "dpo", "dpo_beta": 0.5, "reduction": "sequence_mean"},
    },
    "supervised": {
        "advantage": {"estimator": "none", "normalize_std": False},
        "loss": {"policy": "cross_entropy"},
    },
}  # fmt: skip


def step_cases() -> list[Case]:
    groups = step_groups()
    return [
        {"name": name, "config": config, "expected": step.solve(groups, config)}
        for name, config in CONFIGS.items()
    ]
