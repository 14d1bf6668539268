"""The observer joins times, metrics and the view, and refuses what is not documented."""

from __future__ import annotations

import asyncio
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
        as_protocol.step(5, {"length/mean": 10.0, "rollouts/count": 4.0, "version/min": 3})

    asyncio.run(run())
    observer.evaluated(5, {"eval/greedy_accuracy": 0.5})
    observer.close()
    step = {
        "length/mean": 10,
        "rollouts/count": 4,
        "version/min": 3,
        "engine/num_preemptions": 2,
        "time/generate_s": 2,
        "time/train_s": 2,
        "time/step_s": 4,
        "time/generate_tok_per_s": 20,
        "lag/max": 1,
    }
    assert read_metrics(path) == [{"step": 5, **step, "eval/greedy_accuracy": 0.5}]
    assert seen.steps == [(5, step), (5, {"eval/greedy_accuracy": 0.5})]
    assert seen.stages == [("generate",), (), ("train",), (), ("closed",)]


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
