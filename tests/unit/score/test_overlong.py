"""The soft penalty on length, against numbers worked out by hand."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.config import RewardConfig
from lagzero.errors import ConfigError
from lagzero.score.load import check_reward, load_reward
from lagzero.score.overlong import Overlong
from lagzero.score.reward import RewardScorer, WeightedReward
from lagzero.types import Finish, Group, Prompt, Rollout, given_tokens, sampled_tokens


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0), (12, 0), (16, 0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1), (21, -1), (999, -1)],
)
def test_the_penalty_is_linear_over_the_buffer(num_tokens: int, penalty: float) -> None:
    """limit 20, buffer 4: free up to 16, then a quarter a token."""
    assert Overlong(limit=20, buffer=4).penalty(num_tokens) == penalty


def test_the_papers_setting() -> None:
    """DAPO: 16,384 tokens without penalty, 4,096 more in which it grows."""
    reward = Overlong(limit=20480, buffer=4096)
    assert [reward.penalty(n) for n in (16384, 18432, 20480)] == [0, -0.5, -1]


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 1500))
def test_the_penalty_never_rises_with_length_and_stays_in_its_range(a: int, b: int, n: int) -> None:
    reward = Overlong(limit=max(a, b), buffer=min(a, b))
    assert -1 <= reward.penalty(n + 1) <= reward.penalty(n) <= 0


def test_tokens_that_the_policy_did_not_sample_do_not_count() -> None:
    """Two sampled tokens around ten of a tool: 2, not 12."""
    import numpy as np

    own = sampled_tokens([7], [-1.0], [0])
    tokens = np.concatenate([own, given_tokens(range(10)), own])
    rollouts = (Rollout(0, tokens, "", Finish.STOP),)
    group = Group(0, Prompt("p", (1,), "text"), rollouts)
    scorer = RewardScorer([WeightedReward("overlong", Overlong(limit=4, buffer=4), 2.0)])
    (score,) = asyncio.run(scorer.score(group)).scores
    assert score.value == -1.0  # 2 of 4, with weight 2
    assert dict(score.parts) == {"overlong": -0.5}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"limit": 0, "buffer": 1}, "r.options.limit: found 0; valid: a whole number"),
        ({"limit": 8, "buffer": 9}, "r.options.buffer: found 9; valid: a whole number of tokens"),
        ({"limit": 8, "buffer": 0}, "from 1 to limit (8)"),
        ({"limit": 8.5, "buffer": 1}, "r.options.limit: found 8.5"),
        ({"limit": True, "buffer": 1}, "r.options.limit: found True"),
        ({"limit": 8}, "r.options.buffer: missing"),
        ({"limit": 8, "bufer": 2}, "did you mean 'buffer'?"),
    ],
)
def test_options_are_checked_at_load(options: dict, problem: str) -> None:
    found = check_reward("r", RewardConfig(use="overlong", options=options))
    assert problem in "\n".join(found)
    with pytest.raises(ConfigError):
        load_reward(RewardConfig(use="overlong", options=options))
