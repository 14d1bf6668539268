"""Importance corrections, by hand, and that nothing masked or extreme reaches the gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.config import CorrectionConfig, LossConfig
from lagzero.losses.correction import correction_weights, corrects, log_weights
from lagzero.losses.objective import make_loss, step_metrics

LEVELS = ["token", "sequence_product", "sequence_mean"]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


W = tensor(0.25, 0.5, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"kind": "truncate", "high": 2.0}, [0.25, 0.5, 1, 2, 2]),
        ({"kind": "mask", "low": 0.5, "high": 2.0}, [0, 0.5, 1, 2, 0]),
        ({"kind": "mask", "low": 0.5, "high": 2.0, "weigh": False}, [0, 1, 1, 1, 0]),
        ({"kind": "mask", "high": 1.0}, [0.25, 0.5, 1, 0, 0]),
        ({"max_token_lag": 2}, [1, 1, 1, 0, 0]),
        ({"kind": "truncate", "max_token_lag": 3}, [0.25, 0.5, 1, 2, 0]),
        ({"kind": "mask", "low": 0.5, "max_token_lag": 1}, [0, 0.5, 0, 0, 0]),
    ],
)
def test_weights_by_hand(options, weights) -> None:
    """Ratios 1/4, 1/2, 1, 2, 3 at lags 0 to 4; the bounds themselves are inside."""
    got = correction_weights(W.log(), torch.arange(5), CorrectionConfig(**options))
    assert got.weights.tolist() == pytest.approx(weights, abs=1e-12)
    assert (got.weights == 0).tolist() == got.masked.tolist()


def test_what_was_cut_and_what_was_masked_is_told_apart() -> None:
    config = CorrectionConfig(kind="truncate", high=1.5, max_token_lag=3)
    got = correction_weights(W.log(), torch.arange(5), config)
    assert got.truncated.tolist() == [False, False, False, True, False]
    assert got.masked.tolist() == [False, False, False, False, True]
    metrics = step_metrics([got.metrics()])
    assert metrics["correction/truncated_share"] == pytest.approx(0.2)
    assert metrics["correction/masked_share"] == pytest.approx(0.2)
    # weights .25, .5, 1, 1.5, 0: sum 3.25, of squares 3.5625
    assert metrics["correction/weight_mean"] == pytest.approx(0.65)
    assert metrics["correction/weight_max"] == pytest.approx(1.5)
    assert metrics["correction/ess_share"] == pytest.approx(3.25**2 / (5 * 3.5625))


def test_nothing_is_reported_of_weights_that_are_all_zero() -> None:
    config = CorrectionConfig(max_token_lag=0)
    metrics = step_metrics([correction_weights(W.log(), torch.ones(5), config).metrics()])
    assert metrics["correction/weight_mean"] == 0 and metrics["correction/masked_share"] == 1
    assert "correction/ess_share" not in metrics


@pytest.mark.parametrize(
    ("level", "weights"),
    [
        ("token", [math.exp(0.1), math.exp(0.2), math.exp(-0.4)]),
        ("sequence_product", [math.exp(0.3), math.exp(0.3), math.exp(-0.4)]),
        ("sequence_mean", [math.exp(0.15), math.exp(0.15), math.exp(-0.4)]),
    ],
)
def test_the_level_of_the_weight(facts, level, weights) -> None:
    """LP10, of proximal against behaviour."""
    inputs = facts([-1.0, -1.0, -1.0], [1.0] * 3, [0, 0, 1])
    config = CorrectionConfig(kind="truncate", level=level, high=5.0)
    logs = log_weights(tensor(-0.9, -0.8, -1.4), inputs, config, "recomputed")
    got = correction_weights(logs, inputs.lags, config).weights
    assert got.tolist() == pytest.approx(weights, abs=1e-12)


def test_what_asks_for_a_correction() -> None:
    assert not corrects(CorrectionConfig())
    assert corrects(CorrectionConfig(kind="mask"))
    assert corrects(CorrectionConfig(max_token_lag=0))


def objective(options, logprobs, inputs, **loss):
    """(per-token losses, gradient of their sum) of a correction on REINFORCE unless told."""
    loss = {"policy": "reinforce", **loss}
    config = LossConfig(correction=CorrectionConfig(**options), **loss)
    logprobs = logprobs.clone().requires_grad_()
    value, metrics = make_loss(config)(logprobs, None, inputs)
    value.sum().backward()
    return value.detach(), logprobs.grad, metrics


def test_a_corrected_gradient_is_minus_weight_times_advantage(facts) -> None:
    """No gradient comes through the weight: d/dl of -w A l is -w A."""
    inputs = facts([-1.5, -1.0], [2.0, -1.0])
    value, gradient, _ = objective({"kind": "truncate", "high": 1.25}, tensor(-1.0, -1.2), inputs)
    w = [1.25, math.exp(-0.2)]  # exp(.5) = 1.65 is cut
    assert value.tolist() == pytest.approx([w[0] * 2.0, w[1] * -1.2], abs=1e-12)
    assert gradient.tolist() == pytest.approx([-w[0] * 2.0, w[1] * 1.0], abs=1e-12)


def test_the_kl_and_entropy_terms_are_not_weighted(facts) -> None:
    """Both tokens are masked, and still feel the reference and the bonus."""
    config = LossConfig(
        policy="reinforce",
        correction=CorrectionConfig(max_token_lag=0),
        kl={"coefficient": 0.5, "estimator": "k2"},
        entropy_coefficient=0.25,
    )
    inputs = facts([-1.0, -1.0], [1.0, 1.0], lags=[1, 1], reference=[-2.0, -1.0])
    entropies = tensor(0.8, 0.4)
    value, _ = make_loss(config)(tensor(-1.0, -1.0), entropies, inputs)
    assert value.tolist() == pytest.approx([0.5 * 0.5 - 0.2, -0.1], abs=1e-12)


def test_an_interpolated_anchor_is_the_weights_too(facts) -> None:
    """Lag 2: a is midway, so the ratio's anchor and the weight share the log-ratio evenly."""
    inputs = facts([-2.0], [1.0], lags=[2])
    options = {"kind": "truncate", "high": 10.0}
    value, gradient, metrics = objective(
        options, tensor(-1.0), inputs, policy="clip", proximal="interpolated", clip_high=1.0
    )
    assert metrics["policy/ratio_mean"][0].item() == pytest.approx(math.exp(0.5))
    assert metrics["correction/weight_mean"][0].item() == pytest.approx(math.exp(0.5))
    assert value.item() == gradient.item() == pytest.approx(-math.e)
    # REINFORCE has no anchor to share with: its weight is the whole ratio
    _, gradient, _ = objective(options, tensor(-1.0), inputs, proximal="interpolated")
    assert gradient.item() == pytest.approx(-math.e)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-700, 700), min_size=1, max_size=6),
    st.sampled_from(LEVELS),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from(["clip", "cispo", "band", "reinforce"]),
    st.sampled_from(["recomputed", "interpolated"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1.0, -1.0]),
)
def test_any_log_ratio_gives_a_finite_loss_and_gradient(
    facts, gaps, level, kind, policy, proximal, dtype, advantage
) -> None:
    """LP11, and zero gradient exactly where masked."""
    n = len(gaps)
    inputs = facts(
        [-1.0] * n, [advantage] * n, [i // 2 for i in range(n)], lags=list(range(n)), dtype=dtype
    )
    logprobs = torch.tensor(gaps, dtype=dtype) - 1.0
    options = {"kind": kind, "level": level, "low": 0.5, "max_token_lag": 3}
    value, gradient, metrics = objective(
        options, logprobs, inputs, policy=policy, proximal=proximal, ratio=level
    )
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
    masked = metrics["correction/masked_share"][0].bool()
    assert (value[masked] == 0).all()
    if level == "token" or policy in ("cispo", "reinforce"):
        assert (gradient[masked] == 0).all()
    assert all(torch.isfinite(v).all() for v, _ in metrics.values())


@settings(max_examples=40, deadline=None)
@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.1, 4.0))
def test_a_truncated_weight_grows_with_the_ratio_and_never_above_its_bound(a, b, high) -> None:
    config = CorrectionConfig(kind="truncate", high=high)
    low, top = correction_weights(tensor(*sorted((a, b))), torch.zeros(2), config).weights
    assert 0 < low <= top <= high


def test_a_mask_that_is_no_number_is_a_mask() -> None:
    """A log-prob that is NaN is outside every band."""
    config = CorrectionConfig(kind="mask", high=2.0)
    got = correction_weights(tensor(float("nan"), 0.0), torch.zeros(2), config)
    assert got.weights.tolist() == [0.0, 1.0]
    assert got.apply(tensor(float("nan"), 3.0)).tolist() == [0.0, 3.0]
