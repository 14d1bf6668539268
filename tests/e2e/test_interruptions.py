"""Ctrl-C, SIGTERM, kill -9 and a full disk: nothing is lost, and a resumed run is the same run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lagzero.observe.metrics import read_metrics
from lagzero.train.checkpoint import latest

SLOW = [{"use": "rewards.py:slow"}]  # the rewards of the whole run, with time to interrupt


def output_until(process: subprocess.Popen[str], words: str) -> str:
    """Read the output up to a line that holds ``words``."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"ended without {words!r}:\n{seen}")


def slow_recipe(place: Any, name: str) -> str:
    return place.recipe(name, run_dir=name, score__rewards=SLOW, eval__every=2, eval__before=True)


def same_run(one: Path, other: Path, records: Any, weights: Any) -> None:
    assert weights(one / "policy") == weights(other / "policy")
    names = ("trainer.safetensors", "cursor.json", "before.json", "evaluated.json")
    for name in names:
        ours, theirs = (run / "checkpoints/step-000006" / name for run in (one, other))
        assert ours.read_bytes() == theirs.read_bytes(), name
    # The rewards have other names, and so have their figures.
    assert [_unnamed(r) for r in records(one)] == [_unnamed(r) for r in records(other)]


def _unnamed(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name.replace("/slow/", "/evens/").replace("/slow", "/evens"): value
        for name, value in record.items()
    }


@pytest.fixture(scope="module")
def interrupted_run(place: Any) -> tuple[Path, str]:
    """A run that Ctrl-C ended in the middle, with what it printed."""
    process = place.start("train", slow_recipe(place, "interrupted"))
    output = output_until(process, "step 3/6")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    rest, _ = process.communicate(timeout=60)
    output += rest
    assert process.returncode == 130, output
    return place.folder / "interrupted", output


def test_ctrl_c_ends_a_run_with_a_checkpoint_and_no_traceback(
    interrupted_run: tuple[Path, str],
):
    run, output = interrupted_run
    checkpoint = latest(run)
    assert checkpoint is not None
    step = int(checkpoint.name.removeprefix("step-"))
    assert 3 <= step < 6
    assert f"Stopped after step {step} of 6." in output
    assert f"--resume {run.name}" in output
    assert "Traceback" not in output
    assert not (run / "policy").exists()


