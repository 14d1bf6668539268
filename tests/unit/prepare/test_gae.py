"""Generalised advantages against numbers worked out by hand and a slow twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.prepare.gae import gae, with_critic
from lagzero.types import Sample, given_tokens, sampled_tokens


def slow_twin(rewards, values, gamma, lam) -> list[float]:
    """The sum of discounted differences, written out."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def test_three_tokens_by_hand() -> None:
    """Values 0.5, 0.25, -0.5 and a reward of 1 at the end; gamma 0.5, lam 0.5.

    delta: 0 + 0.5 * 0.25 - 0.5 = -0.375;  0 + 0.5 * -0.5 - 0.25 = -0.5;  1 + 0.5 = 1.5
    A: -0.375 + 0.25 * (-0.125) = -0.40625;  -0.5 + 0.25 * 1.5 = -0.125;  1.5
    """
    got, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.25, -0.5]), 0.5, 0.5)
    assert got.tolist() == [-0.40625, -0.125, 1.5]
    assert returns.tolist() == [0.09375, 0.125, 1.0]


def test_lam_one_gives_rewards_to_come_and_lam_zero_one_step_differences() -> None:
    rewards, values = np.array([-0.25, 0.0, 1.0]), np.array([0.5, 0.25, -0.5])
    to_come, returns = gae(rewards, values, 1.0, 1.0)
    assert returns.tolist() == [0.75, 1.0, 1.0]
    assert to_come.tolist() == [0.25, 0.75, 1.5]
    one_step, _ = gae(rewards, values, 1.0, 0.0)
    assert one_step.tolist() == [-0.5, -0.75, 1.5]


def test_without_values_every_token_gets_the_discounted_reward() -> None:
    got, returns = gae(np.array([0.0, 0.0, 4.0]), np.zeros(3), 0.5, 1.0)
    assert got.tolist() == returns.tolist() == [1.0, 2.0, 4.0]


numbers = st.floats(-3, 3, width=32)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20),
    st.floats(0.1, 1),
    st.floats(0, 1),
)
def test_the_recursion_is_the_written_out_sum(rows, gamma, lam) -> None:
    rewards, values = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    got, returns = gae(rewards, values, gamma, lam)
    np.testing.assert_allclose(got, slow_twin(rewards, values, gamma, lam), atol=1e-10)
    np.testing.assert_array_equal(returns, got + values)


def sample(reward: float = 1.0) -> Sample:
    """Two sampled tokens, three of a tool, a sampled one, and one of the tool."""
    tokens = np.concatenate(
        [
            sampled_tokens([5, 6], [-0.5, -0.5], [0, 0]),
            given_tokens([7, 7, 7]),
            sampled_tokens([8], [-0.5], [0]),
            given_tokens([7]),
        ]
    )
    return Sample(0, 0, (1, 2), tokens, np.zeros(7), reward)


def test_tokens_of_the_environment_are_skipped_as_if_they_were_not_there() -> None:
    """Their values are not read, and gamma counts trained tokens, not places."""
    values = np.array([0.5, 0.25, np.nan, np.nan, np.nan, -0.5, np.nan])
    got = with_critic(sample(), values, np.zeros(7), 0.5, 0.5)
    assert got.advantages.tolist() == [-0.40625, -0.125, 0, 0, 0, 1.5, 0]
    trained = got.tokens["trained"]
    assert got.returns[trained].tolist() == [0.09375, 0.125, 1.0]
    assert got.values[trained].tolist() == [0.5, 0.25, -0.5]
    assert np.isnan(got.returns[~trained]).all() and np.isnan(got.values[~trained]).all()


def test_the_reward_comes_last_and_each_token_pays_its_own_penalty() -> None:
    penalties = np.array([0.25, 0.5, 99.0, 99.0, 99.0, 0.125, 99.0])
    got = with_critic(sample(2.0), np.zeros(7), penalties, 1.0, 0.0)
    assert got.advantages[got.tokens["trained"]].tolist() == [-0.25, -0.5, 1.875]


def test_broken_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are \[N\]"):
        gae(np.zeros(2), np.zeros(3), 1.0, 1.0)
    with pytest.raises(ValueError, match="not finite"):
        gae(np.zeros(2), np.array([0.0, np.nan]), 1.0, 1.0)
    with pytest.raises(ValueError, match="not finite"):
        with_critic(sample(), np.full(7, np.nan), np.zeros(7), 1.0, 1.0)
