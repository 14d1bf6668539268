"""Engines in processes of their own, generation ahead of training, and what may break in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lagzero.observe.metrics import read_metrics

APART = {"placement__kind": "disaggregated"}
SWAP = {"placement__kind": "swap", "placement__engines": 2}
SWAP_AHEAD = {**SWAP, "schedule__max_lag": 1}
SLOW = [{"use": "rewards.py:slow"}]


def lags(run: Path) -> list[float]:
    return [
        line["lag/group_max"]
        for line in read_metrics(run / "metrics.jsonl")
        if "lag/group_max" in line
    ]


def consumed(run: Path) -> int:
    """How many visits the last checkpoint says are over."""
    folder = sorted((run / "checkpoints").iterdir())[-1]
    cursor = json.loads((folder / "cursor.json").read_text())
    return cursor["next_index"] + len(cursor["ahead"])


def engine_pids(process: subprocess.Popen[str]) -> list[int]:
    """The engine processes of a run, by the name that they show in ps."""
    found: list[int] = []
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().startswith("lagzero-engine"):
                found.append(int(child))
    return found


def output_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"ended without {words!r}:\n{seen}")


@pytest.mark.parametrize(("name", "keys"), [("apart", APART), ("swap-without-lag", SWAP)])
def test_a_run_without_lag_is_the_same_run_wherever_its_engine_is(
    place: Any, whole_run: Path, weights: Any, name: str, keys: dict[str, Any]
):
    """The same tokens, rewards and gradients, bit for bit: placement does not reach the math."""
    recipe = place.recipe(name, run_dir=name, eval__every=2, eval__before=True, **keys)
    assert place.inside("train", recipe) == 0
    assert weights(place.folder / name / "policy") == weights(whole_run / "policy")
    names = ("reward/mean", "train/loss", "train/grad_norm", "eval/greedy_accuracy")
    told = [
        [{n: line[n] for n in names if n in line} for line in read_metrics(run / "metrics.jsonl")]
        for run in (place.folder / name, whole_run)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("colocated", {"schedule__max_lag": 1}),
        ("released", {"schedule__max_lag": 1, "placement__release_kv": True}),
        ("kept", {"placement__release_kv": False}),
        ("rounds", {"schedule__max_lag": 2, "rollout__tokens_per_round": 3}),
        (
            "recomputed",
            {
                "schedule__max_lag": 2,
                "rollout__tokens_per_round": 3,
                "engine__kv_on_update": "recompute",
            },
        ),
        ("carried", {"schedule__extra_groups": 3, "schedule__window": None}),
        (
            "surplus",
            {
                "schedule__extra_groups": 3,
                "schedule__window": None,
                "schedule__surplus": "drop",
            },
        ),
        (
            "first",
            {
                "schedule__max_lag": 3,
                "schedule__window": None,
                "staleness__action": "interrupt",
                "staleness__bound": 1,
            },
        ),
        ("swap-copy", {**SWAP_AHEAD, "engine__dtype": "bfloat16"}),
        (
            "adapter-seldom",
            {**APART, "schedule__sync_every": 3, "model__lora": {"rank": 4, "alpha": 8.0}},
        ),
        (
            "engines-repacked",
            {
                **APART,
                "placement__engines": 2,
                "placement__repack_below": 6,
                "schedule__max_lag": 3,
                "rollout__tokens_per_round": 3,
                "engine__kv_on_update": "recompute",
            },
        ),
    ],
)
def test_each_way_to_schedule_trains_every_step_within_its_lag(
    place: Any, name: str, keys: dict[str, Any]
):
    recipe = place.recipe(name, run_dir=name, **keys)
    assert place.inside("train", recipe) == 0
    seen = lags(place.folder / name)
    assert len(seen) == 6
    assert consumed(place.folder / name) >= 24
    if keys.get("staleness__action"):
        assert max(seen) <= keys["staleness__bound"]
    elif keys.get("schedule__sync_every"):
        assert seen == [0, 1, 2, 0, 1, 2]
    elif "schedule__window" not in keys:  # as far ahead as it may, and no further
        assert max(seen) == keys.get("schedule__max_lag", 0)


def test_a_killed_engine_is_replaced_and_an_interrupted_run_loses_no_prompt(place: Any):
    keys = {"score__rewards": SLOW, "schedule__max_lag": 2, **APART}
    process = place.start("train", place.recipe("faults", run_dir="faults", **keys))
    output = output_until(process, "step 1/6")
    (victim,) = engine_pids(process)
    os.kill(victim, signal.SIGKILL)
    output += output_until(process, "step 4/6")
    assert f"pid {victim}" in output
    assert "SIGKILL" in output
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output + rest
    assert "Traceback" not in output + rest
    assert place.inside("train", "--resume", "faults") == 0
    run = place.folder / "faults"
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert len(lags(run)) == 6
    assert consumed(run) >= 24


def test_a_run_that_must_not_go_on_without_its_engine_ends_with_a_checkpoint(place: Any):
    """Resumed, it goes on; killed then, it leaves no engine behind. Its halves take turns."""
    keys = {"score__rewards": SLOW, "placement__on_engine_death": "stop", **SWAP_AHEAD}
    process = place.start("train", place.recipe("ended", run_dir="ended", **keys))
    output = output_until(process, "step 3/6")
    victim = max(engine_pids(process))
    os.kill(victim, signal.SIGKILL)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output + rest
    assert f"pid {victim}" in rest
    assert "Traceback" not in rest
    process = place.start("train", "--resume", "ended")
    output_until(process, "step 5/6")
    engines = engine_pids(process)
    assert len(engines) == 2
    process.kill()
    process.communicate(timeout=60)
    while any(map(_is_running, engines)):
        time.sleep(0.05)  # ends with the engines, or at the suite's own limit


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
