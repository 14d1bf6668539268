"""The critic's loss against the vectors."""

from __future__ import annotations

from typing import Any

import lagzero_side as side
import pytest
import torch

from lagzero.losses.reduce import reduce
from lagzero.losses.value import value_loss

VECTORS = side.read("value.json")


@pytest.mark.parametrize("case", VECTORS["cases"], ids=[case["name"] for case in VECTORS["cases"]])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_value_loss_and_gradient(case: dict[str, Any], dtype: torch.dtype, rel: float) -> None:
    """NaN in place of the values of tokens that are not trained."""
    batch, config, expected = VECTORS["batches"][case["batch"]], case["config"], case["expected"]
    keep = torch.tensor(batch["trained"])
    values = side.column(batch, "value", dtype).requires_grad_()
    old, returns = (side.column(batch, name, dtype)[keep] for name in ("old_value", "return"))
    per_token, _ = value_loss(values[keep], old, returns, config["value_clip"])
    weighing = {k: v for k, v in config.items() if k != "value_clip"}
    loss = reduce(per_token, side.weights_of(batch, weighing)[keep])
    loss.backward()
    on = keep.tolist()
    wanted = [x for x, flag in zip(expected["per_token"], on, strict=True) if flag]
    assert per_token.tolist() == pytest.approx(wanted, rel=rel, abs=rel)
    assert loss.item() == pytest.approx(expected["loss"], rel=rel)
    assert side.gradient_of(values) == pytest.approx(expected["gradient"], rel=rel, abs=rel)


def test_the_vectors_reach_both_sides_of_the_clip() -> None:
    by_name = {case["name"]: case["expected"] for case in VECTORS["cases"]}
    free, clipped = by_name["free-token_mean"], by_name["clipped-token_mean"]
    stopped = [c == 0 != f for c, f in zip(clipped["gradient"], free["gradient"], strict=True)]
    assert 0 < sum(stopped) < 5
