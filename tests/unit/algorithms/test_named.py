"""Each algorithm's keys, written down by hand from its source."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from lagzero.algorithms.form import Like
from lagzero.algorithms.named import ALGORITHMS, TIED
from lagzero.algorithms.names import AlgorithmName
from lagzero.config import Config, RolloutConfig
from lagzero.config_check import check
from lagzero.config_schema import dotted, keys
from lagzero.explain.page import example
from lagzero.schedule.check import check_schedule

CLIPPED = {
    "loss.policy": "clip",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.ratio": "token",
}
GRPO_ADVANTAGE = {"advantage.estimator": "group_mean", "advantage.normalize_std": True}
NO_STD = {"advantage.estimator": "group_mean", "advantage.normalize_std": False}
NO_KL = {"loss.kl.coefficient": 0.0}

EXPECTED: dict[str, dict[str, Any]] = {
    "grpo": {
        **GRPO_ADVANTAGE,
        "advantage.zero_spread": "keep",
        **CLIPPED,
        "loss.proximal": "behaviour",
        "loss.reduction": "sequence_mean",
        "loss.kl.coefficient": 0.04,
        "loss.kl.estimator": "k3",
        "loss.kl.where": "loss",
        "train.passes": 1,
    },
    "dr_grpo": {
        **NO_STD,
        "advantage.zero_spread": "keep",
        **CLIPPED,
        "loss.proximal": "behaviour",
        "loss.reduction": "constant",
        "loss.constant": 256,
        **NO_KL,
    },
    "dapo": {
        **GRPO_ADVANTAGE,
        "advantage.zero_spread": "resample",
        "advantage.truncated": "mask",
        **CLIPPED,
        "loss.clip_high": 0.28,
        "loss.proximal": "behaviour",
        "loss.reduction": "token_mean",
        **NO_KL,
    },
    "gspo": {
        **GRPO_ADVANTAGE,
        "advantage.zero_spread": "keep",
        "loss.policy": "clip",
        "loss.clip_low": 3e-4,
        "loss.clip_high": 4e-4,
        "loss.ratio": "sequence_mean",
        "loss.proximal": "behaviour",
        "loss.reduction": "sequence_mean",
        **NO_KL,
    },
    "cispo": {
        **GRPO_ADVANTAGE,
        "advantage.zero_spread": "resample",
        "loss.policy": "cispo",
        "loss.clip_low": 1.0,
        "loss.clip_high": 4.0,
        "loss.ratio": "token",
        "loss.proximal": "behaviour",
        "loss.reduction": "token_mean",
        **NO_KL,
    },
    "ppo": {
        "advantage.estimator": "gae",
        "advantage.normalize_std": False,
        "advantage.normalize_batch": True,
        "advantage.gamma": 1.0,
        "advantage.lam": 0.95,
        **CLIPPED,
        "loss.proximal": "behaviour",
        "loss.reduction": "token_mean",
        "loss.kl.coefficient": 0.02,
        "loss.kl.estimator": "k1",
        "loss.kl.where": "reward",
        "train.passes": 4,
        "critic.clip": 0.2,
        "critic.optimizer.lr": 9e-6,
    },
    "rloo": {
        "advantage.estimator": "leave_one_out",
        "advantage.normalize_std": False,
        "advantage.zero_spread": "keep",
        "loss.policy": "reinforce",
        "loss.reduction": "constant",
        "loss.constant": 1.0,
        "loss.kl.coefficient": 0.03,
        "loss.kl.estimator": "k1",
        "loss.kl.where": "reward",
    },
    "reinforce": {
        "advantage.estimator": "none",
        "advantage.normalize_std": False,
        "loss.policy": "reinforce",
        "loss.reduction": "constant",
        "loss.constant": 1.0,
        **NO_KL,
    },
    "reinforce_pp": {
        "advantage.estimator": "none",
        "advantage.normalize_std": False,
        "advantage.normalize_batch": True,
        **CLIPPED,
        "loss.proximal": "behaviour",
        "loss.reduction": "sequence_mean",
        "loss.kl.coefficient": 0.001,
        "loss.kl.estimator": "k1",
        "loss.kl.where": "reward",
    },
    "reinforce_pp_baseline": {
        **NO_STD,
        "advantage.normalize_batch": True,
        "advantage.zero_spread": "keep",
        **CLIPPED,
        "loss.proximal": "behaviour",
        "loss.reduction": "sequence_mean",
        "loss.kl.coefficient": 0.001,
        "loss.kl.estimator": "k2",
        "loss.kl.where": "loss",
    },
    "online_dpo": {
        "advantage.normalize_std": False,
        "advantage.zero_spread": "drop",
        "loss.policy": "dpo",
        "loss.dpo_beta": 0.1,
        "loss.reduction": "sequence_mean",
        **NO_KL,
    },
    "distill": {
        "advantage.estimator": "none",
        "advantage.normalize_std": False,
        "loss.policy": "reinforce",
        "loss.correction.kind": "truncate",
        "loss.correction.level": "token",
        "loss.correction.high": 2.0,
        "loss.reduction": "token_mean",
        "loss.kl.coefficient": 1.0,
        "loss.kl.estimator": "k1",
        "loss.kl.where": "advantage",
    },
    "olmo3": {
        **NO_STD,
        "advantage.zero_spread": "resample",
        **CLIPPED,
        "loss.clip_high": 0.272,
        "loss.proximal": "recomputed",
        "loss.correction.kind": "truncate",
        "loss.correction.level": "token",
        "loss.correction.high": 2.0,
        "loss.reduction": "token_mean",
        **NO_KL,
    },
    "icepop": {
        **GRPO_ADVANTAGE,
        "advantage.zero_spread": "keep",
        **CLIPPED,
        "loss.proximal": "recomputed",
        "loss.correction.kind": "mask",
        "loss.correction.level": "token",
        "loss.correction.low": 0.5,
        "loss.correction.high": 5.0,
        "loss.correction.weigh": True,
        "loss.reduction": "sequence_mean",
        **NO_KL,
    },
    "scalerl": {
        "schedule.max_lag": 8,
        "model.fp32_head": True,
        **NO_STD,
        "advantage.normalize_batch": True,
        "advantage.zero_spread": "drop",
        "loss.policy": "cispo",
        "loss.clip_low": 1.0,
        "loss.clip_high": 4.0,
        "loss.ratio": "token",
        "loss.proximal": "behaviour",
        "loss.reduction": "token_mean",
        **NO_KL,
    },
    "areal": {
        "advantage.estimator": "none",
        "advantage.normalize_std": False,
        "advantage.normalize_batch": True,
        **CLIPPED,
        "loss.proximal": "recomputed",
        "loss.correction.kind": "mask",
        "loss.correction.level": "token",
        "loss.correction.low": 0.0,
        "loss.correction.high": 5.0,
        "loss.correction.weigh": True,
        "loss.reduction": "token_mean",
        **NO_KL,
    },
}


def at(config: Config, path: str) -> Any:
    place: Any = config
    for part in path.split("."):
        place = getattr(place, part)
    return place


def test_the_names_are_those_that_the_configuration_takes():
    choices = get_args(AlgorithmName)
    assert Config.model_fields["algorithm"].annotation == AlgorithmName | None
    assert list(choices) == list(ALGORITHMS)
    assert sorted(choices) == sorted(EXPECTED)
    assert [name for name, each in ALGORITHMS.items() if each.name != name] == []


@pytest.mark.parametrize("name", EXPECTED)
def test_an_algorithm_sets_these_keys_and_no_other(name: str):
    assert set(ALGORITHMS[name].settings) == set(EXPECTED[name])
    config = example(ALGORITHMS[name])
    assert {path: at(config, path) for path in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_an_algorithm_alone_makes_a_configuration_that_can_train(name: str):
    config = example(ALGORITHMS[name])
    assert check(config) == []
    assert list(check_schedule("", config)) == []


@pytest.mark.parametrize("name", EXPECTED)
def test_every_value_and_every_algorithm_says_where_it_comes_from(name: str):
    algorithm = ALGORITHMS[name]
    assert algorithm.title
    assert algorithm.sentence.endswith(".")
    assert any(mark in algorithm.source for mark in ("arXiv:", "Williams 1992"))
    assert [path for path, setting in algorithm.settings.items() if not setting.where] == []


def test_every_path_is_a_key():
    known = {dotted(path) for path, _ in keys(Config)}
    used = {path for each in ALGORITHMS.values() for path in (*each.settings, *each.needs)}
    tied = {path for owned, owners in TIED.items() for path in (owned, *owners)}
    assert used | tied <= known


def test_a_value_taken_from_another_key_has_that_keys_default():
    (like,) = [
        setting.value
        for each in ALGORITHMS.values()
        for setting in each.settings.values()
        if isinstance(setting.value, Like)
    ]
    assert (like.path, like.default) == ("rollout.max_new_tokens", RolloutConfig().max_new_tokens)
