"""Anchors and levels of importance ratios, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.losses.ratio import anchor_logprobs, at_level, log_ratios, proximal_logprobs

LEVELS = ["token", "sequence_product", "sequence_mean"]
ANCHORS = ["behaviour", "recomputed", "interpolated"]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_sequence_ratios_are_product_and_geometric_mean(facts) -> None:
    """LP10: log-ratios [.1, .2] give 1.3499 (exact) and 1.1618 (length-normalised)."""
    inputs = facts([-1.0, -1.0], [1.0, 1.0], [0, 0])
    ratios = {level: log_ratios(tensor(-0.9, -0.8), inputs, level).exp() for level in LEVELS}
    assert ratios["sequence_product"].tolist() == pytest.approx([1.3499] * 2, abs=1e-4)
    assert ratios["sequence_mean"].tolist() == pytest.approx([1.1618] * 2, abs=1e-4)
    assert ratios["token"].tolist() == pytest.approx([math.exp(0.1), math.exp(0.2)], abs=1e-12)


def test_the_anchors_by_hand(facts) -> None:
    """l = -1, m = -2; lags 0, 1, 2, 4: interpolated a is l, m, midway, 3/4 of the way to l."""
    inputs = facts([-2.0] * 4, [1.0] * 4, lags=[0, 1, 2, 4], proximal=[-1.25] * 4)
    logprobs = tensor(-1.0, -1.0, -1.0, -1.0)
    anchors = {name: anchor_logprobs(logprobs, inputs, name).tolist() for name in ANCHORS}
    assert anchors["behaviour"] == [-2.0] * 4
    assert anchors["recomputed"] == [-1.25] * 4
    assert anchors["interpolated"] == [-1.0, -2.0, -1.5, -1.25]


def test_without_a_first_pass_the_policy_itself_is_the_proximal_one(facts) -> None:
    logprobs = tensor(-1.0, -3.0).requires_grad_()
    inputs = facts([-2.0, -2.0], [1.0, 1.0])
    assert proximal_logprobs(logprobs, inputs).tolist() == [-1.0, -3.0]
    assert log_ratios(logprobs, inputs, "token", "recomputed").tolist() == [0.0, 0.0]


def test_a_token_newer_than_the_trainer_counts_as_its_own(facts) -> None:
    inputs = facts([-2.0], [1.0], lags=[-3])
    assert inputs.lags.tolist() == [0]
    assert anchor_logprobs(tensor(-1.0), inputs, "interpolated").tolist() == [-1.0]


@pytest.mark.parametrize("anchor", ANCHORS)
def test_no_gradient_comes_through_the_anchor(facts, anchor) -> None:
    """d log r / d l is 1 for every anchor, though two of them are made of l."""
    logprobs = tensor(-1.0, -0.5, -3.0).requires_grad_()
    inputs = facts([-2.0, -1.0, -2.5], [1.0] * 3, lags=[0, 1, 3])
    log_ratios(logprobs, inputs, "token", anchor).sum().backward()
    assert logprobs.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_equal_policies_have_ratio_one_under_every_anchor(facts, level, anchor) -> None:
    """LP1: exactly 1, in float32."""
    values = [-0.3, -1.1, -4.6]
    inputs = facts(values, [1.0] * 3, [0, 0, 1], lags=[0, 1, 5], dtype=torch.float32)
    ratios = log_ratios(torch.tensor(values), inputs, level, anchor)
    assert ratios.tolist() == [0.0] * 3


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.sampled_from(LEVELS), st.sampled_from(ANCHORS))
def test_permuting_tokens_permutes_ratios(facts, order, level, anchor) -> None:
    behaviour = tensor(-0.1, -0.4, -2.0, -1.0, -0.7, -0.2)
    logprobs = tensor(-0.3, -0.1, -1.5, -1.2, -0.7, -0.6)
    sequences, lags = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 2, 1, 3, 0, 2])
    i = torch.tensor(order)

    def at(i: torch.Tensor) -> torch.Tensor:
        rows = [t[i].tolist() for t in (behaviour, sequences, lags)]
        inputs = facts(rows[0], [1.0] * 6, rows[1], lags=rows[2])
        return log_ratios(logprobs[i], inputs, level, anchor)

    torch.testing.assert_close(at(i), at(torch.arange(6))[i], rtol=0, atol=1e-12)


def test_a_sequence_that_is_not_in_these_inputs_makes_no_nan(facts) -> None:
    inputs = facts([-1.0, -1.0], [1.0, 1.0], [0, 2])  # sequence 1 is in another row
    assert at_level(tensor(0.5, 0.25), inputs, "sequence_mean").tolist() == [0.5, 0.25]
