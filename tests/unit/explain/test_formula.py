"""Formulas with their numbers, written down by hand for each choice."""

from __future__ import annotations

from typing import Any

import pytest

from lagzero.config import Config
from lagzero.config_load import parse_config
from lagzero.explain.formula import objective


def config(**blocks: Any) -> Config:
    tree = {
        "data": {"train": [{"kind": "arithmetic"}]},
        "score": {"rewards": [{"use": "right"}]},
        "eval": {"before": False, "after": False},
    }
    return parse_config({**tree, **blocks})


def loss(**keys: Any) -> str:
    return objective(config(loss=keys)).loss


def symbols(**blocks: Any) -> dict[str, str]:
    return objective(config(**blocks)).symbols


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "1/(sum_j L_j) sum_i sum_t -min(r_t A_i, clamp(r_t, 0.8, 1.2) A_i)"),
        (
            {"reduction": "sequence_mean", "clip_high": 0.28},
            "1/S sum_i 1/L_i sum_t -min(r_t A_i, clamp(r_t, 0.8, 1.28) A_i)",
        ),
        (
            {"reduction": "constant", "constant": 1000.5},
            "1/(1000.5 S) sum_i sum_t -min(r_t A_i, clamp(r_t, 0.8, 1.2) A_i)",
        ),
        (
            {"ratio": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
            "1/(sum_j L_j) sum_i sum_t -min(r_i A_i, clamp(r_i, 0.9997, 1.0004) A_i)",
        ),
        (
            {"policy": "cispo", "clip_low": 1, "clip_high": 4},
            "1/(sum_j L_j) sum_i sum_t -sg(clamp(r_t, 0, 5)) A_i log pi_t",
        ),
        ({"policy": "band"}, "1/(sum_j L_j) sum_i sum_t -r_t A_i [0.8 <= r_t <= 1.2]"),
        ({"policy": "reinforce"}, "1/(sum_j L_j) sum_i sum_t -A_i log pi_t"),
        (
            {"policy": "reinforce", "reduction": "constant", "constant": 1},
            "1/S sum_i sum_t -A_i log pi_t",
        ),
        (
            {"entropy_coefficient": 0.01, "kl": {"coefficient": 0.5}},
            "1/(sum_j L_j) sum_i sum_t "
            "[ -min(r_t A_i, clamp(r_t, 0.8, 1.2) A_i) + 0.5 KL_t - 0.01 H_t ]",
        ),
        (
            {"policy": "reinforce", "entropy_coefficient": -0.5},
            "1/(sum_j L_j) sum_i sum_t [ -A_i log pi_t + 0.5 H_t ]",
        ),
        (
            {"proximal": "recomputed", "correction": {"kind": "truncate"}},
            "1/(sum_j L_j) sum_i sum_t w_t * -min(r_t A_i, clamp(r_t, 0.8, 1.2) A_i)",
        ),
    ],
)
def test_the_line_of_loss(keys: dict[str, Any], expected: str):
    assert loss(**keys) == f"L = {expected}"


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ({"reduction": "sequence_mean"}, "1/P sum_pairs -log sigmoid(0.5 (D_c - D_r))"),
        (
            {"reduction": "token_mean"},
            "1/(sum_j L_j) sum_pairs (L_c + L_r) * -log sigmoid(0.5 (D_c - D_r))",
        ),
        (
            {"reduction": "constant", "constant": 9},
            "1/(9 S) sum_pairs (L_c + L_r) * -log sigmoid(0.5 (D_c - D_r))",
        ),
    ],
)
def test_a_pairs_loss_stands_at_each_of_its_tokens(reduction: dict[str, Any], expected: str):
    made = config(algorithm="online_dpo", loss={"dpo_beta": 0.5, **reduction})
    assert objective(made).loss == f"L = {expected}"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"r_t": "pi_t / mu_t"}),
        ({"proximal": "recomputed"}, {"r_t": "pi_t / prox_t"}),
        ({"ratio": "sequence_product"}, {"r_i": "prod_t pi_t / mu_t"}),
        (
            {"ratio": "sequence_mean", "proximal": "recomputed"},
            {"r_i": "(prod_t pi_t / prox_t)^(1 / L_i)"},
        ),
        (
            {"proximal": "interpolated"},
            {
                "r_t": "pi_t / a_t",
                "a_t": "mu_t^alpha pi_t^(1 - alpha) without gradient, alpha = 1 / lag of the "
                "token, 0 at lag 0",
            },
        ),
        ({"dual_clip": 3}, {"dual clip": "where A < 0 the term is at most 3 |A|"}),
    ],
)
def test_the_ratio_and_its_anchor(keys: dict[str, Any], expected: dict[str, str]):
    found = symbols(loss=keys)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "symbol", "expected"),
    [
        ({"kind": "truncate"}, "w_t", "min(prox_t / mu_t, 2); a constant"),
        (
            {"kind": "mask", "low": 0.5, "high": 5},
            "w_t",
            "prox_t / mu_t where 0.5 <= prox_t / mu_t <= 5, else 0; a constant",
        ),
        (
            {"kind": "mask", "weigh": False, "level": "sequence_product"},
            "w_i",
            "1 where 0 <= prod_t prox_t / mu_t <= 2, else 0; a constant",
        ),
        (
            {"kind": "truncate", "level": "sequence_mean", "max_token_lag": 3},
            "w_t",
            "min((prod_t prox_t / mu_t)^(1 / L_i), 2); 0 where the token is more than 3 "
            "version(s) old; a constant",
        ),
        (
            {"max_token_lag": 1},
            "w_t",
            "1; 0 where the token is more than 1 version(s) old; a constant",
        ),
    ],
)
def test_the_weight_of_a_correction(keys: dict[str, Any], symbol: str, expected: str):
    assert symbols(loss={"proximal": "recomputed", "correction": keys})[symbol] == expected


