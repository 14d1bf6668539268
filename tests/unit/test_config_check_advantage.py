"""Settings of advantages and critic that cannot work together, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from lagzero.config import Config
from lagzero.config_check import check, notes


def config(**blocks: Any) -> Config:
    tree: dict[str, Any] = {
        "data": {"train": [{"kind": "arithmetic"}], "eval": [{"kind": "arithmetic", "split": "e"}]},
        "score": {"rewards": [{"use": "number"}]},
        **blocks,
    }
    return Config.model_validate(tree)


def found(**blocks: Any) -> list[str]:
    return [line.split(": ")[0] for line in check(config(**blocks))]


GAE: dict[str, Any] = {"estimator": "gae", "normalize_std": False}


@pytest.mark.parametrize(
    "blocks",
    [
        {"advantage": {**GAE, "gamma": 0.99, "lam": 0.95, "normalize_batch": True}, "critic": {}},
        {"advantage": GAE, "critic": {}, "rollout": {"group_size": 1}},
        {"advantage": GAE, "critic": {"shared": True, "coefficient": 0.1, "clip": None}},
        {"advantage": GAE, "critic": {"optimizer": {"lr": 1e-5}, "warmup_steps": 3}},
        {"advantage": {"truncated": "mask", "normalize_batch": True}},
        {
            "loss": {"policy": "dpo", "reduction": "sequence_mean"},
            "advantage": {"truncated": "mask"},
        },
    ],
)
def test_what_goes_together_is_no_problem(blocks: dict[str, Any]):
    assert check(config(**blocks)) == []
    assert notes(config(**blocks)) == []


@pytest.mark.parametrize(
    ("path", "blocks"),
    [
        ("critic", {"advantage": GAE}),
        ("critic", {"critic": {}}),
        ("critic", {"critic": {}, "advantage": {"estimator": "none", "normalize_std": False}}),
        ("advantage.normalize_std", {"advantage": {"estimator": "gae"}, "critic": {}}),
        ("advantage.gamma", {"advantage": {"gamma": 0.9}}),
        ("advantage.lam", {"advantage": {"lam": 0.9}}),
        ("critic.path", {"advantage": GAE, "critic": {"path": "./no/such/folder"}}),
        ("critic.path", {"advantage": GAE, "critic": {"path": "some/model", "shared": True}}),
        (
            "critic.optimizer",
            {"advantage": GAE, "critic": {"shared": True, "optimizer": {"lr": 1e-3}}},
        ),
        ("critic.coefficient", {"advantage": GAE, "critic": {"coefficient": 1.0}}),
        (
            "critic.warmup_steps",
            {"advantage": GAE, "critic": {"warmup_steps": 5}, "schedule": {"steps": 5}},
        ),
        (
            "critic.optimizer.betas.0",
            {"advantage": GAE, "critic": {"optimizer": {"betas": (1.0, 0.9)}}},
        ),
        ("model.reference", {"model": {"reference": "./no/such/folder"}}),
    ],
)
def test_each_impossible_setting_is_named_by_its_path(path: str, blocks: dict[str, Any]):
    assert found(**blocks) == [path]


def test_a_missing_critic_is_told_apart_from_a_useless_one():
    (missing,) = check(config(advantage=GAE))
    assert missing.startswith("critic: missing; advantage.estimator gae")
    (useless,) = check(config(critic={}))
    assert "advantage.estimator is group_mean; set critic: null" in useless


def test_without_any_reward_there_is_only_a_teacher_to_learn_from():
    """Distillation needs no reward; the policy's own start teaches nothing."""
    nothing: dict[str, Any] = {
        "score": {"rewards": [{"use": "number", "weight": 0.0}]},
        "advantage": {"estimator": "none", "normalize_std": False},
    }
    kl = {"coefficient": 1.0, "estimator": "k1", "where": "advantage"}
    teacher = {"reference": "some/teacher"}
    assert found(**nothing) == ["score.rewards"]
    assert found(**nothing, loss={"kl": kl}) == ["score.rewards"]
    assert found(**nothing, model=teacher) == ["score.rewards"]
    assert found(**nothing, model=teacher, loss={"kl": kl}) == []


def test_a_critic_that_never_ends_its_warm_up_is_noted():
    critic = {"optimizer": {"warmup_steps": 9}}
    (note,) = notes(config(advantage=GAE, critic=critic, schedule={"steps": 9}))
    assert note.startswith("critic.optimizer.warmup_steps: 9 never ends")


def test_the_critics_rate_falls_only_on_a_schedule_that_falls():
    optimizer = {"decay_steps": 4}
    assert found(advantage=GAE, critic={"optimizer": optimizer}) == ["critic.optimizer.decay_steps"]
    critic = {"optimizer": optimizer | {"schedule": "cosine"}}
    assert found(advantage=GAE, critic=critic) == []
    (note,) = notes(config(advantage=GAE, critic=critic, schedule={"steps": 3}))
    assert note.startswith("critic.optimizer.decay_steps: 4 is more than the 3")
