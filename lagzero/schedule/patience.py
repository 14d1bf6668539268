"""When a run that learns nothing ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lagzero.errors import LagzeroError
from lagzero.types import ScoredGroup


class Patience:
    """Counts steps in a row that had nothing to learn from, and gives up at ``max_empty_steps``."""

    def __init__(self, max_empty_steps: int):
        self.max_empty_steps = max_empty_steps
        self.num_empty = 0

    def saw(
        self, learnt: bool, groups: Sequence[ScoredGroup], metrics: Mapping[str, float]
    ) -> None:
        """Take note of a finished step. Raises LagzeroError, with what was seen, at the limit."""
        self.num_empty = 0 if learnt else self.num_empty + 1
        if self.num_empty < self.max_empty_steps:
            return
        counts = [
            f"{name}={value:g}"
            for name, value in sorted(metrics.items())
            if name.startswith("reward/") or (name.startswith("rollouts/") and value)
        ]
        reasons = [s.reason for g in groups for s in g.scores if s.value is None]
        if reasons:
            remedy = f"{len(reasons)} rollouts have no score, the first because: {reasons[0]}"
        else:
            remedy = (
                "If every reward is equal, the task is too hard or too easy for this policy, or "
                "the reward does not read the answers"
            )
        raise LagzeroError(
            f"{self.num_empty} steps in a row had nothing to learn from "
            "(schedule.max_empty_steps), so the run stops, with a checkpoint.\n"
            f"Last step: {', '.join(counts)}\n{remedy}"
        )
