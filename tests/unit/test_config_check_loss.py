"""Settings of the objective that cannot work together, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from lagzero.config import Config
from lagzero.config_check_loss import loss_notes, loss_problems


def config(**sections: Any) -> Config:
    data = {"train": [{"kind": "arithmetic"}]}
    return Config.model_validate(
        {"data": data, "score": {"rewards": [{"use": "number"}]}, **sections}
    )


RAW = {"estimator": "none", "normalize_std": False}
TIS = {"kind": "truncate"}


@pytest.mark.parametrize(
    ("path", "sections"),
    [
        ("loss.constant", {"loss": {"reduction": "constant"}}),
        ("loss.constant", {"loss": {"constant": 5.0}}),
        ("loss.correction.kind", {"loss": {"correction": TIS}}),
        ("loss.correction.kind", {"loss": {"policy": "cispo", "correction": {"kind": "mask"}}}),
        ("loss.correction.kind", {"loss": {"policy": "dpo", "correction": TIS}}),
        (
            "loss.correction.max_token_lag",
            {
                "loss": {"policy": "cross_entropy", "correction": {"max_token_lag": 1}},
                "advantage": RAW,
            },
        ),
        ("loss.dual_clip", {"loss": {"policy": "band", "dual_clip": 3.0}}),
        (
            "loss.correction.low",
            {
                "loss": {
                    "proximal": "recomputed",
                    "correction": {"kind": "mask", "low": 3.0, "high": 2.0},
                }
            },
        ),
        (
            "loss.correction.weigh",
            {"loss": {"policy": "reinforce", "correction": {**TIS, "weigh": False}}},
        ),
        ("loss.dpo_beta", {"loss": {"dpo_beta": 0.5}}),
        ("advantage.estimator", {"loss": {"policy": "cross_entropy"}}),
        (
            "advantage.normalize_batch",
            {"loss": {"policy": "cross_entropy"}, "advantage": {**RAW, "normalize_batch": True}},
        ),
        ("advantage.estimator", {"loss": {"policy": "dpo"}, "advantage": {"estimator": "gae"}}),
        (
            "loss.kl.where",
            {"loss": {"policy": "dpo", "kl": {"coefficient": 0.1, "where": "advantage"}}},
        ),
        ("rollout.group_size", {"loss": {"policy": "dpo"}, "rollout": {"group_size": 1}}),
    ],
)
def test_each_impossible_setting_is_named_with_its_remedy(path: str, sections: dict[str, Any]):
    (line,) = loss_problems(config(**sections))
    assert line.startswith(f"{path}: ")
    assert "; " in line  # what was found; what to do


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"correction": {"kind": "mask", "weigh": False}},
        {"correction": {"max_token_lag": 2}},
        {"proximal": "recomputed", "correction": TIS},
        {"proximal": "interpolated", "correction": {"kind": "mask", "low": 0.5}},
        {"policy": "reinforce", "correction": TIS},
        {"policy": "dpo", "dpo_beta": 0.5, "reduction": "sequence_mean"},
        {"policy": "cispo", "proximal": "recomputed", "ratio": "sequence_mean"},
        {"dual_clip": 3.0},
    ],
)
def test_what_can_work_is_no_problem(loss: dict[str, Any]):
    assert list(loss_problems(config(loss=loss))) == []
    raw = config(loss={"policy": "cross_entropy"}, advantage=RAW)
    assert list(loss_problems(raw)) == []


@pytest.mark.parametrize(
    ("path", "sections"),
    [
        ("loss.kl.where", {"loss": {"kl": {"where": "advantage"}}}),
        ("loss.clip_low", {"loss": {"policy": "reinforce", "clip_low": 0.1}}),
        ("loss.ratio", {"loss": {"policy": "reinforce", "ratio": "sequence_mean"}}),
        ("loss.proximal", {"loss": {"proximal": "recomputed"}}),
        ("loss.proximal", {"loss": {"proximal": "interpolated"}}),
        ("loss.proximal", {"loss": {"policy": "reinforce", "proximal": "interpolated"}}),
        ("train.passes", {"loss": {"policy": "reinforce"}, "train": {"passes": 2}}),
        ("loss.reduction", {"loss": {"policy": "dpo"}}),
        ("loss.correction.high", {"loss": {"correction": {"high": 3.0}}}),
        (
            "loss.correction.low",
            {"loss": {"policy": "reinforce", "correction": {**TIS, "low": 0.5}}},
        ),
        ("model.reference", {"model": {"reference": "/teacher"}}),
        ("model.fp32_head", {"model": {"fp32_head": True, "dtype": "float32"}}),
        (
            "model.lora.reference",
            {
                "model": {"reference": "/teacher", "lora": {"start": "/adapter"}},
                "loss": {"kl": {"coefficient": 0.1}},
            },
        ),
    ],
)
def test_what_has_no_effect_is_noted(path: str, sections: dict[str, Any]):
    (line,) = loss_notes(config(**sections))
    assert line.startswith(f"{path}: ")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"loss": {"proximal": "recomputed"}, "train": {"passes": 2}},
        {"loss": {"proximal": "interpolated"}, "schedule": {"max_lag": 1}},
        {"model": {"fp32_head": True, "dtype": "bfloat16"}},
        {"model": {"fp32_head": True, "dtype": "float32"}, "engine": {"dtype": "bfloat16"}},
        {"model": {"reference": "/teacher"}, "loss": {"kl": {"coefficient": 0.1}}},
        {
            "model": {"reference": "/teacher"},
            "loss": {"policy": "dpo", "reduction": "sequence_mean"},
        },
    ],
)
def test_what_acts_is_not_noted(sections: dict[str, Any]):
    assert list(loss_notes(config(**sections))) == []