def test_an_interrupted_run_is_measured_by_its_last_checkpoint(
    place: Any, interrupted_run: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    assert place.inside("eval", "interrupted", "--eval.num_prompts=2") == 0
    assert "Held-out accuracy of interrupted" in capsys.readouterr().out


def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(
    place: Any,
    interrupted_run: tuple[Path, str],
    whole_run: Path,
    records: Any,
    weights: Any,
    capsys: pytest.CaptureFixture[str],
):
    """RS1, RS4, RS7: the same prompts, samples, weights, optimiser state and metrics."""
    run, _ = interrupted_run
    assert place.inside("train", "--resume", "interrupted") == 0
    assert "resuming from interrupted/checkpoints/step-00000" in capsys.readouterr().out
    same_run(run, whole_run, records, weights)


def test_sigterm_ends_a_run_like_ctrl_c(place: Any, whole_run: Path, records: Any, weights: Any):
    process = place.start("train", slow_recipe(place, "terminated"))
    output = output_until(process, "step 1/6")
    process.terminate()
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output + rest
    assert "Traceback" not in rest
    assert place.inside("train", "--resume", "terminated") == 0
    same_run(place.folder / "terminated", whole_run, records, weights)


def test_a_run_killed_at_any_moment_resumes_to_the_same_weights(
    place: Any, whole_run: Path, weights: Any, records: Any
):
    """RS1: killed before the first checkpoint, and again at a random moment later."""
    process = place.start("train", slow_recipe(place, "killed"))
    output_until(process, "greedy")
    process.kill()
    process.wait()
    process = place.start("train", "--resume", "killed")
    output = output_until(process, "step 3/6")
    assert "no complete checkpoint: starting again from step 0" in output
    moment = random.random() / 2
    time.sleep(moment)
    process.kill()
    process.wait()
    run = place.folder / "killed"
    print(f"killed {moment:.3f} s after step 3, checkpoint {latest(run)}")
    assert place.inside("train", "--resume", "killed") == 0
    same_run(run, whole_run, records, weights)


def test_an_evaluation_that_ctrl_c_cuts_off_is_made_on_resuming(
    place: Any, whole_run: Path, records: Any, weights: Any, capsys: pytest.CaptureFixture[str]
):
    (place.folder / "signals.py").write_text(
        "import os, pathlib, signal, time\n"
        "from rewards import evens\n"
        "calls = []\n"
        "def slow(prompts, completions, **columns):\n"
        "    calls.extend(['eval'] if 'Say 6' in prompts[0] else [])\n"
        "    if len(calls) == 9 and not pathlib.Path('sent').exists():\n"  # 8 come before step 1
        "        pathlib.Path('sent').touch()\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(1)\n"
        "    return evens(prompts, completions)\n"
    )
    rewards = [{"use": "signals.py:slow"}]
    # Only held-out prompts say 60 and above: 4 greedy and 4 sampled before the first step.
    recipe = place.recipe(
        "cut", run_dir="cut", score__rewards=rewards, eval__every=2, eval__before=True
    )
    sys.path.insert(0, str(place.folder))
    try:
        assert place.inside("train", recipe) == 130
        assert "Stopped after step 2 of 6" in capsys.readouterr().out
        run = place.folder / "cut"
        assert [r["step"] for r in records(run) if "eval/greedy_accuracy" in r] == [0]
        assert place.inside("train", "--resume", "cut") == 0
    finally:
        sys.path.remove(str(place.folder))
    same_run(run, whole_run, records, weights)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("engine-copy", {"model__dtype": "bfloat16", "engine__dtype": "float32"}),
        ("adapter", {"model__dtype": "bfloat16", "model__lora": {"rank": 4, "alpha": 8.0}}),
        ("masters", {"model__dtype": "bfloat16"}),
        ("kl", {"loss": {"kl": {"coefficient": 0.1}}}),
        ("system", {"model__system_prompt": "Answer with even digits only, please. " * 2}),
    ],
)
def test_every_kind_of_run_resumes_bit_for_bit(
    place: Any, name: str, changes: dict[str, Any], records: Any, weights: Any
):
    """RS7: also an engine with tensors of its own holds the resumed weights for its first groups.

    With a long system prompt, prompts share cached pages, and a resumed engine starts without.
    """
    changes = {**changes, "schedule__steps": 4, "eval__every": 1, "checkpoint": {"every": 1}}
    straight = place.recipe(f"{name}-1", run_dir=f"{name}-1", **changes)
    assert place.inside("train", straight) == 0
    halved = place.recipe(f"{name}-2", run_dir=f"{name}-2", **changes)
    assert place.inside("train", halved, "--schedule.steps=2") == 0
    assert place.inside("train", "--resume", f"{name}-2", "--schedule.steps=4") == 0
    one, two = place.folder / f"{name}-1", place.folder / f"{name}-2"
    assert records(one) == records(two)
    assert weights(one / "policy") == weights(two / "policy")


