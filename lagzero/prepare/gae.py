"""Generalised advantages: each token against what a critic expected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lagzero.types import Array, Sample


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """Return the advantages and returns [N] float64 of one sequence of N trained tokens.

    With r_t the reward for token t and V_t the value of what stood before it::

        delta_t = r_t + gamma V_(t+1) - V_t        V after the last token is 0
        A_t     = delta_t + gamma lam A_(t+1)      A after the last token is 0
        G_t     = A_t + V_t

    Tokens that no policy sampled (tool output) are no actions: they are not among the N, so that
    the token before them is followed by the token after them. A sequence that a limit cut off ends
    like any other one, with nothing to come.

    lam 0 gives one-step differences, lam 1 the discounted rewards to come less V_t.

    Args:
        rewards: [N], the sequence's reward in the last place, less any penalty for each token.
        values: [N], before the step.
        gamma: discount from one trained token to the next, in (0, 1].
        lam: in [0, 1].

    Raises ValueError when the two differ in length or hold a number that is not finite.
    Source: Schulman et al. 2016, arXiv:1506.02438.
    """
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards and values of a sequence are [N], not {rewards.shape} and {values.shape}"
        )
    if not (np.isfinite(rewards).all() and np.isfinite(values).all()):
        raise ValueError("a reward or value of a trained token is not finite")
    values = values.astype(np.float64)
    deltas = (rewards + gamma * np.append(values[1:], 0.0) - values).tolist()
    advantages = np.empty(len(values))
    later = 0.0
    for t in range(len(values) - 1, -1, -1):
        later = deltas[t] + gamma * lam * later
        advantages[t] = later
    return advantages, advantages + values


def with_critic(
    sample: Sample, values: Array, penalties: Array, gamma: float, lam: float
) -> Sample:
    """Return the sample with the advantages, values and returns that a critic gives it.

    The sample's reward comes at its last trained token.

    Args:
        sample: at least one token is trained.
        values: [T], read at trained tokens.
        penalties: [T], subtracted from the reward of each token.
        gamma: see ``gae``. lam: likewise.
    """
    trained = sample.tokens["trained"]
    rewards = -penalties[trained]
    rewards[-1] += sample.reward
    found = gae(rewards, values[trained], gamma, lam)
    advantages = np.zeros(len(trained))
    old_values, returns = (np.full(len(trained), np.nan) for _ in range(2))
    advantages[trained], returns[trained] = found
    old_values[trained] = values[trained]
    return replace(sample, advantages=advantages, values=old_values, returns=returns)
