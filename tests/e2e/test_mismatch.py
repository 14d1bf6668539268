"""The mismatch experiment: its distortions act and vanish, and its page says what its data say."""

from __future__ import annotations

import csv
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
HERE = ROOT / "recipes" / "mismatch"
MODULES = ("conditions", "distort", "experiment", "measure", "plot", "run", "tables", "task")


@pytest.fixture(scope="module")
def recipe() -> Iterator[dict[str, ModuleType]]:
    """The modules of the experiment, imported as its command imports them."""
    sys.path.insert(0, str(HERE))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(HERE))
        for name in MODULES:
            del sys.modules[name]


def test_rounding_rows_to_few_bits(recipe: dict[str, ModuleType]):
    matrix = torch.tensor([[7.0, 3.4, -3.6, 0.2], [0.0, 0.0, 0.0, 0.0], [-1.4, 0.3, 0.29, 1.4]])
    rounded = recipe["distort"].round_rows(matrix, 4)  # 7 levels on either side
    expected = torch.tensor([[7.0, 3.0, -4.0, 0.0], [0.0] * 4, [-1.4, 0.4, 0.2, 1.4]])
    torch.testing.assert_close(rounded, expected)


def test_eight_significant_bits_are_bfloat16(recipe: dict[str, ModuleType]):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 20
    assert torch.equal(recipe["distort"].round_bits(values, 8), values.bfloat16().float())


def test_a_right_answer_holds_each_letter_once(recipe: dict[str, ModuleType]):
    replies = ["CAB", "ABC", "AB", "ABCC", "ABX", "abc", ""]
    rewards = recipe["task"].each_once(["abc>"] * len(replies), replies)
    assert rewards == [1, 1, 0, 0, 0, 0, 0]


@pytest.fixture(scope="module")
def tiny(recipe: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment's command, in seconds: a barely warmed-up model, two steps."""
    out = tmp_path_factory.mktemp("mismatch")
    wanted = ["exact", "cold-none"]
    sizes = ["--seeds", "1", "--steps", "2", "--letters", "2", "--warmup", "60"]
    recipe["run"].main(["--out", str(out), *sizes, "--only", *wanted])
    return out


def kls(folder: Path, name: str) -> list[float]:
    with (folder / "curves.csv").open(newline="") as file:
        return [float(r["kl"]) for r in csv.DictReader(file) if r["condition"] == name and r["kl"]]


def test_the_distortion_acts_and_is_gone_without_it(tiny: Path):
    assert max(kls(tiny, "exact")) < 1e-9
    assert min(kls(tiny, "cold-none")) > 1e-3


def test_the_command_writes_its_tables(tiny: Path):
    found = json.loads((tiny / "summary.json").read_text())
    assert found["settings"]["letters"] == 2
    assert set(found["conditions"]) == {"exact", "cold-none"}
    assert len(found["conditions"]["exact"]["reward_last"]) == 1


def test_a_run_that_is_there_is_not_made_again(tiny: Path, recipe: dict[str, ModuleType]):
    metrics = tiny / "exact-0" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    condition = next(c for c in recipe["conditions"].CONDITIONS if c.name == "exact")
    curve, end = recipe["run"].run(condition, 0, 2, tiny)
    assert (metrics.stat().st_mtime_ns, end) == (before, "")
    assert curve[-1]["step"] == 2


def test_growth_of_independent_and_of_one_signed_differences(recipe: dict[str, ModuleType]):
    summary = recipe["measure"].summary
    noise = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).numpy()
    assert summary(noise)["exponent"] == pytest.approx(0.5, abs=0.05)
    assert summary(0 * noise + 0.01)["exponent"] == pytest.approx(1.0, abs=1e-6)
    assert summary(0 * noise + 0.01)["max_abs"] == pytest.approx(0.01)


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / name).read_text())


def test_the_page_holds_the_tables_of_the_data(recipe: dict[str, ModuleType]):
    page = (ROOT / "docs" / "mismatch.md").read_text()
    assert recipe["tables"].runs_table(read("summary.json")) in page
    assert recipe["tables"].numerics_table(read("numerics.json")) in page


def test_the_summary_is_that_of_the_curves(recipe: dict[str, ModuleType]):
    curves = recipe["plot"].read_curves(HERE / "results" / "curves.csv")
    found = read("summary.json")["conditions"]
    assert {name for name, _ in curves} == set(found)
    for (name, seed), columns in curves.items():
        rewards = columns["policy_reward"]
        rewards = rewards[rewards == rewards]  # not NaN: the steps with an evaluation
        assert rewards[-1] == pytest.approx(found[name]["reward_last"][seed], abs=1e-3)
        assert rewards.min() == pytest.approx(found[name]["reward_least"][seed], abs=1e-3)


def test_the_page_shows_images_that_exist_and_every_condition_was_run(
    recipe: dict[str, ModuleType],
):
    page = (ROOT / "docs" / "mismatch.md").read_text()
    images = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
    assert images
    assert [image for image in images if not (ROOT / "docs" / image).is_file()] == []
    assert len(read("summary.json")["conditions"]) == len(recipe["conditions"].CONDITIONS)
