"""The committed files are what the script writes, and reach every branch."""

from __future__ import annotations

import ast
import json
import pathlib
import sys
from typing import Any

import make_vectors
import pytest
from naive import objective

HERE = pathlib.Path(__file__).parent
POLICY = json.loads((HERE / "policy.json").read_text(encoding="utf-8"))
CORRECTION = json.loads((HERE / "correction.json").read_text(encoding="utf-8"))


def test_what_writes_the_vectors_needs_the_standard_library_only() -> None:
    """Least of all lagzero, or one mistake could be on both sides."""
    scripts = ["make_vectors.py", "advantage_cases.py", "step_cases.py"]
    ours = {"naive", "advantage_cases", "step_cases"}
    for path in [*(HERE / name for name in scripts), *(HERE / "naive").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            roots = {module.partition(".")[0] for module in modules}
            assert roots <= ours | sys.stdlib_module_names, path


def same(one: Any, other: Any) -> bool:
    """Equal, numbers up to 1e-12: libm's exp may differ in its last place between platforms."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return isinstance(other, float) and one == pytest.approx(other, rel=1e-12, abs=1e-14)
    return bool(one == other)


@pytest.mark.parametrize("name", list(make_vectors.VECTORS))
def test_the_committed_vectors_are_what_the_script_writes(name: str) -> None:
    fresh = json.loads(make_vectors.text_of(make_vectors.VECTORS[name]()))
    assert same(fresh, json.loads((HERE / name).read_text(encoding="utf-8")))


def test_the_comparison_sees_a_number_that_changed() -> None:
    assert same({"a": [1.0, {"b": None}]}, {"a": [1.0, {"b": None}]})
    assert not same({"a": [1.0]}, {"a": [1.0 + 1e-9]})
    assert not same([1.0, 2.0], [1.0])


@pytest.mark.parametrize("name", [*make_vectors.VECTORS, "by_hand.json"])
def test_names_are_unique_within_a_file(name: str) -> None:
    names = [case["name"] for case in json.loads((HERE / name).read_text())["cases"]]
    assert len(names) == len(set(names)) > 0


def expected(vectors: dict[str, Any], name: str) -> dict[str, Any]:
    (case,) = (case for case in vectors["cases"] if case["name"] == name)
    return case["expected"]


def test_inputs_are_the_same_numbers_in_float32() -> None:
    """Multiples of 1/64 below 2^18; with more digits float32 would change branches by rounding."""
    for vectors in (POLICY, CORRECTION):
        for batch in vectors["batches"].values():
            for name in ("logprob", "behaviour", "proximal", "reference", "advantage", "entropy"):
                numbers = [x for x in batch[name] or [] if x is not None]
                assert all((x * 64).is_integer() and abs(x) < 2**18 for x in numbers)


def stopped(name: str) -> set[int]:
    """Tokens with an advantage whose own gradient is 0."""
    main = POLICY["batches"]["main"]
    gradient = expected(POLICY, f"{name}-behaviour-token_mean")["gradient"]
    pairs = zip(main["advantage"], gradient, strict=True)
    return {t for t, (a, g) in enumerate(pairs) if a and g == 0}


def test_the_vectors_reach_every_branch_of_the_objectives() -> None:
    """A set of vectors without clipped tokens, or with nothing else, would prove little."""
    assert 0 < len(stopped("clip")) < 10
    assert len(stopped("dual_clip") - stopped("clip")) == 1
    assert stopped("clip_higher") < stopped("clip")
    assert stopped("band") - stopped("clip")
    assert stopped("cispo") == set()
    assert 0 < len(stopped("gspo")) < 10
    factors = expected(POLICY, "cispo_low-behaviour-token_mean")["gradient"]
    assert factors != expected(POLICY, "cispo-behaviour-token_mean")["gradient"]


@pytest.mark.parametrize("level", ["token", "sequence_product", "sequence_mean"])
def test_the_vectors_reach_every_branch_of_the_corrections(level: str) -> None:
    batch = CORRECTION["batches"]["main"]
    kept = expected(CORRECTION, f"clip-recomputed-mask_{level}-main")["correction"]
    trained = [w for w, on in zip(kept, batch["trained"], strict=True) if on]
    assert 0 in trained
    assert any(w not in (0, 1) for w in trained)
    cut = expected(CORRECTION, f"clip-recomputed-truncate_{level}-main")["correction"]
    assert 1.5 in cut
    assert any(0 < w < 1.5 for w in cut)
    ones = expected(CORRECTION, f"clip-recomputed-band_of_ones_{level}-main")["correction"]
    assert set(ones) == {0.0, 1.0}


def test_anchors_differ_and_the_first_update_has_ratio_1() -> None:
    ratios = [
        expected(POLICY, f"clip-{anchor}-token_mean")["ratio"]
        for anchor in ("behaviour", "recomputed", "interpolated")
    ]
    assert ratios[0] != ratios[1] != ratios[2] != ratios[0]
    assert set(expected(POLICY, "clip-first_pass")["ratio"]) == {0.0, 1.0}


def test_no_ratio_or_weight_is_near_a_bound_where_a_value_would_jump() -> None:
    """By 1e-3 at least, which is far above what float32 does to them."""
    for vectors in (POLICY, CORRECTION):
        for case in vectors["cases"]:
            if case["batch"] == "far":
                continue
            batch, config = vectors["batches"][case["batch"]], objective.filled(case["config"])
            rule = config["correction"]
            bare = {**rule, "kind": "truncate", "high": float("inf"), "max_token_lag": None}
            anchors = objective.anchors(batch, config)
            found = objective.corrections(batch, {**config, "correction": bare}, anchors)
            clips = (1 - config["clip_low"], 1 + config["clip_high"], config["dual_clip"] or 0.0)
            near = [
                *((r, *clips) for r in case["expected"]["ratio"]),
                *((w, rule["low"], rule["high"]) for w in found),
            ]
            for number, *bounds in near:
                assert number == 0 or all(abs(number - b) > 1e-3 for b in bounds), case["name"]
