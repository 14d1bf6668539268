"""What cannot work is refused at once, in words that help, with exit code 2 or 1."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Makes any import of torch an error that nothing catches.
NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            print("IMPORTED", name, file=sys.stderr)
            raise SystemExit(99)

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def without_torch(place: Any) -> Any:
    """A function (*arguments) -> the program's end, in a process that cannot import torch."""
    folder = place.folder / "no_torch"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(NO_TORCH)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = place.environment
        environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
        return subprocess.run(
            place.command(arguments),
            cwd=place.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_every_configuration_problem_is_listed_at_once_before_torch(place: Any, without_torch: Any):
    recipe = place.recipe(
        "wrong",
        rollout={"group_size": 1, "max_new_tokens": 8},
        schedule__stepz=3,
        train__micro_batch_tokens="many",
        engine__kv_cache_tokens=4,
    )
    done = without_torch("train", recipe, "--loss.clip_low=2", "--eval.nothing=1")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    head, *lines = done.stderr.splitlines()
    assert head == "6 problem(s) in the configuration:"
    wanted = (
        "schedule.stepz",
        "train.micro_batch_tokens",
        "rollout.group_size",
        "engine.kv_cache_tokens",
        "loss.clip_low",
        "eval.nothing",
    )
    for path in wanted:
        assert sum(line.strip().startswith(path) for line in lines) == 1, (path, lines)
    assert "steps" in next(line for line in lines if "stepz" in line)  # the nearest key


def test_rewards_and_generators_are_checked_with_all_the_rest_before_torch(
    place: Any, without_torch: Any
):
    task = {"kind": "arithmetic", "options": {"tasks": [{"kind": "ad"}]}}
    rewards = [{"use": "math_anser"}, {"use": "number_answer", "options": {"strictt": True}}]
    recipe = place.recipe(
        "names",
        data__train=[task, {"kind": "reasoning_gym", "name": "countdwn"}],
        score__rewards=[*rewards, {"use": "rewards.py:odds"}],
        schedule__stepz=3,
    )
    done = without_torch("train", recipe)
    assert done.returncode == 2, done.stderr
    assert [line.strip().split(": ")[0] for line in done.stderr.splitlines()[1:]] == [
        "schedule.stepz",
        "data.train.0.options.tasks.0.kind",
        "data.train.1.name",
        "score.rewards.0.use",
        "score.rewards.1.options.strictt",
        "score.rewards.2.use",
    ]


def test_what_only_training_forbids_may_be_measured(place: Any, without_torch: Any):
    place.recipe("ok")
    words = ("ok.yaml", "--rollout.top_p=0.9", "--rollout.temperature=0")
    assert without_torch("train", *words).returncode == 2
    assert without_torch("eval", *words).returncode == 99  # on the way to the model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "missing.yaml"), "missing.yaml"),
        (("train", "."), "cannot be read"),
        (("eval", "missing"), "missing: neither a recipe nor a run's folder"),
        (("train",), "either a recipe or --resume"),
        (("train", "ok.yaml", "--resume", "whole"), "either a recipe or --resume"),
        (("train", "--resume", "no-such-run"), "not a run's folder"),
        (("eval", "no_torch"), "not a run's folder"),
        (("train", "ok.yaml", "--schedule.steps"), "--a.b=value"),
        (("train", "ok.yaml", "--schedule.steps", "3"), "did you mean --schedule.steps=3?"),
        (("trian", "ok.yaml"), "trian"),
        ((), "COMMAND"),
        (("train", "ok.yaml", "--model.path=./nowhere"), "nowhere"),
        (("train", "ok.yaml", "--score.rewards.0.use=gone.py:f"), "gone.py"),
        (("train", "ok.yaml", "--data.train.0.path=gone.jsonl"), "gone.jsonl"),
        (("eval", "ok.yaml", "--data.eval=[]", "--eval.after=false"), "held-out"),
    ],
)
def test_bad_input_ends_with_code_2_before_torch(
    place: Any, without_torch: Any, arguments: tuple[str, ...], words: str
):
    place.recipe("ok")
    done = without_torch(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_watch_on_torch_can_fail(place: Any, without_torch: Any):
    place.recipe("ok")
    assert without_torch("train", "ok.yaml").returncode == 99


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_a_folder_that_holds_a_run_is_refused(place: Any, without_torch: Any, left: str):
    (place.folder / f"used-{left}" / left).mkdir(parents=True)
    place.recipe("ok")
    done = without_torch("train", "ok.yaml", f"--run_dir=used-{left}")
    assert done.returncode == 2
    assert f"--resume used-{left}" in done.stderr


def test_a_reward_that_is_not_there_is_found_before_the_model_is_loaded(
    place: Any, capsys: pytest.CaptureFixture[str]
):
    place.recipe("ok")
    code = place.inside("train", "ok.yaml", "--score.rewards.0.use=rewards.py:odds", "--run_dir=o")
    assert code == 2
    captured = capsys.readouterr()
    assert "odds" in captured.err
    assert "prompts" not in captured.out  # no data and no model yet
    assert not (place.folder / "o").exists()


def test_rows_that_cannot_be_used_are_listed_with_their_numbers(
    place: Any, capsys: pytest.CaptureFixture[str]
):
    rows = [
        json.dumps({"prompt": "Say 1.", "answer": "1"}),
        json.dumps({"prompt": "", "answer": "2"}),
        "not json",
        json.dumps({"question": "Say 3.", "answer": "3"}),
    ]
    (place.folder / "bad.jsonl").write_text("\n".join(rows))
    place.recipe("ok")
    code = place.inside("train", "ok.yaml", "--data.train.0.path=bad.jsonl", "--run_dir=bad")
    assert code == 2
    error = capsys.readouterr().err
    assert "bad.jsonl: 3 unusable row(s)" in error
    for line in (2, 3, 4):
        assert f"line {line}:" in error
    assert "Traceback" not in error
    assert not (place.folder / "bad").exists()  # the name is free once the rows are mended


def test_a_folder_that_cannot_be_written_is_said_without_a_traceback(
    place: Any, capsys: pytest.CaptureFixture[str]
):
    place.recipe("ok")
    assert place.inside("train", "ok.yaml", "--run_dir=rewards.py/run") == 1
    error = capsys.readouterr().err
    assert "run_dir: rewards.py/run cannot be written: [Errno 20]" in error


def test_a_run_without_a_policy_cannot_be_measured(
    place: Any, whole_run: Path, capsys: pytest.CaptureFixture[str]
):
    bare = place.folder / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text((whole_run / "config.yaml").read_text())
    assert place.inside("eval", "bare") == 1
    assert "no complete checkpoint" in capsys.readouterr().err


def test_equal_rewards_stop_the_run_with_a_checkpoint(
    place: Any, capsys: pytest.CaptureFixture[str]
):
    """RF4: bounded tries, a checkpoint, exit code 1, and words on what to do."""
    recipe = place.recipe(
        "equal",
        run_dir="equal",
        score__rewards=[{"use": "rewards.py:equal"}],
        schedule__max_empty_steps=3,
    )
    assert place.inside("train", recipe) == 1
    error = capsys.readouterr().err
    assert "3 steps in a row had nothing to learn from" in error
    assert "rollouts/zero_spread/count=16" in error
    assert "too hard or too easy" in error
    cursor = json.loads((place.folder / "equal/checkpoints/step-000000/cursor.json").read_text())
    assert cursor == {"step": 0, "next_index": 12, "ahead": [], "resampled": 0}


@pytest.mark.parametrize(
    ("reward", "why"),
    [("broken", "RuntimeError: the grader is out of order"), ("nothing", "the reward gave None")],
)
def test_a_reward_that_never_gives_a_number_is_no_reward_of_zero(
    place: Any, reward: str, why: str, capsys: pytest.CaptureFixture[str]
):
    """RF6: steps in which every rollout failed are skipped, without NaN, and then end the run."""
    recipe = place.recipe(
        reward,
        run_dir=reward,
        score__rewards=[{"use": f"rewards.py:{reward}"}],
        schedule__max_empty_steps=2,
    )
    assert place.inside("train", recipe) == 1
    error = capsys.readouterr().err
    assert "2 steps in a row had nothing to learn from" in error
    assert f"16 rollouts have no score, the first because: {reward}: {why}" in error
    text = (place.folder / reward / "metrics.jsonl").read_text()
    assert "NaN" not in text
    for line in text.splitlines():
        record = json.loads(line)
        if "step" in record:
            assert "reward/mean" not in record
