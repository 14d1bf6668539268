"""KL estimators: values, signs, and what their gradients do in expectation."""

import math

import pytest
import torch

from lagzero.losses.kl import kl_per_token


def one(logprob: float, reference: float, estimator) -> tuple[float, float]:
    """(value, d value / d logprob)."""
    x = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    value = kl_per_token(x, torch.tensor([reference], dtype=torch.float64), estimator)
    value.sum().backward()
    return value.item(), x.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065, 0.3935)],
)
def test_values_and_signs_above_the_reference(estimator, value, gradient) -> None:
    """LN11: logp -1.0, reference -1.5; a descent step lowers logp."""
    assert one(-1.0, -1.5, estimator) == pytest.approx((value, gradient), abs=5e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_sign_turns_below_the_reference(estimator) -> None:
    """LN11: below the reference the penalty is still positive and descent raises logp."""
    value, gradient = one(-1.5, -1.0, estimator)
    assert value > 0 and gradient < 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_untouched_policy_costs_nothing(estimator) -> None:
    value, gradient = one(-1.3, -1.3, estimator)
    assert value == 0.0
    assert gradient == (1.0 if estimator == "k1" else 0.0)


def expected_gradient(estimator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact expectation over 4 symbols: (estimator's, of KL(p||q), of KL(q||p)) by logits."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logp = torch.log_softmax(logits, -1)
    weights = logp.detach().exp()  # a sample's probability carries no gradient
    sampled = (weights * kl_per_token(logp, q.log(), estimator)).sum()
    reverse = (logp.exp() * (logp - q.log())).sum()
    forward = (q * (q.log() - logp)).sum()
    grads = [
        torch.autograd.grad(f, logits, retain_graph=True)[0] for f in (sampled, reverse, forward)
    ]
    return grads[0], grads[1], grads[2]


def test_what_each_estimator_pulls_towards_in_expectation() -> None:
    """The docstring's table, exactly: k1 nothing, k2 KL(p||q), k3 KL(q||p)."""
    for estimator, which in (("k2", 1), ("k3", 2)):
        grads = expected_gradient(estimator)
        torch.testing.assert_close(grads[0], grads[which], rtol=0, atol=1e-12)
        assert grads[0].abs().max() > 0.05
    torch.testing.assert_close(
        expected_gradient("k1")[0], torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [700.0, -700.0, 1e10])
def test_k3_stays_finite_for_any_gap(dtype, gap) -> None:
    """LP11: a difference of 1e10 gives a finite value, never negative, and a finite gradient."""
    x = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    value = kl_per_token(x, torch.tensor([-1.0 + gap], dtype=dtype), "k3")
    value.sum().backward()
    assert torch.isfinite(value).all() and (value >= 0).all()
    assert x.grad.item() == (0.0 if gap > 0 else 1.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradcheck(estimator) -> None:
    torch.manual_seed(0)
    x = (-torch.rand(8, dtype=torch.float64) * 3).requires_grad_()
    reference = -torch.rand(8, dtype=torch.float64) * 3
    assert torch.autograd.gradcheck(lambda v: kl_per_token(v, reference, estimator), (x,))


def test_no_gradient_reaches_the_reference() -> None:
    x = torch.tensor([-1.0], requires_grad=True)
    reference = torch.tensor([-1.5], requires_grad=True)
    kl_per_token(x, reference, "k3").sum().backward()
    assert reference.grad is None
    assert math.isfinite(x.grad.item())


def test_shapes_that_would_broadcast_are_refused() -> None:
    """LN7"""
    with pytest.raises(ValueError, match="references"):
        kl_per_token(torch.zeros(3), torch.zeros(3, 1), "k1")
