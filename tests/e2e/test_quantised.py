"""Runs whose engine stores its linear layers in 8 bits, or multiplies in 16 as its trainer does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lagzero.observe.metrics import read_metrics

ROUNDED = {"engine__weights": "int8", "train__rounded_weights": True}
APART = {"placement__kind": "disaggregated"}


def gaps(run: Path) -> list[float]:
    """The largest distance between sampler and trainer of each step, in nats."""
    return [r["mismatch/gap_max"] for r in read_metrics(run / "metrics.jsonl") if r["step"]]


@pytest.fixture(scope="module")
def rounded_run(place: Any) -> Path:
    recipe = place.recipe("int8", run_dir="int8", schedule__steps=4, **ROUNDED)
    assert place.inside("train", recipe) == 0
    return place.folder / "int8"


def test_a_trainer_with_rounded_weights_agrees_with_its_engine_at_every_step(rounded_run: Path):
    """The learning rate moves every weight each step, so a version behind would show at once."""
    assert len(gaps(rounded_run)) == 4
    assert max(gaps(rounded_run)) < 1e-4


def test_without_it_the_gap_is_that_of_8_bits(place: Any):
    for kind in ("int8", "fp8"):
        recipe = place.recipe(kind, run_dir=f"{kind}-apart", engine__weights=kind)
        assert place.inside("train", recipe, "--schedule.steps=2") == 0
        assert min(gaps(place.folder / f"{kind}-apart")) > 1e-4


def test_engines_in_processes_are_sent_8_bits_and_the_run_is_the_same(
    place: Any, rounded_run: Path, weights: Any
):
    recipe = place.recipe(
        "int8-processes",
        run_dir="int8-processes",
        schedule__steps=4,
        **ROUNDED,
        **APART,
    )
    assert place.inside("train", recipe) == 0
    run = place.folder / "int8-processes"
    assert gaps(run) == gaps(rounded_run)
    assert weights(run / "policy") == weights(rounded_run / "policy")


def test_a_resumed_run_is_the_same_run(place: Any, rounded_run: Path, weights: Any):
    """The engine's 8 bits are made of the trainer's weights again, and are no part of the state."""
    again = place.folder / "int8-again"
    shutil.copytree(rounded_run, again)
    shutil.rmtree(again / "checkpoints" / "step-000004")
    shutil.rmtree(again / "policy")
    assert place.inside("train", "--resume", "int8-again") == 0
    assert weights(again / "policy") == weights(rounded_run / "policy")


def test_adapters_on_an_8_bit_base_train_in_engines_of_their_own(place: Any):
    recipe = place.recipe(
        "int8-lora",
        run_dir="int8-lora",
        model__lora={"rank": 4, "alpha": 8.0},
        schedule__steps=3,
        **ROUNDED,
        **APART,
    )
    assert place.inside("train", recipe) == 0
    assert max(gaps(place.folder / "int8-lora")) < 1e-4


@pytest.fixture(scope="module")
def int16_run(place: Any) -> Path:
    recipe = place.recipe(
        "int16", run_dir="int16", schedule__steps=4, model__products="int16", model__dtype="float32"
    )
    assert place.inside("train", recipe) == 0
    return place.folder / "int16"


def test_products_of_integers_are_exact_at_every_step_and_another_policy_than_float32(
    place: Any, int16_run: Path, weights: Any
):
    """Integers of a version behind would show at once; the policy is another one than float32's."""
    assert gaps(int16_run) == [0.0] * 4
    recipe = place.recipe("plain", run_dir="plain", schedule__steps=4, model__dtype="float32")
    assert place.inside("train", recipe) == 0
    assert weights(place.folder / "plain" / "policy") != weights(int16_run / "policy")


def test_they_are_in_engine_processes_and_after_a_resume(place: Any, int16_run: Path, weights: Any):
    recipe = place.recipe(
        "int16-processes",
        run_dir="int16-processes",
        schedule__steps=4,
        model__products="int16",
        model__dtype="float32",
        **APART,
    )
    assert place.inside("train", recipe) == 0
    assert weights(place.folder / "int16-processes" / "policy") == weights(int16_run / "policy")
    again = place.folder / "int16-again"
    shutil.copytree(int16_run, again)
    shutil.rmtree(again / "checkpoints" / "step-000004")
    shutil.rmtree(again / "policy")
    assert place.inside("train", "--resume", "int16-again") == 0
    assert weights(again / "policy") == weights(int16_run / "policy")
