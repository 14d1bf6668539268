"""Dynamic sampling in whole runs: hand-counted visits, bounded retries, a resume bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lagzero.observe.metrics import read_metrics

REWARDS = '''
def alternating(prompts, completions, **columns):
    """Members differ for even numbers ("Say 12."), and are all equal for odd ones."""
    number = int(prompts[0].removeprefix("Say ").removesuffix("."))
    return [float(number % 2 == 0 and member % 2) for member in range(len(completions))]


def always(prompts, completions, value, **columns):
    return [value] * len(completions)
'''


@pytest.fixture(scope="module")
def resampling(place: Any) -> Any:
    """A function (name, changes) -> recipe with prompts 10, 11, 12, .. in their order."""
    (place.folder / "resampling.py").write_text(REWARDS)

    def recipe(name: str, **changes: Any) -> str:
        settings: dict[str, Any] = {
            "run_dir": name,
            "score__rewards": [{"use": "resampling.py:alternating"}],
            "data__shuffle": False,
            "schedule__steps": 4,
            "advantage__zero_spread": "resample",
            "advantage__resample_limit": 1,
        }
        return place.recipe(name, **{**settings, **changes})

    return recipe


@pytest.fixture(scope="module")
def run(place: Any, resampling: Any) -> Path:
    assert place.inside("train", resampling("resampled")) == 0
    return place.folder / "resampled"


def test_each_step_trains_four_mixed_groups_and_counts_those_played_in_vain(run: Path):
    """Visit i has prompt 10 + i. 0, 2, 4, 6 are mixed: 7 visits; from then on 8 a step."""
    steps = read_metrics(run / "metrics.jsonl")
    assert [step["staleness/given_up/zero_spread/count"] for step in steps] == [3, 4, 4, 4]
    assert [step["staleness/given_up/share"] for step in steps] == [3 / 7, 0.5, 0.5, 0.5]
    assert {step["staleness/given_up/zero_spread/reward_mean"] for step in steps} == {0}
    for step in steps:
        assert step["groups/count"] == 4
        assert step["groups/mixed_share"] == 1
        assert step["rollouts/trained/count"] == 16
        assert step["groups/zero_spread/count"] == 0
    cursor = json.loads((run / "checkpoints/step-000004/cursor.json").read_text())
    assert cursor == {"step": 4, "next_index": 31, "ahead": [], "resampled": 0}


def test_a_resumed_run_resamples_the_same_groups(
    place: Any, run: Path, resampling: Any, records: Any, weights: Any
):
    recipe = resampling("resampled-2", schedule__steps=2)
    assert place.inside("train", recipe) == 0
    again = place.folder / "resampled-2"
    assert place.inside("train", "--resume", "resampled-2", "--schedule.steps=4") == 0
    assert records(again) == records(run)
    assert weights(again / "policy") == weights(run / "policy")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_run_whose_groups_are_all_uniform_stops_with_a_checkpoint(
    place: Any, resampling: Any, records: Any, value: float, capsys: Any
):
    """RF4: two steps, each of 4 groups that were kept and 8 that were played in vain."""
    name = f"uniform-{value:g}"
    recipe = resampling(
        name,
        score__rewards=[{"use": "resampling.py:always", "options": {"value": value}}],
        advantage__resample_limit=2,
        schedule__max_empty_steps=2,
    )
    assert place.inside("train", recipe) == 1
    assert "2 steps in a row had nothing to learn from" in " ".join(capsys.readouterr().err.split())
    steps = [r for r in records(place.folder / name) if "rollouts/count" in r]
    assert [step["staleness/given_up/zero_spread/count"] for step in steps] == [8, 8]
    assert [step["rollouts/zero_spread/count"] for step in steps] == [16, 16]
    (folder,) = (place.folder / name / "checkpoints").iterdir()
    assert json.loads((folder / "cursor.json").read_text())["next_index"] == 24
    shutil.rmtree(place.folder / name)


def test_generation_ahead_of_training_resamples_too(place: Any, resampling: Any):
    recipe = resampling("resampled-ahead", schedule__max_lag=1, advantage__resample_limit=3)
    assert place.inside("train", recipe) == 0
    steps = read_metrics(place.folder / "resampled-ahead" / "metrics.jsonl")
    assert [step["groups/mixed_share"] for step in steps] == [1, 1, 1, 1]
    assert max(step["lag/max"] for step in steps) <= 1
