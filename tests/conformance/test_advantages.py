"""Advantages of groups, of tokens and of values against the vectors and what is done by hand."""

from __future__ import annotations

import math
from typing import Any

import lagzero_side as side
import numpy as np
import pytest

from lagzero.prepare.advantage import group_advantages, standardized
from lagzero.prepare.gae import gae
from lagzero.prepare.penalty import sequence_kl, token_kl

HAND = side.read("by_hand.json")
CASES = [
    *side.read("advantage.json")["cases"],
    *({**case, "tolerance": HAND["tolerance"]} for case in HAND["cases"]),
]


def of_kind(kind: str) -> Any:
    cases = [case for case in CASES if case["kind"] == kind]
    assert cases
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def within(case: dict[str, Any]) -> dict[str, float]:
    """Twelve digits, or as many as were written down by hand."""
    return {"rel": 1e-12, "abs": case.get("tolerance", 1e-14)}


def numbers(values: list[float | None]) -> np.ndarray:
    return np.array([math.nan if v is None else v for v in values])


@of_kind("group")
def test_groups(case: dict[str, Any]) -> None:
    """LN4, LN5, LN7, LN10: with unscorable members, without spread, with a residue of rounding."""
    got = group_advantages(numbers(case["rewards"]), **case["config"])
    assert got.tolist() == pytest.approx(case["expected"]["advantages"], **within(case))


@of_kind("kl_in_reward")
def test_a_penalty_in_the_reward(case: dict[str, Any]) -> None:
    behaviour, reference = numbers(case["behaviour"]), numbers(case["reference"])
    penalty = sequence_kl(behaviour, reference, case["config"]["estimator"])
    got = case["reward"] - case["config"]["coefficient"] * penalty
    assert got == pytest.approx(case["expected"]["reward"], **within(case))


@of_kind("kl_in_advantage")
def test_a_penalty_in_the_advantages(case: dict[str, Any]) -> None:
    behaviour, reference = numbers(case["behaviour"]), numbers(case["reference"])
    penalty = token_kl(behaviour, reference, case["config"]["estimator"])
    got = numbers(case["advantages"]) - case["config"]["coefficient"] * penalty
    assert got.tolist() == pytest.approx(case["expected"]["advantages"], **within(case))


@of_kind("normalize_batch")
def test_standardized_over_the_step(case: dict[str, Any]) -> None:
    got = standardized(numbers(case["advantages"]))
    assert got.tolist() == pytest.approx(case["expected"]["advantages"], **within(case))


@of_kind("gae")
def test_generalised_advantages(case: dict[str, Any]) -> None:
    """MT6: observation tokens neither discount nor swallow the reward."""
    trained = np.array(case["trained"])
    rewards = np.zeros(int(trained.sum()))
    rewards[-1] = case["reward"]
    got = gae(rewards, numbers(case["values"])[trained], **case["config"])
    for name, found in zip(("advantages", "returns"), got, strict=True):
        expected = np.array(case["expected"][name])
        assert found.tolist() == pytest.approx(expected[trained].tolist(), **within(case))
        assert not expected[~trained].any()
