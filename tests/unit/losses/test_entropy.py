"""Entropy of distributions, and its sign in the objective."""

import math

import pytest
import torch

from lagzero.losses.entropy import entropy


@pytest.mark.parametrize("num_padding", [0, 6])
def test_uniform_entropy_does_not_drift_with_padding(num_padding: int) -> None:
    """LN13: 1.3863 over the 2 valid tokens, whatever sits in the pad positions."""
    logits = torch.zeros(2 + num_padding, 4, dtype=torch.float64)
    logits[2:] = -1e30
    valid = torch.arange(2 + num_padding) < 2
    assert entropy(logits[valid]).mean().item() == pytest.approx(math.log(4), abs=1e-12)


def test_entropy_is_that_of_the_distribution_and_not_of_the_sample() -> None:
    """LN13"""
    p = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    assert entropy(p.log()).item() == pytest.approx(1.75 * math.log(2), abs=1e-12)


def test_truncated_and_certain_distributions_are_never_below_zero() -> None:
    """LN13: -inf logits add 0, to the gradient too."""
    inf = float("inf")
    logits = torch.tensor([[0.0, -inf, 0.0], [5.0, -inf, -inf]], requires_grad=True)
    got = entropy(logits)
    assert got.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)
    assert (got >= 0).all()
    got.sum().backward()
    assert torch.isfinite(logits.grad).all()
    sharp = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * 100
    assert (entropy(sharp) >= 0).all()


def test_half_precision_logits_are_raised_to_float32() -> None:
    assert entropy(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_gradcheck() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(entropy, (logits.requires_grad_(),))
