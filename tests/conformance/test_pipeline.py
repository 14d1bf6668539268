"""Through packing: one step cut into rows in every way, in any order, on one to three ranks."""

from __future__ import annotations

import itertools
from typing import Any

import lagzero_side as side
import pytest
import torch

POLICY, CORRECTION, KL, PAIRS = (
    side.read(name) for name in ("policy.json", "correction.json", "kl.json", "preference.json")
)
CHOSEN = [
    *((POLICY, case) for case in POLICY["cases"] if case["name"].endswith("-constant")),
    *((POLICY, case) for case in POLICY["cases"] if case["name"].endswith("-first_pass")),
    *((CORRECTION, case) for case in CORRECTION["cases"][::7] if case["batch"] != "far"),
    *((KL, case) for case in KL["cases"] if case["batch"] != "far"),
]
ORDERS = [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 3, 1), (3, 1, 0, 4, 2)]
CUTS = list(itertools.product((1, 9, 1000), (True, False)))
EXACT = {"rel": 1e-12, "abs": 1e-14}


def name_of(value: Any) -> str:
    return value.get("name", "")


def added_up(
    batch: dict[str, Any],
    config: dict[str, Any],
    cut: tuple[int, bool],
    order: Any,
    size: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The step's numbers as the sums over so many ranks, each with its rows and its own leaf."""
    rows = side.rows_of(batch, config, *cut, order)
    loss, per_token = 0.0, [0.0] * len(batch["trained"])
    gradient = torch.zeros(len(per_token), dtype=torch.float64)
    for rank in range(size):
        leaf = side.column(batch, "logprob", dtype).requires_grad_()
        part, by_place = side.packed(batch, config, rows[rank::size], leaf, len(order))
        loss += part.item()
        if part.requires_grad:  # a rank may have no row at all
            part.backward()
            gradient += torch.tensor(side.gradient_of(leaf), dtype=torch.float64)
        for place, value in by_place.items():
            per_token[place] = value
    return {"per_token": per_token, "loss": loss, "gradient": gradient.tolist()}


@pytest.mark.parametrize(("vectors", "case"), CHOSEN, ids=name_of)
def test_rows_add_up_to_the_vectors(vectors: dict[str, Any], case: dict[str, Any]) -> None:
    """LN1, LN2, LN9, LP13: each of the cuts, in an order and on a number of ranks of its own."""
    batch, config = vectors["batches"][case["batch"]], case["config"]
    turns = zip(CUTS, itertools.cycle(ORDERS), itertools.cycle((1, 2, 3)), strict=False)
    for cut, order, size in turns:
        got = added_up(batch, config, cut, order, size, torch.float64)
        for name, numbers in got.items():
            assert numbers == pytest.approx(case["expected"][name], **EXACT), name


@pytest.mark.parametrize(("vectors", "case"), CHOSEN[::2], ids=name_of)
def test_rows_add_up_in_float32(vectors: dict[str, Any], case: dict[str, Any]) -> None:
    batch, config = vectors["batches"][case["batch"]], case["config"]
    got = added_up(batch, config, (9, True), ORDERS[2], 2, torch.float32)
    for name, numbers in got.items():
        assert numbers == pytest.approx(case["expected"][name], rel=3e-5, abs=3e-6), name


def test_the_smallest_budget_gives_every_sequence_a_row_of_its_own() -> None:
    """Otherwise the cuts above would prove little."""
    batch = POLICY["batches"]["main"]
    assert len(side.rows_of(batch, {}, 1, False, ORDERS[0])) == 4
    assert len(side.rows_of(batch, {}, 1000, False, ORDERS[0])) == 1
    assert 1 < len(side.rows_of(batch, {}, 9, True, ORDERS[0])) < 4


@pytest.mark.parametrize("case", PAIRS["cases"], ids=name_of)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_pairs_stay_together(case: dict[str, Any], order: tuple[int, ...]) -> None:
    """One row, whatever the order of its sequences."""
    batch = PAIRS["batches"]["pairs"]
    rows = side.rows_of(batch, case["config"], 1000, True, order)
    leaf = side.column(batch, "logprob", torch.float64).requires_grad_()
    loss, _ = side.packed(batch, case["config"], rows, leaf, 4)
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["loss"], **EXACT)
    assert leaf.grad.tolist() == pytest.approx(case["expected"]["gradient"], **EXACT)
