"""The critic's loss against numbers worked out by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.losses.reduce import reduce_metrics
from lagzero.losses.value import explained_variance, value_loss


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values = tensor(0.5, -1.0).requires_grad_()
    loss, metrics = value_loss(values, tensor(9.0, 9.0), tensor(1.0, 1.0))
    assert loss.tolist() == [0.125, 2.0]
    loss.sum().backward()
    assert values.grad.tolist() == [-0.5, -2.0]
    assert reduce_metrics([metrics]) == {
        "value/loss": 1.0625,
        "value/clipped_share": 0.0,
        "value/mean": -0.25,
        "value/return_mean": 1.0,
    }


def test_a_clip_stops_values_that_moved_too_far_towards_the_return() -> None:
    """Old value 0, clip 0.25. By hand, for the return G and the value V:

    G=1, V=0.5     near 0.25: 0.5 * max(0.25, 0.5625), stopped
    G=1, V=0.125   within the clip: 0.5 * 0.765625
    G=1, V=-0.5    the wrong way: near -0.25, 0.5 * max(2.25, 1.5625), pulled back
    G=0.25, V=2    beyond the return: near 0.25, 0.5 * max(3.0625, 0), pulled back
    """
    values = tensor(0.5, 0.125, -0.5, 2.0).requires_grad_()
    loss, metrics = value_loss(values, torch.zeros(4), tensor(1.0, 1.0, 1.0, 0.25), 0.25)
    assert loss.tolist() == [0.28125, 0.3828125, 1.125, 1.53125]
    loss.sum().backward()
    assert values.grad.tolist() == [0.0, -0.875, -1.5, 1.75]
    assert reduce_metrics([metrics])["value/clipped_share"] == 0.25


numbers = st.floats(-5, 5, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8), st.floats(0.01, 3))
def test_it_is_the_larger_of_both_errors(rows, clip) -> None:
    v, old, g = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    loss, _ = value_loss(v, old, g, clip)
    for got, (value, before, target) in zip(loss.tolist(), rows, strict=True):
        near = min(max(value, before - clip), before + clip)
        expected = 0.5 * max((value - target) ** 2, (near - target) ** 2)
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_values_before_any_update_are_never_clipped() -> None:
    values = torch.linspace(-2, 2, 9)
    plain, _ = value_loss(values, values, torch.ones(9))
    clipped, metrics = value_loss(values, values, torch.ones(9), 1e-3)
    assert torch.equal(plain, clipped)
    assert reduce_metrics([metrics])["value/clipped_share"] == 0


def test_explained_variance_by_hand() -> None:
    returns = tensor(0.0, 1.0, 2.0, 3.0)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 7, returns) == 1.0  # a constant offset is no variance
    assert explained_variance(torch.full((4,), 9.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)  # twice the deviation
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)


def test_equal_returns_have_no_variance_to_explain() -> None:
    assert explained_variance(tensor(0.0, 1.0), tensor(0.7, 0.7 + 1e-9)) is None
    assert explained_variance(tensor(1.0), tensor(2.0)) is None
    assert explained_variance(tensor(1.0, 2.0), tensor(0.0, 0.0)) is None


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are \[N\]"):
        value_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2))
    with pytest.raises(ValueError, match=r"are \[N\]"):
        value_loss(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 1))
