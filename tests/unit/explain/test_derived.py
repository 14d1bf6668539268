"""What follows from the numbers, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lagzero.config import Config
from lagzero.config_load import parse_config
from lagzero.explain.cautions import cautions
from lagzero.explain.derived import as_text, clip_acts, lag_limit, quantities


def config(**blocks: Any) -> Config:
    tree = {
        "data": {"train": [{"kind": "arithmetic", "size": 100}]},
        "score": {"rewards": [{"use": "right"}]},
        "eval": {"before": False, "after": False},
    }
    return parse_config({**tree, **blocks})


def values(**blocks: Any) -> dict[str, Any]:
    return {each.key: each.value for each in quantities(config(**blocks))}


SIZES = {
    "schedule": {"groups_per_step": 4, "steps": 50},
    "rollout": {"group_size": 6, "max_new_tokens": 100},
}


def test_sizes_of_a_step():
    found = values(**SIZES, train={"passes": 3})
    assert found["rollouts_per_step"] == found["sequences_per_step"] == 24
    assert found["tokens_per_step"] == 2400
    assert (found["updates_per_step"], found["updates"]) == (3, 150)
    assert found["epochs"] == 2.0  # 4 x 50 prompts of 100 rows


def test_a_preference_trains_two_of_a_group():
    found = values(**SIZES, algorithm="online_dpo")
    assert (found["sequences_per_step"], found["tokens_per_step"]) == (8, 800)


def test_epochs_are_unknown_where_a_source_has_no_size():
    data = {"train": [{"kind": "arithmetic", "size": 5}, {"kind": "arithmetic", "seed": 1}]}
    assert values(data=data)["epochs"] is None


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({}, 0),
        ({"schedule": {"max_lag": 2}}, 2),
        ({"schedule": {"max_lag": 2, "window": 6, "groups_per_step": 4}}, 4),
        ({"schedule": {"max_lag": 2, "window": None}, "staleness": {"action": "accept"}}, None),
        (
            {
                "schedule": {"max_lag": 2, "window": None},
                "staleness": {"action": "drop", "bound": 3},
            },
            3,
        ),
        (
            {
                "schedule": {"max_lag": 2, "window": None},
                "staleness": {"action": "accept"},
                "loss": {"correction": {"max_token_lag": 5}},
            },
            5,
        ),
    ],
)
def test_the_largest_lag(blocks: dict[str, Any], expected: int | None):
    assert lag_limit(config(**blocks)) == expected


@pytest.mark.parametrize(
    ("proximal", "passes", "max_lag", "acts"),
    [
        ("recomputed", 1, 0, False),
        ("recomputed", 1, 4, False),
        ("recomputed", 2, 0, True),
        ("interpolated", 1, 0, False),
        ("interpolated", 1, 1, True),
        ("interpolated", 2, 0, True),
        ("behaviour", 1, 0, True),
        ("behaviour", 1, 1, True),
        ("behaviour", 4, 0, True),
    ],
)
def test_whether_the_bounds_can_act(proximal: str, passes: int, max_lag: int, acts: bool):
    made = config(
        loss={"proximal": proximal}, train={"passes": passes}, schedule={"max_lag": max_lag}
    )
    assert clip_acts(made)[0] is acts


def test_at_lag_0_only_the_engine_can_move_a_behaviour_ratio():
    assert "only through the gap between engine and trainer" in clip_acts(config())[1]
    lagged = clip_acts(config(schedule={"max_lag": 1}, train={"passes": 2}))[1]
    assert "lag" in lagged
    assert "after the first of 2" in lagged


def test_a_term_without_a_ratio_has_nothing_to_clip():
    assert "clip_can_act" not in values(loss={"policy": "reinforce"})


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ({}, 2.4749),  # 7 / sqrt(8)
        ({"estimator": "leave_one_out"}, 2.8284),  # sqrt(8)
        ({"normalize_std": False}, None),
        ({"normalize_batch": True}, None),
    ],
)
def test_the_largest_advantage(advantage: dict[str, Any], expected: float | None):
    assert values(advantage=advantage).get("advantage_limit") == expected


def test_numbers_as_people_read_them():
    texts = {each.key: as_text(each) for each in quantities(config(**SIZES))}
    assert texts["tokens_per_step"] == "2,400"
    assert texts["keeps_reference"] == "no"
    assert texts["epochs"] == "2"


# --- cautions -------------------------------------------------------------------------------------


def paths(**blocks: Any) -> list[str]:
    return [each.path for each in cautions(config(**blocks))]


CLEAN = {"advantage": {"normalize_std": False}}


@pytest.mark.parametrize(
    ("blocks", "path"),
    [
        ({"advantage": {"normalize_std": True}}, "advantage.normalize_std"),
        ({"loss": {"reduction": "sequence_mean"}}, "loss.reduction"),
        ({"loss": {"ratio": "sequence_mean"}}, "loss.reduction"),
        ({"loss": {"ratio": "sequence_product"}}, "loss.reduction"),
        ({"advantage": {"normalize_std": False, "truncated": "mask"}}, "advantage.truncated"),
        (
            {"schedule": {"max_lag": 2}, "staleness": {"action": "drop", "bound": 2}},
            "staleness.action",
        ),
        (
            {
                "loss": {
                    "ratio": "sequence_mean",
                    "reduction": "sequence_mean",
                    "clip_low": 3e-4,
                    "clip_high": 4e-4,
                }
            },
            "loss.clip_high",
        ),
        ({"loss": {"proximal": "recomputed"}}, "loss.correction.kind"),
        ({"loss": {"policy": "reinforce"}}, "loss.correction.kind"),
        (
            {"loss": {"proximal": "recomputed", "correction": {"kind": "truncate"}}},
            "loss.correction.level",
        ),
        (
            {
                "loss": {
                    "proximal": "recomputed",
                    "correction": {"kind": "truncate", "level": "sequence_product"},
                }
            },
            "loss.correction.level",
        ),
        ({"loss": {"kl": {"coefficient": 0.1, "estimator": "k1"}}}, "loss.kl.estimator"),
        ({"loss": {"kl": {"coefficient": 0.1, "estimator": "k3"}}}, "loss.kl.estimator"),
        (
            {"loss": {"kl": {"coefficient": 0.1, "estimator": "k2"}}, "train": {"passes": 2}},
            "loss.kl.coefficient",
        ),
        (
            {"loss": {"kl": {"coefficient": 0.1, "estimator": "k2"}}, "schedule": {"max_lag": 1}},
            "loss.kl.coefficient",
        ),
    ],
)
def test_a_caution_holds_and_names_its_source(blocks: dict[str, Any], path: str):
    blocks = {**CLEAN, **blocks}
    found = cautions(config(**blocks))
    assert [each.path for each in found] == [path]
    assert all(each.source for each in found)


def test_what_nothing_speaks_against_has_no_cautions():
    assert paths(**CLEAN) == []
    assert paths(**CLEAN, loss={"ratio": "sequence_mean", "reduction": "sequence_mean"}) == []
    assert paths(**CLEAN, loss={"kl": {"coefficient": 0.1, "estimator": "k2"}}) == []
    assert paths(**CLEAN, loss={"kl": {"coefficient": 0.1, "where": "reward"}}) == []
    assert paths(algorithm="online_dpo") == []
