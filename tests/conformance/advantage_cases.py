"""The inputs of advantage.json, each with what the naive implementation makes of it."""

from __future__ import annotations

from typing import Any

from naive import advantage, value

Case = dict[str, Any]

GROUPS: dict[str, list[float | None]] = {
    "halves": [1.0, 0.0, 0.0, 1.0],
    "one_of_eight": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    "unscorable_member": [0.25, 0.5, None, 1.0, -0.5],
    "pair": [3.0, -1.0],
    "lone_scored_member": [None, 2.0, None],
    "all_unscorable": [None, None],
    "all_equal": [0.5, 0.5, 0.5],
    "all_zero": [0.0, 0.0, 0.0],
    "squares": [0.1, 0.4, 0.9, 1.6, 2.5, 3.6],
    "odd_one": [0.0, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7],
    "rounding_residue": [0.1 + 0.2, 0.3, 0.3, 0.3],
    "tiny_but_real_spread": [1e-30, 3e-30, 2e-30],
    "large_offset": [1e6, 1e6 + 64.0, 1e6 + 32.0],
}


def group_cases() -> list[Case]:
    """Every group x estimator x with or without a scale."""
    cases: list[Case] = []
    for name, rewards in GROUPS.items():
        for estimator, std in (
            ("group_mean", False), ("group_mean", True),
            ("leave_one_out", False), ("leave_one_out", True), ("none", False),
        ):  # fmt: skip
            cases.append(
                {
                    "name": f"{name}-{estimator}{'-std' if std else ''}",
                    "kind": "group",
                    "config": {"estimator": estimator, "normalize_std": std},
                    "rewards": rewards,
                    "expected": {"advantages": advantage.group_advantages(rewards, estimator, std)},
                }
            )
    return cases


TOKENS: dict[str, list[float]] = {
    "long_and_short": [1.0, -1.0, -1.0, -1.0],
    "one_token": [0.75],
    "all_equal": [0.5, 0.5, 0.5],
    "mixed": [1.5, 1.5, 1.5, -0.5, -0.5, 0.25, 0.0, -2.0],
    "residue": [0.1 + 0.2, 0.3, 0.3],
}


def token_cases() -> list[Case]:
    """Advantages of tokens: normalised over the step, and less a distance to the reference."""
    cases: list[Case] = [
        {
            "name": f"normalize_batch-{name}", "kind": "normalize_batch", "advantages": given,
            "expected": {"advantages": advantage.normalized_batch(given)},
        }
        for name, given in TOKENS.items()
    ]  # fmt: skip
    behaviour, reference = [-1.0, -0.5, -2.25, -0.125], [-0.25, -1.5, -2.25, -40.0]
    given = [0.5, 0.5, 0.5, 0.5]
    for kind in ("k1", "k2", "k3"):
        for where in ("advantage", "reward"):
            if where == "advantage":
                out: Case = {
                    "advantages": advantage.with_token_kl(given, behaviour, reference, 0.5, kind)
                }
            else:
                out = {"reward": advantage.penalised(0.5, behaviour, reference, 0.5, kind)}
            cases.append(
                {
                    "name": f"kl_in_{where}-{kind}",
                    "kind": f"kl_in_{where}",
                    "config": {"coefficient": 0.5, "estimator": kind},
                    **({"advantages": given} if where == "advantage" else {"reward": 0.5}),
                    "behaviour": behaviour,
                    "reference": reference,
                    "expected": out,
                }
            )
    return cases


def gae_cases() -> list[Case]:
    """Generalised advantages; observation tokens change nothing, and their values are not read."""
    sequences: dict[str, Case] = {
        "plain": {"trained": [True] * 4, "values": [0.5, 0.25, -0.5, 0.75], "reward": 1.0},
        "observations_inside": {
            "trained": [True, True, False, False, True, False, True],
            "values": [0.5, 0.25, None, None, -0.5, None, 0.75], "reward": 1.0,
        },
        "observation_last": {
            "trained": [False, True, True, True, True, False],
            "values": [None, 0.5, 0.25, -0.5, 0.75, None], "reward": 1.0,
        },
        "one_token": {"trained": [True], "values": [0.25], "reward": -1.0},
        "no_values": {
            "trained": [True, False, True, True], "values": [0.0, None, 0.0, 0.0], "reward": 1.0
        },
    }  # fmt: skip
    cases: list[Case] = []
    for name, given in sequences.items():
        for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.5, 1.0), (0.9, 0.5), (1.0, 0.0)):
            rewards = value.token_rewards(given["trained"], given["reward"])
            out = value.gae(given["trained"], rewards, given["values"], gamma, lam)
            cases.append(
                {
                    "name": f"{name}-{gamma}-{lam}", "kind": "gae",
                    "config": {"gamma": gamma, "lam": lam}, **given,
                    "expected": {"advantages": out[0], "returns": out[1]},
                }
            )  # fmt: skip
    return cases
