"""The observer joins times, metrics and the view, and refuses what is not documented."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lagzero.observe.metrics import MetricsLog, read_metrics
from lagzero.observe.observer import RunObserver, derived
from lagzero.observe.timing import StageClock
from lagzero.protocols import Observer


class Seen:
    """A view that remembers."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, ...]] = []
        self.steps: list[tuple[int, Mapping[str, float]]] = []

    def stage(self, running: Sequence[str]) -> None:
        self.stages.append(tuple(running))

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, metrics))

    def close(self) -> None:
        self.stages.append(("closed",))


def test_a_step_is_recorded_with_times_probes_and_what_follows(tmp_path: Path):
    now = [0.0]
    seen, path = Seen(), tmp_path / "m.jsonl"
    observer = RunObserver(
        MetricsLog(path),
        seen,
        StageClock(lambda: now[0]),
        [lambda: {"engine/num_preemptions": 2.0}],
    )
    as_protocol: Observer = observer

    async def play(seconds: float) -> None:
        async with as_protocol.stage("generate"):
            now[0] += seconds
            await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(play(1), play(1))
        async with as_protocol.stage("train"):
            now[0] += 2
        as_protocol.step(
            5,
            {"length/mean": 10.0, "rollouts/count": 4.0, "version/min": 3, "train/loss": 0.5},
        )

    asyncio.run(run())
    observer.evaluated(5, {"eval/greedy_accuracy": 0.5})
    observer.close()
    step = {
        "length/mean": 10,
        "rollouts/count": 4,
        "version/min": 3,
        "train/loss": 0.5,
        "engine/num_preemptions": 2,
        "time/generate_s": 2,
        "time/train_s": 2,
        "time/step_s": 4,
        "time/generate_tok_per_s": 20,
        "lag/max": 1,
    }
    evaluation = {"eval/greedy_accuracy": 0.5, "time/evaluate_s": 0}
    assert read_metrics(path) == [{"step": 5, **step, **evaluation}]
    assert seen.steps == [(5, step), (5, evaluation)]
    assert seen.stages == [("generate",), (), ("train",), (), ("closed",)]


def test_groups_without_an_update_do_not_overwrite_the_step_before(tmp_path: Path):
    """Also on resuming: what came after the checkpoint's step is written again, so it is cut."""
    path = tmp_path / "m.jsonl"
    observer = RunObserver(MetricsLog(path), Seen())
    observer.step(1, {"reward/mean": 0.5, "train/loss": 0.1})
    observer.step(1, {"reward/mean": 0.0})
    observer.step(2, {"reward/mean": 0.75, "train/loss": 0.2})
    observer.step(2, {"reward/mean": 0.25})
    observer.close()
    assert [m["reward/mean"] for m in read_metrics(path)] == [0.5, 0.75]
    MetricsLog(path, resume_step=2).close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rewards = [(r.get("step"), r.get("reward/mean")) for r in records if "schema" not in r]
    assert rewards == [(1, 0.5), (None, 0.0), (2, 0.75)]


def test_an_evaluation_takes_no_time_from_the_next_step(tmp_path: Path):
    now = [0.0]
    seen = Seen()
    clock = StageClock(lambda: now[0])
    observer = RunObserver(MetricsLog(tmp_path / "m.jsonl"), seen, clock)

    async def run() -> None:
        async with observer.stage("evaluate"):
            now[0] += 30
        observer.evaluated(0, {"eval/greedy_accuracy": 0.5})
        now[0] += 4
        observer.step(1, {"train/loss": 0.5})

    asyncio.run(run())
    assert seen.steps[0][1]["time/evaluate_s"] == 30
    assert seen.steps[1][1]["time/step_s"] == 4


def test_a_metric_or_stage_that_the_catalogue_lacks_is_refused(tmp_path: Path):
    observer = RunObserver(MetricsLog(tmp_path / "m.jsonl"), Seen())
    with pytest.raises(ValueError, match="made/up"):
        observer.step(1, {"made/up": 1.0})

    async def enter() -> None:
        async with observer.stage("nap"):
            pass

    with pytest.raises(ValueError, match="time/nap_s"):
        asyncio.run(enter())


def test_what_lacks_its_inputs_is_left_out():
    assert derived(3, {}) == {}
    assert derived(3, {"time/generate_s": 0.0, "length/mean": 1, "rollouts/count": 1}) == {}
