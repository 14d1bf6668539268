"""Schedules that cannot work are refused with a remedy; those that can are not."""

from __future__ import annotations

from typing import Any

import pytest

from lagzero.config import Config
from lagzero.schedule.check import check_schedule, lag_bound, runs_on
from lagzero.schedule.named import written_out

BASE: dict[str, Any] = {
    "data": {"train": [{"kind": "arithmetic"}]},
    "score": {"rewards": [{"use": "number_answer"}]},
}

SWAP = {"placement__kind": "swap", "placement__engines": 2, "schedule__max_lag": 1}
PACKED = {
    "placement__kind": "disaggregated",
    "placement__engines": 2,
    "placement__repack_below": 4,
    "schedule__max_lag": 1,
    "engine__kv_on_update": "recompute",
}


def config(**keys: Any) -> Config:
    tree = dict(BASE)
    for name, value in keys.items():
        block, _, key = name.partition("__")
        tree[block] = {**tree.get(block, {}), key: value}
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("schedule.extra_groups", {"schedule__extra_groups": 2}),
        ("schedule.surplus", {"schedule__surplus": "drop"}),
        (
            "schedule.surplus",
            {
                "schedule__surplus": "drop",
                "schedule__extra_groups": 1,
                "schedule__window": None,
                "schedule__max_lag": 1,
            },
        ),
        ("rollout.tokens_per_round", {"rollout__tokens_per_round": 8}),
        ("staleness.bound", {"staleness__action": "drop"}),
        ("staleness.bound", {"staleness__bound": 1, "schedule__max_lag": 2}),
        ("staleness.bound", {"staleness__bound": 9, "schedule__window": None}),
        (
            "staleness.bound",
            {
                "staleness__bound": 1,
                "staleness__action": "recycle",
                "schedule__sync_every": 3,
                "placement__kind": "disaggregated",
            },
        ),
        ("placement.engines", {"placement__engines": 2}),
        (
            "placement.release_kv",
            {"placement__release_kv": True, "placement__kind": "disaggregated"},
        ),
        ("placement.release_kv", {"placement__release_kv": True, **SWAP}),
        ("placement.engines", {**SWAP, "placement__engines": 3}),
        ("schedule.max_lag", {**SWAP, "schedule__max_lag": 2}),
        ("schedule.window", {**SWAP, "schedule__window": None}),
        ("schedule.sync_every", {**SWAP, "schedule__sync_every": 2}),
        (
            "staleness.action",
            {**SWAP, "staleness__action": "recycle", "staleness__bound": 1},
        ),
        ("advantage.zero_spread", {**SWAP, "advantage__zero_spread": "resample"}),
        ("placement.repack_below", {**PACKED, **SWAP}),
        ("placement.repack_below", {**PACKED, "placement__engines": 1}),
        ("placement.repack_below", {**PACKED, "schedule__max_lag": 0}),
        ("placement.repack_below", {**PACKED, "engine__kv_on_update": "keep"}),
        ("schedule.sync_every", {"schedule__sync_every": 2}),
        ("staleness.preset_options", {"staleness__preset_options": {"max_staleness": 1}}),
        (
            "staleness.preset_options.max_stalenes",
            {"staleness__preset": "trl", "staleness__preset_options": {"max_stalenes": 1}},
        ),
        ("staleness.preset_options.max_lag", {"staleness__preset": "pipelinerl"}),
        ("schedule.max_lag", {"staleness__preset": "areal", "schedule__max_lag": 1}),
        (
            "staleness.preset_options",
            {"staleness__preset": "verl", "staleness__preset_options": {"staleness_threshold": -1}},
        ),
        (
            "eval.every",
            {
                "schedule__sync_every": 2,
                "eval__every": 3,
                "placement__kind": "disaggregated",
            },
        ),
    ],
)
def test_what_cannot_work_is_one_line_with_its_remedy(path: str, keys: dict[str, Any]):
    lines = list(check_schedule("", config(**keys)))
    assert [line.partition(":")[0] for line in lines] == [path]
    assert any(
        word in lines[0]
        for word in (
            "set ",
            "use ",
            "for example",
            "lower",
            "up to",
            "remove",
            "nearest",
            "missing",
            ">= 0",
            "without",
        )
    )


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"schedule__max_lag": 2, "staleness__bound": 2},
        {"schedule__max_lag": 1, "rollout__tokens_per_round": 8},
        {"schedule__extra_groups": 4, "schedule__window": None, "schedule__surplus": "drop"},
        {"schedule__max_lag": 4, "staleness__action": "interrupt", "staleness__bound": 2},
        {"schedule__window": None, "staleness__action": "accept"},
        {"placement__kind": "disaggregated", "schedule__sync_every": 2, "placement__engines": 3},
        SWAP,
        {**SWAP, "schedule__max_lag": 0, "placement__engines": 4},
        {**SWAP, "staleness__action": "accept"},
        PACKED,
    ],
)
def test_what_can_work_is_accepted(keys: dict[str, Any]):
    assert list(check_schedule("", config(**keys))) == []


@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        ({}, 0),
        ({"schedule__max_lag": 3}, 3),
        ({"schedule__window": 17}, 1),
        ({"schedule__window": 18}, 2),
        ({"schedule__window": 2, "schedule__extra_groups": 16}, 2),
        ({"schedule__sync_every": 4, "schedule__max_lag": 1}, 4),
        ({"schedule__window": None}, None),
    ],
)
def test_the_lag_that_a_schedule_allows(keys: dict[str, Any], bound: int | None):
    """By hand, 16 groups a step: max_lag + sync_every - 1 + ceil((window - 1 + extra) / 16)."""
    assert lag_bound(config(**keys)) == bound


def test_groups_run_on_during_training_only_where_something_is_carried():
    assert not runs_on(config())
    assert runs_on(config(schedule__max_lag=1))
    assert runs_on(config(schedule__extra_groups=1))
    assert not runs_on(config(schedule__extra_groups=1, schedule__surplus="drop"))


def test_a_preset_is_written_out_with_the_sizes_of_the_run():
    """By hand: trl with 16 groups of 8, staleness 4: ceil((4 * 128 + 1024) / 8) = 192 groups."""
    done = written_out(config(staleness__preset="trl"))
    assert (done.schedule.window, done.schedule.extra_groups) == (None, 192)
    assert (done.staleness.action, done.staleness.bound, done.staleness.preset) == ("drop", 4, None)
    assert done.engine.max_running == 128  # 64 groups would be 512, above the engine's own limit
    assert written_out(done) == done


@pytest.mark.parametrize("name", ["sync", "one_step_off", "areal", "skyrl", "prime_rl", "trl"])
def test_presets_with_their_own_defaults_are_accepted(name: str):
    assert list(check_schedule("", config(staleness__preset=name))) == []
