"""Which rollouts of a group are trained, and for each of the others why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from lagzero.config import AdvantageConfig
from lagzero.prepare.advantage import group_advantages, is_zero_spread, pair_advantages
from lagzero.types import Array, Finish, Outcome, ScoredGroup


class Fate(Enum):
    """What became of one rollout. Every rollout has exactly one fate, and each is counted."""

    TRAINED = "trained"
    UNSCORABLE = "unscorable"  # the reward gave no score
    INFRASTRUCTURE = "infrastructure"  # the machinery failed
    EMPTY = "empty"  # the policy sampled no token of it
    TRUNCATED = "truncated"  # a limit cut it off, and such rollouts count in the baseline alone
    SHORT_GROUP = "short_group"  # its group lost a member, and short groups are dropped
    LONE = "lone"  # nobody is left to compare it with, and zero spread is not kept
    ZERO_SPREAD = "zero_spread"  # its group's rewards are all equal, and such groups are not kept
    UNPAIRED = "unpaired"  # neither the best nor the worst of its group, where pairs are trained


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


def has_spread(scored: ScoredGroup) -> bool:
    """Say whether a group's rewards differ, or too few are usable to tell.

    Dynamic sampling plays another prompt for a group without spread. One with fewer than two usable
    members has lost the others to failures, so it is handed over, where those are counted.
    """
    rewards = usable_rewards(scored)
    return int((~np.isnan(rewards)).sum()) < 2 or not is_zero_spread(rewards)


def select(
    scored: ScoredGroup,
    rewards: Array,
    config: AdvantageConfig,
    group_size: int | None = None,
    pairs: bool = False,
) -> Selection:
    """Decide which members of one group are trained and with what advantage.

    Statistics are those of this group's usable members alone, however many are left.

    Args:
        scored: the group.
        rewards: [G], NaN for unusable members: ``usable_rewards``, less any penalty.
        config: estimator and the three policies. ``short_group`` acts on groups with fewer usable
            members than they should have. ``zero_spread`` acts on groups whose usable rewards
            are all equal and on lone members, and only under an estimator that compares members;
            those that ``resample`` has let through are dropped.
            Kept ones have advantage 0: they count in the denominators, and they still feel a KL
            or entropy term. ``truncated`` acts on the members that a limit cut off.
            Under ``gae`` all advantages are 0 here: they come from a critic.
        group_size: members that a full group has; None: as many as there are rollouts.
        pairs: train the best against the worst member that may be trained, whatever the
            estimator; a group without such a pair is dropped.
    """
    fates = _own_fates(scored, config)
    usable = ~np.isnan(rewards)
    may_train = np.array([fate is Fate.TRAINED for fate in fates], bool)
    compared = may_train if pairs else usable
    num_compared = int(compared.sum())
    compares = pairs or config.estimator in ("group_mean", "leave_one_out")
    short = int(usable.sum()) < max(group_size or 0, len(rewards))
    lone = compares and num_compared == 1
    zero_spread = compares and num_compared > 1 and is_zero_spread(rewards[compared])
    keeps = config.zero_spread == "keep" and not pairs
    advantages = np.zeros(len(rewards))
    left_out: Fate | None = None
    if short and config.short_group == "drop":
        left_out, may_train[:] = Fate.SHORT_GROUP, False
    elif lone and not keeps:
        left_out, may_train[:] = Fate.LONE, False
    elif zero_spread and not keeps:
        left_out, may_train[:] = Fate.ZERO_SPREAD, False
    elif pairs:
        advantages = pair_advantages(np.where(compared, rewards, np.nan))
        left_out, may_train = Fate.UNPAIRED, advantages != 0
    elif config.estimator != "gae":
        advantages = group_advantages(rewards, config.estimator, config.normalize_std)
    fates = tuple(
        left_out if left_out is not None and fate is Fate.TRAINED and not trains else fate
        for fate, trains in zip(fates, may_train, strict=True)
    )
    trained = np.array([fate is Fate.TRAINED for fate in fates], bool)
    return Selection(fates, rewards, np.where(trained, advantages, 0.0), short, lone, zero_spread)


def _own_fates(scored: ScoredGroup, config: AdvantageConfig) -> tuple[Fate, ...]:
    """Judge each rollout by itself, as far as the configuration goes."""
    cut = (Finish.LENGTH, Finish.CONTEXT) if config.truncated == "mask" else ()
    return tuple(
        Fate.TRUNCATED if fate is Fate.TRAINED and rollout.finish in cut else fate
        for fate, rollout in zip(first_fates(scored), scored.group.rollouts, strict=True)
    )
