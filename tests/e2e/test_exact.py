"""A run with exact numerics: the untouched policy is the engine's, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from lagzero.observe.metrics import read_metrics


@pytest.mark.parametrize(("dtype", "numerics"), [("float32", "auto"), ("bfloat16", "exact")])
def test_the_mismatch_is_0_and_every_ratio_1_in_each_step(place: Any, dtype: str, numerics: str):
    folder = f"exact-{dtype}"
    recipe = place.recipe(
        folder,
        run_dir=folder,
        model__numerics=numerics,
        model__dtype=dtype,
        schedule__steps=3,
        train__micro_batch_tokens=90,
    )
    assert place.inside("train", recipe) == 0
    steps = read_metrics(place.folder / folder / "metrics.jsonl")
    assert len(steps) == 3
    for step in steps:
        assert step["mismatch/kl_k1"] == step["mismatch/kl_k3"] == step["mismatch/gap_max"] == 0.0
        assert step["policy/ratio_mean"] == step["policy/ratio_max"] == 1.0
        assert step["policy/ratio_min"] == 1.0


def test_an_engine_in_a_process_of_its_own_is_exact_too(place: Any):
    recipe = place.recipe(
        "exact-apart",
        run_dir="exact-apart",
        model__numerics="exact",
        schedule__steps=2,
        placement={"kind": "disaggregated"},
    )
    assert place.inside("train", recipe) == 0
    steps = read_metrics(place.folder / "exact-apart" / "metrics.jsonl")
    assert [step["mismatch/gap_max"] for step in steps] == [0.0, 0.0]


def test_an_engine_of_another_type_is_refused(place: Any):
    recipe = place.recipe("exact-types", model__numerics="exact", engine__dtype="bfloat16")
    done = place.lagzero("train", recipe)
    assert done.returncode != 0
    assert "engine.dtype: bfloat16 gives the engine other weights" in done.stdout + done.stderr
