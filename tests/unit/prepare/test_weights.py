"""The denominator of a step, by hand."""

import numpy as np
import pytest

from lagzero.prepare.weights import token_weights


def step_loss(lengths: list[int], per_token: list[float], reduction, constant=None) -> float:
    """Sum of weight * loss when every token of sequence i has loss per_token[i]."""
    weights = token_weights(np.array(lengths), reduction, constant)
    return float(sum(w * n * x for w, n, x in zip(weights, lengths, per_token, strict=True)))


def test_token_mean_divides_by_the_tokens_of_the_whole_step() -> None:
    """LN1: 1 token of loss 4 and 4 tokens of loss 1 give 8/5."""
    assert step_loss([1, 4], [4.0, 1.0], "token_mean") == pytest.approx(1.6, abs=1e-15)


def test_sequence_mean_gives_each_sequence_the_same_say() -> None:
    assert step_loss([1, 4], [4.0, 1.0], "sequence_mean") == pytest.approx(2.5, abs=1e-15)


@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [1, 2, 5, 10]])
def test_constant_divides_by_sequences_times_the_constant(lengths: list[int]) -> None:
    """LN2: 4 sequences of summed loss 5 with constant 10 give 0.5 whatever their lengths."""
    got = step_loss(lengths, [5.0 / n for n in lengths], "constant", 10.0)
    assert got == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize("num_padding", [0, 1, 3])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_sequences_without_trained_tokens_do_not_count(num_padding: int, reduction) -> None:
    """LN9: 3 sequences of 4 tokens have denominator 12, and loss 1, with any number of others."""
    weights = token_weights(np.array([4, 4, 4] + [0] * num_padding), reduction, 4.0)
    np.testing.assert_allclose(weights, [1 / 12] * 3 + [0.0] * num_padding, atol=1e-16)


def test_nothing_trained_is_all_zero_and_not_nan() -> None:
    """RF6"""
    for reduction in ("token_mean", "sequence_mean"):
        assert token_weights(np.array([0, 0]), reduction).tolist() == [0.0, 0.0]
        assert token_weights(np.array([], np.int64), reduction).tolist() == []


def test_a_missing_constant_is_refused() -> None:
    with pytest.raises(ValueError, match="constant"):
        token_weights(np.array([1]), "constant")
    with pytest.raises(ValueError, match="fewer than 0"):
        token_weights(np.array([-1]), "token_mean")
