"""From a scored group and its selection to trainable samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lagzero.prepare.keep import Fate
from lagzero.types import Array, Sample, ScoredGroup


def make_samples(
    scored: ScoredGroup, fates: Sequence[Fate], rewards: Array, advantages: Array
) -> list[Sample]:
    """Return one sample for each rollout whose fate is TRAINED, in the group's order.

    ``fates``, ``rewards`` and ``advantages`` are [G]. A sample's per-token advantage is the
    rollout's on trained tokens and 0 on tokens that no policy sampled.
    """
    group = scored.group
    return [
        Sample(
            group_index=group.index,
            member=rollout.member,
            prompt_ids=group.prompt.token_ids,
            tokens=rollout.tokens,
            advantages=np.where(rollout.tokens["trained"], advantage, 0.0),
            reward=float(reward),
        )
        for rollout, fate, reward, advantage in zip(
            group.rollouts, fates, rewards, advantages, strict=True
        )
        if fate is Fate.TRAINED
    ]


def num_trained(samples: Sequence[Sample]) -> Array:
    """Return how many tokens of each sample the loss sees: [S] int64."""
    return np.array([int(s.tokens["trained"].sum()) for s in samples], np.int64)
