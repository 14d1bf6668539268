"""lagzero against the cases that were worked out by hand."""

from __future__ import annotations

from typing import Any

import lagzero_side as side
import pytest
import torch

from lagzero.losses.value import value_loss
from lagzero.train.logprobs import chunked_logprobs

HAND = side.read("by_hand.json")


def of_kind(kind: str) -> Any:
    cases = [case for case in HAND["cases"] if case["kind"] == kind]
    assert cases
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


@of_kind("loss")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses(case: dict[str, Any], dtype: torch.dtype) -> None:
    """LN1, LN2, LN9, LN11, LN13, LN14, LP4, LP10, LP11"""
    got = side.solve(case["batch"], case["config"], dtype)
    for name in case["expected"].keys() & {"per_token", "loss", "gradient"}:
        wanted = case["expected"][name]
        assert getattr(got, name) == pytest.approx(wanted, abs=HAND["tolerance"]), name


@of_kind("value")
def test_a_critics_loss(case: dict[str, Any]) -> None:
    batch = case["batch"]
    values = side.column(batch, "value", torch.float64).requires_grad_()
    old, returns = (side.column(batch, n, torch.float64) for n in ("old_value", "return"))
    loss, _ = value_loss(values, old, returns, case["config"]["value_clip"])
    loss.mean().backward()
    assert loss.tolist() == pytest.approx(case["expected"]["per_token"], abs=1e-9)
    assert side.gradient_of(values) == pytest.approx(case["expected"]["gradient"], abs=1e-9)


@of_kind("logprob")
@pytest.mark.parametrize("chunk", [1, 8])
def test_log_probs_of_logits(case: dict[str, Any], chunk: int) -> None:
    """LP1, LN13"""
    logits = torch.tensor([case["logits"]] * 3, dtype=torch.float64)
    targets = torch.full((3,), case["token"])
    logprobs, entropies = chunked_logprobs(logits, lambda x: x, targets, case["temperature"], chunk)
    assert logprobs.tolist() == pytest.approx([case["expected"]["logprob"]] * 3, abs=5e-7)
    if "entropy" in case["expected"]:
        assert entropies.tolist() == pytest.approx([case["expected"]["entropy"]] * 3, abs=5e-7)