def test_a_second_ctrl_c_ends_at_once(place: Any):
    """The first one waits for the step that trains; here that takes ten minutes."""
    program = (
        "import sys, time, lagzero.train.step as step\n"
        "from lagzero.cli import main\n"
        "step.LocalTrainer.step = lambda *_: (print('training', flush=True), time.sleep(600))\n"
        "sys.exit(main(['train', sys.argv[1]]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, place.recipe("stuck", run_dir="stuck")],
        cwd=place.folder,
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output_until(process, "training")
    process.send_signal(signal.SIGINT)
    output_until(process, "once more to end at once")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in rest


def test_more_steps_continue_a_finished_run(
    place: Any, whole_run: Path, records: Any, weights: Any
):
    """Five steps and then one more are six: with a constant rate, the total decides nothing."""
    recipe = place.recipe("longer", run_dir="longer", eval__every=2, eval__before=True)
    assert place.inside("train", recipe, "--schedule.steps=5") == 0
    five = weights(place.folder / "longer" / "policy")
    assert place.inside("train", "--resume", "longer", "--schedule.steps=6") == 0
    assert weights(place.folder / "longer" / "policy") != five
    same_run(place.folder / "longer", whole_run, records, weights)
    config = yaml.safe_load((place.folder / "longer" / "config.yaml").read_text())
    assert config["schedule"]["steps"] == 6


def test_a_resumed_run_is_measured_by_what_it_learnt_since(place: Any):
    from lagzero import build

    recipe = place.recipe("older", run_dir="older", schedule__steps=1)
    assert place.inside("train", recipe) == 0
    run = place.folder / "older"
    checkpoint = next((run / "checkpoints").iterdir())
    checkpoint.rename(checkpoint.with_name("step-000009"))  # saved after policy/ was written
    assert build.newest_policy_folder(run) == run / "checkpoints/step-000009/policy"


def test_the_steps_after_a_resume_are_not_those_before_it(records: Any, whole_run: Path):
    """RS4: were randomness seeded anew at each start, the steps would repeat."""
    lengths = [
        (r["length/mean"], r["reward/mean"]) for r in records(whole_run) if "length/mean" in r
    ]
    assert len(set(lengths)) > len(lengths) / 2


def test_a_lost_cursor_is_refused(place: Any, capsys: pytest.CaptureFixture[str]):
    """RS6: training on the first prompts again would be a silent restart of the data."""
    recipe = place.recipe("no-cursor", run_dir="no-cursor", schedule__steps=1)
    assert place.inside("train", recipe) == 0
    next((place.folder / "no-cursor" / "checkpoints").glob("*/cursor.json")).unlink()
    assert place.inside("train", "--resume", "no-cursor", "--schedule.steps=2") == 1
    assert "cursor.json: missing" in capsys.readouterr().err


@pytest.fixture
def small_disk(place: Any) -> Iterator[Path]:
    """A file system of 3 MB: one checkpoint of the tiny model and no second one."""
    folder = place.folder / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_clearly_and_leaves_the_checkpoint_before(
    place: Any, small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = place.recipe("full", run_dir="disk/run")
    assert place.inside("train", recipe) == 1
    error = capsys.readouterr().err
    assert "could not be written" in error
    assert "free some space" in error
    assert "Traceback" not in error
    checkpoint = latest(small_disk / "run")
    assert checkpoint is not None
    manifest = json.loads((checkpoint / "complete.json").read_text())["files"]
    assert all((checkpoint / n).stat().st_size == size for n, size in manifest.items())


def test_a_disk_that_fills_in_the_metrics_stops_clearly(
    place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from lagzero.observe.metrics import MetricsLog

    write = MetricsLog.write

    def full(self: MetricsLog, step: int, metrics: Any, empty: bool = False) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")
        write(self, step, metrics, empty)

    monkeypatch.setattr(MetricsLog, "write", full)
    recipe = place.recipe("full-metrics", run_dir="full-metrics")
    assert place.inside("train", recipe) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert latest(place.folder / "full-metrics").name == "step-000003"  # nothing learnt is lost


def test_a_failure_that_is_the_programs_keeps_its_traceback(
    place: Any, monkeypatch: pytest.MonkeyPatch
):
    from lagzero.prepare.prepare import GroupPreparer

    async def broken(self: GroupPreparer, groups: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(GroupPreparer, "prepare", broken)
    recipe = place.recipe("bug", run_dir="bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        place.inside("train", recipe)
    assert read_metrics(place.folder / "bug" / "metrics.jsonl") == []
    assert latest(place.folder / "bug").name == "step-000000"  # and the run can be resumed


def test_a_resumed_run_keeps_its_data_and_says_what_else_changed(
    place: Any, capsys: pytest.CaptureFixture[str]
):
    """Another seed or group size would make the second half of the run another run."""
    recipe = place.recipe("fixed", run_dir="fixed", schedule__steps=2)
    assert place.inside("train", recipe) == 0
    capsys.readouterr()
    changes = ("--seed=9", "--rollout.group_size=8", "--data.train.0.size=5")
    assert place.inside("train", "--resume", "fixed", *changes) == 2
    error = capsys.readouterr().err
    for key in ("seed: 3 cannot become 9", "rollout.group_size: 4", "data.train.0.size: None"):
        assert key in error
    assert place.inside("train", "--resume", "fixed", "--schedule.steps=3") == 0
    assert "changed: schedule.steps from 2 to 3" in capsys.readouterr().out
