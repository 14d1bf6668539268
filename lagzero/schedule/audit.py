"""What the staleness contract did: lags, and who was trained, given up or kept waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lagzero.schedule.staleness import Contract, lag_counts
from lagzero.types import ScoredGroup


class Audit:
    """Hears of every visit from its start to its end, and reports once a step."""

    def __init__(self, contract: Contract):
        self._contract = contract
        self._given_up: Counter[str] = Counter()
        self._num_restarts = 0

    def started(self, index: int, prompt_id: str) -> None:
        """A visit was started for the first time."""

    def accepted(self, scored: ScoredGroup, lag: int) -> None:
        """A group was handed over to training."""

    def restarted(self, index: int, scored: ScoredGroup | None, lag: int) -> None:
        """A group is played again: a finished one that was too old, or None, an interrupted one."""
        self._num_restarts += 1

    def given_up(self, index: int, reason: str, scored: ScoredGroup | None, age: int) -> None:
        """A visit ended untrained. ``age``: versions published since it was last started."""
        self._given_up[reason] += 1

    def step(
        self, groups: Sequence[ScoredGroup], version: int, waiting: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Return the step's metrics: ``groups`` are trained, ``waiting`` are finished and held."""
        lags = lag_counts(list(groups), version)
        total = sum(lags.values())
        out = {"staleness/num_given_up": float(sum(self._given_up.values()))}
        if total:
            out["lag/token_mean"] = sum(lag * n for lag, n in lags.items()) / total
            out["lag/max"] = float(max(lags))
        return out
