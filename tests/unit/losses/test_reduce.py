"""Reductions of losses and metrics do not depend on the cut."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.losses.reduce import reduce, reduce_metrics
from lagzero.prepare.weights import token_weights


@pytest.mark.parametrize("cut", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_token_mean_and_gradient_are_the_same_for_any_cut(cut) -> None:
    """LN1: 1 token of loss 4, 4 of loss 1: 1.6 in one micro-batch, two, or on two ranks."""
    weights = token_weights(np.array([1, 4]), "token_mean")
    scale = torch.ones(2, dtype=torch.float64, requires_grad=True)
    losses = [torch.tensor([4.0], dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    total = 0.0
    for part in cut:
        loss = torch.cat([losses[i] * scale[i] for i in part])
        weight = torch.cat(
            [torch.full((len(losses[i]),), weights[i], dtype=torch.float64) for i in part]
        )
        reduced = reduce(loss, weight)
        reduced.backward()
        total += reduced.item()
    assert total == pytest.approx(1.6, abs=1e-12)
    assert scale.grad.tolist() == pytest.approx([0.8, 0.8], abs=1e-12)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_constant_reduction_ignores_the_number_of_micro_batches(num_parts: int) -> None:
    """LN2: 4 sequences of summed loss 5, constant 10: 0.5."""
    weights = torch.tensor(token_weights(np.array([1, 2, 5, 10]), "constant", 10.0))
    losses = [torch.full((n,), 5.0 / n, dtype=torch.float64) for n in (1, 2, 5, 10)]
    per_sequence = [reduce(x, w.expand(len(x))) for x, w in zip(losses, weights, strict=True)]
    parts = [per_sequence[i::num_parts] for i in range(num_parts)]
    total = sum(torch.stack(part).sum().item() for part in parts)
    assert total == pytest.approx(0.5, abs=1e-12)


def test_shapes_that_would_broadcast_are_refused() -> None:
    """LN7"""
    for weights in (torch.ones(1), torch.ones(3, 1), torch.ones(())):
        with pytest.raises(ValueError, match=r"\[N\]"):
            reduce(torch.ones(3), weights)


VALUES = [torch.tensor(v, dtype=torch.float32) for v in ([1.0, 2.0], [3.0], [], [-4.0, 5.0, 0.5])]
EXPECTED = {"mean": 1.25, "sum": 7.5, "max": 5.0, "min": -4.0}


@settings(max_examples=24, deadline=None)
@given(st.permutations(range(4)))
def test_metrics_reduce_over_tokens_and_not_over_micro_batches(order) -> None:
    """LN1, LN9: micro-batches of 2, 1, 0 and 3 tokens, in any order."""
    parts = [{r: (VALUES[i], r) for r in EXPECTED} for i in order]
    assert reduce_metrics(parts) == pytest.approx(EXPECTED, abs=1e-12)


def test_a_metric_over_nothing_is_left_out() -> None:
    """RF6: no NaN for an empty step."""
    assert reduce_metrics([]) == {}
    assert reduce_metrics([{"a": (torch.zeros(0), "mean"), "b": (torch.zeros(0), "max")}]) == {}


def test_a_metric_with_two_reductions_is_refused() -> None:
    for first, second in itertools.permutations(["mean", "max"], 2):
        with pytest.raises(ValueError, match="is both"):
            reduce_metrics([{"a": (torch.ones(1), first)}, {"a": (torch.ones(1), second)}])
