"""The metrics file, also after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lagzero.errors import LagzeroError
from lagzero.observe.metrics import MetricsLog, read_metrics, read_schema


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_metric_is_explained_once_before_its_first_use(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(1, {"reward/mean": 0.5})
    log.write(2, {"reward/mean": 0.75, "train/lr": 1e-6})
    found = lines(path)  # not closed: every line is flushed
    assert [list(line) for line in found] == [
        ["schema"],
        ["step", "reward/mean"],
        ["schema"],
        ["step", "reward/mean", "train/lr"],
    ]
    assert list(read_schema(path)) == ["reward/mean", "train/lr"]
    log.close()


def test_nothing_that_is_no_number_is_written(tmp_path: Path):
    """RF6"""
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write(1, {"reward/mean": math.nan, "groups/count": 0})
    assert "NaN" not in (tmp_path / "m.jsonl").read_text()
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "groups/count": 0}]


def test_an_unknown_metric_writes_nothing(tmp_path: Path):
    log = MetricsLog(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="no/such"):
        log.write(1, {"reward/mean": 1.0, "no/such": 2.0})
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_a_resumed_run_drops_the_steps_that_it_does_again(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path)
    for step in range(5):
        log.write(step, {"reward/mean": step / 8})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "rew')  # the kill
    log = MetricsLog(path, resume_step=2)
    log.write(3, {"reward/mean": 7.0})
    log.close()
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(path)] == [
        (0, 0.0),
        (1, 0.125),
        (2, 0.25),
        (3, 7.0),
    ]
    assert sum("schema" in line for line in lines(path)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.jsonl"]


def test_resuming_without_a_file_starts_one(tmp_path: Path):
    MetricsLog(tmp_path / "m.jsonl", resume_step=3).write(4, {"train/lr": 1.0})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 4, "train/lr": 1}]


def test_a_new_run_does_not_write_into_another_runs_file(tmp_path: Path):
    MetricsLog(tmp_path / "m.jsonl").close()
    with pytest.raises(LagzeroError, match="another run"):
        MetricsLog(tmp_path / "m.jsonl")


def test_damage_in_the_middle_of_a_file_is_not_passed_over(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 2}\n')
    with pytest.raises(LagzeroError, match="line 2"):
        read_metrics(path)


def test_lines_of_one_step_are_joined(tmp_path: Path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write(1, {"reward/mean": 0.5})
    log.write(1, {"eval/greedy_accuracy": 0.25})
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "eval/greedy_accuracy": 0.25}
    ]
