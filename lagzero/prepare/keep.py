"""Which rollouts of a group are trained, and for each of the others why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from lagzero.config import AdvantageConfig
from lagzero.prepare.advantage import group_advantages, is_zero_spread
from lagzero.types import Array, Outcome, ScoredGroup


class Fate(Enum):
    """What became of one rollout. Every rollout has exactly one fate, and each is counted."""

    TRAINED = "trained"
    UNSCORABLE = "unscorable"  # the reward gave no score
    INFRASTRUCTURE = "infrastructure"  # the machinery failed
    EMPTY = "empty"  # the policy sampled no token of it
    SHORT_GROUP = "short_group"  # its group lost a member, and short groups are dropped
    LONE = "lone"  # nobody is left to compare it with, and zero spread is dropped
    ZERO_SPREAD = "zero_spread"  # its group's rewards are all equal, and such groups are dropped


@dataclass(frozen=True, slots=True)
class Selection:
    """The verdict on one group of G rollouts, in their order."""

    fates: tuple[Fate, ...]  # [G]
    rewards: Array  # [G] float64, after any penalty; NaN where the rollout is not usable
    advantages: Array  # [G] float64; 0 where the rollout is not trained
    short: bool  # fewer usable members than the group should have
    lone: bool  # one usable member, under an estimator that compares members
    zero_spread: bool  # two or more usable members with equal rewards, likewise


def first_fates(scored: ScoredGroup) -> tuple[Fate, ...]:
    """Judge each rollout by itself: TRAINED here means usable.

    A rollout without a sampled token is left out whatever its score, because nothing that the
    policy did led to it (a prompt that filled the context, a request aborted in the queue).
    """
    fates: list[Fate] = []
    for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True):
        if score.outcome is Outcome.UNSCORABLE:
            fates.append(Fate.UNSCORABLE)
        elif score.outcome is Outcome.INFRASTRUCTURE:
            fates.append(Fate.INFRASTRUCTURE)
        elif not rollout.tokens["trained"].any():
            fates.append(Fate.EMPTY)
        else:
            fates.append(Fate.TRAINED)
    return tuple(fates)


def usable_rewards(scored: ScoredGroup) -> Array:
    """Return the rewards [G] as float64, NaN for every rollout that cannot be used."""
    return np.array(
        [
            score.value if fate is Fate.TRAINED else np.nan
            for fate, score in zip(first_fates(scored), scored.scores, strict=True)
        ],
        np.float64,
    )


def select(
    scored: ScoredGroup, rewards: Array, config: AdvantageConfig, group_size: int | None = None
) -> Selection:
    """Decide which members of one group are trained and with what advantage.

    Statistics are those of this group's usable members alone, however many are left.

    Args:
        scored: the group.
        rewards: [G], NaN for unusable members: ``usable_rewards``, less any penalty.
        config: estimator and the two policies. ``short_group`` acts on groups with fewer usable
            members than they should have. ``zero_spread`` acts on groups whose usable rewards
            are all equal and on lone members, and only under an estimator that compares members.
            Kept ones have advantage 0: they count in the denominators, and they still feel a KL
            or entropy term.
        group_size: members that a full group has; None: as many as there are rollouts.
    """
    fates = first_fates(scored)
    usable = ~np.isnan(rewards)
    num_usable = int(usable.sum())
    compares = config.estimator != "none"
    short = num_usable < max(group_size or 0, len(rewards))
    lone = compares and num_usable == 1
    zero_spread = compares and num_usable > 1 and is_zero_spread(rewards)
    dropped: Fate | None = None
    if short and config.short_group == "drop":
        dropped = Fate.SHORT_GROUP
    elif lone and config.zero_spread == "drop":
        dropped = Fate.LONE
    elif zero_spread and config.zero_spread == "drop":
        dropped = Fate.ZERO_SPREAD
    if dropped is not None:
        fates = tuple(dropped if fate is Fate.TRAINED else fate for fate in fates)
        advantages = np.zeros(len(rewards))
    else:
        advantages = group_advantages(rewards, config.estimator, config.normalize_std)
    return Selection(fates, rewards, advantages, short, lone, zero_spread)