def test_under_an_interpolated_anchor_the_weight_leads_to_the_anchor():
    correction = {"kind": "truncate"}
    found = symbols(loss={"proximal": "interpolated", "correction": correction})
    assert found["w_t"] == "min(a_t / mu_t, 2); a constant"
    assert "prox" not in found
    reinforced = symbols(loss={"policy": "reinforce", "correction": correction})
    assert reinforced["w_t"] == "min(prox_t / mu_t, 2); a constant"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "(R_i - mean R) / std R, over the 8 rollouts of its prompt, std with divisor 7"),
        ({"normalize_std": False}, "R_i - mean R, over the 8 rollouts of its prompt"),
        (
            {"estimator": "leave_one_out", "normalize_std": False},
            "R_i - mean R, over the other 7 rollouts of its prompt",
        ),
        ({"estimator": "none", "normalize_std": False}, "R_i"),
        (
            {"estimator": "none", "normalize_std": False, "normalize_batch": True},
            "R_i; then to mean 0 and standard deviation 1 over the step's trained tokens",
        ),
    ],
)
def test_the_advantage(keys: dict[str, Any], expected: str):
    assert symbols(advantage=keys)["A_i"] == expected


def test_a_critics_advantage_is_of_tokens():
    found = symbols(algorithm="ppo", advantage={"gamma": 0.5, "lam": 0.5}, critic={"clip": None})
    assert found["A_t"].startswith("d_t + 0.25 A_(t+1), with d_t = R_i [t is last] + 0.5 V_(t+1)")
    assert found["L_V"] == "0.5 (V_t - G_t)^2 for each trained token"
    assert found["R_i"] == "right, minus 0.02 KL_t at each token"


def test_rewards_are_weighed_and_penalised():
    rewards = [{"use": "right"}, {"use": "short.py:f", "weight": 0.2}]
    found = symbols(
        score={"rewards": rewards},
        loss={"kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"}},
    )
    assert found["R_i"] == "right + 0.2 short.py:f, minus 0.1 sum_t KL_t"
    assert found["KL_t"] == "log mu_t - log ref_t (k1)"


def test_distillation_takes_the_teacher_off_each_token():
    found = symbols(algorithm="distill", model={"reference": "org/teacher"})
    assert found["A_t"] == "R_i, minus 1 KL_t"
    assert found["ref"] == "reference: org/teacher, frozen"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, "reference: the policy as it started, frozen"),
        ({"lora": {}}, "reference: the adapter as it started, frozen"),
        ({"lora": {"reference": "base"}}, "reference: the base model, frozen"),
    ],
)
def test_the_reference_is_named(model: dict[str, Any], expected: str):
    assert symbols(model=model, loss={"kl": {"coefficient": 0.1}})["ref"] == expected


def test_a_policy_that_plays_no_part_is_not_named():
    assert "ref" not in symbols()
    assert "prox" not in symbols()
    assert "mu" not in symbols(loss={"policy": "reinforce"})
    assert "mu" not in symbols(loss={"proximal": "recomputed"})
    assert "mu" in symbols(loss={"proximal": "recomputed", "correction": {"kind": "truncate"}})
