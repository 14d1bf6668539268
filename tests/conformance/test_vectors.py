"""lagzero against the vectors, number by number, in float64 and in float32."""

from __future__ import annotations

import math
from typing import Any

import lagzero_side as side
import pytest
import torch
from naive.objective import filled

FILES = ("policy.json", "correction.json", "kl.json", "preference.json")
VECTORS = {name: side.read(name) for name in FILES}
PAIRS = [(name, case) for name in FILES for case in VECTORS[name]["cases"]]
FAR = [pair for pair in PAIRS if pair[1]["batch"] == "far"]
NEAR = [pair for pair in PAIRS if pair[1]["batch"] != "far"]
EXACT = {"rel": 1e-12, "abs": 1e-14}


def name_of(value: Any) -> str:
    return value["name"] if isinstance(value, dict) else value.partition(".")[0]


@pytest.mark.parametrize(("file", "case"), PAIRS, ids=name_of)
def test_per_token_loss_step_loss_and_gradient(file: str, case: dict[str, Any]) -> None:
    """LN1, LN2, LN11, LN14, LP10, LP11: float64; tokens that are not trained hold NaN."""
    batch = VECTORS[file]["batches"][case["batch"]]
    got = side.solve(batch, case["config"], torch.float64)
    expected = case["expected"]
    assert got.per_token == pytest.approx(expected["per_token"], **EXACT)
    assert got.loss == pytest.approx(expected["loss"], **EXACT)
    assert got.gradient == pytest.approx(expected["gradient"], **EXACT)
    slope = filled(case["config"])["entropy_coefficient"]
    by_entropy = [-slope * w for w in expected["weight"]] if slope else []
    assert got.entropy_gradient == pytest.approx(by_entropy, rel=1e-12)


# Log-ratios of up to 7 nats, computed from numbers of up to 6 with 24 bits, carry an absolute error
# of 1e-6, which is the relative error of their exponentials.
SINGLE = {"rel": 3e-5, "abs": 3e-6}


@pytest.mark.parametrize(("file", "case"), NEAR, ids=name_of)
def test_float32_agrees_within_its_own_rounding(file: str, case: dict[str, Any]) -> None:
    batch = VECTORS[file]["batches"][case["batch"]]
    got = side.solve(batch, case["config"], torch.float32)
    expected = case["expected"]
    assert got.per_token == pytest.approx(expected["per_token"], **SINGLE)
    assert got.gradient == pytest.approx(expected["gradient"], **SINGLE)


@pytest.mark.parametrize(("file", "case"), FAR, ids=name_of)
def test_float32_stays_finite_hundreds_of_nats_out(file: str, case: dict[str, Any]) -> None:
    batch = VECTORS[file]["batches"][case["batch"]]
    got = side.solve(batch, case["config"], torch.float32)
    for numbers, name in ((got.per_token, "per_token"), (got.gradient, "gradient")):
        assert all(math.isfinite(x) for x in numbers)
        assert numbers == pytest.approx(case["expected"][name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("hole", [math.inf, -math.inf, 1e10, 0.0])
def test_nothing_that_stands_beside_trained_tokens_is_read(hole: float) -> None:
    """LP11: every second case of the policy's, with other numbers in place of NaN."""
    for case in VECTORS["policy.json"]["cases"][::2]:
        batch = VECTORS["policy.json"]["batches"][case["batch"]]
        got = side.solve(batch, case["config"], torch.float64, hole)
        assert got.gradient == pytest.approx(case["expected"]["gradient"], **EXACT)


def test_the_defaults_are_those_of_the_configuration() -> None:
    stated, ours = VECTORS["policy.json"]["defaults"], side.LossConfig().model_dump()
    assert stated == {k: v if k != "kl" else stated["kl"] for k, v in ours.items()}
    assert stated["kl"].items() <= ours["kl"].items()
