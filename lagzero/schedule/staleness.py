"""The staleness contract: how old what is trained may be, and what happens to what is older."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from lagzero.types import Array, Rollout, ScoredGroup

Action = Literal["wait", "drop", "recycle", "interrupt", "accept"]
Clock = Literal["oldest_token", "newest_token", "start"]


class Verdict(Enum):
    """What becomes of a group that a step could take."""

    TRAIN = "train"
    DROP = "drop"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Contract:
    """Lags are counted in policy versions: trainer version at hand-over minus a sample's version.

    A group's lag is the largest of its rollouts', and ``clock`` says which version a rollout has:
    that of its oldest or its newest trained token, or the one published when its group was started.

    ``action`` on a lag above ``bound``:
        wait: there is none; admission and strict hand-over keep every lag within the bound.
        accept: it is trained, and the loss's importance weights correct for it.
        drop: it is given up, and another prompt may start in its place.
        recycle: its prompt is played again with the present weights.
        interrupt: recycle, and groups that are still being played are not waited for.
    A group is played again at most ``max_restarts`` times, then dropped, so none goes on for ever.
    """

    action: Action = "wait"
    bound: int | None = None  # versions; None: no bound of its own
    clock: Clock = "oldest_token"
    max_restarts: int = 2

    def __post_init__(self) -> None:
        if (self.bound is not None and self.bound < 0) or self.max_restarts < 0:
            raise ValueError(
                f"bound={self.bound} (>= 0 or None), max_restarts={self.max_restarts} (>= 0)"
            )

    def lag(self, scored: ScoredGroup, started_at: int, version: int) -> int:
        """Return the group's lag when the trainer is at ``version``."""
        if self.clock == "start":
            return version - started_at
        oldest = self.clock == "oldest_token"
        seen = [_version(rollout, oldest, started_at) for rollout in scored.group.rollouts]
        return version - min(seen, default=started_at)

    def verdict(self, lag: int, restarts: int) -> Verdict:
        """Say what becomes of a finished group that was played again ``restarts`` times."""
        if self.bound is None or lag <= self.bound or self.action in ("wait", "accept"):
            return Verdict.TRAIN
        if self.action == "drop" or restarts >= self.max_restarts:
            return Verdict.DROP
        return Verdict.RESTART

    def is_overdue(self, started_at: int, version: int) -> bool:
        """Whether a group that is still being played is interrupted once ``version`` is out."""
        return (
            self.action == "interrupt"
            and self.bound is not None
            and version - started_at > self.bound
        )


def _version(rollout: Rollout, oldest: bool, otherwise: int) -> int:
    versions = trained_versions(rollout)
    if not len(versions):
        return otherwise
    return int(versions.min() if oldest else versions.max())


def trained_versions(rollout: Rollout) -> Array:
    """Return the policy versions of the tokens that the loss sees."""
    return rollout.tokens["version"][rollout.tokens["trained"]]


def provable_bound(
    max_lag: int, groups_per_step: int, window: int | None, extra_groups: int, sync_every: int
) -> int | None:
    """Return the largest lag that admission and hand-over allow by themselves; None without one.

    bound = max_lag + sync_every - 1 + ceil((window - 1 + extra_groups) / groups_per_step)
    """
    if window is None:
        return None
    return max_lag + sync_every - 1 + math.ceil((window - 1 + extra_groups) / groups_per_step)


def lag_counts(groups: list[ScoredGroup], version: int) -> dict[int, int]:
    """Count the trained tokens of each lag, versions, when the trainer is at ``version``."""
    parts = [trained_versions(r) for each in groups for r in each.group.rollouts]
    versions = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not len(versions):
        return {}
    oldest = int(versions.min())
    counts = np.bincount(versions - oldest)  # versions lie close together
    return {version - oldest - i: int(n) for i, n in enumerate(counts) if n}
