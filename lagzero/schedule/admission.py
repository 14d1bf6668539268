"""How far generation may run ahead of training."""

from __future__ import annotations


class Admission:
    """Counts groups and published versions, and says whether one more group may start.

    A group may start while

        started - dropped < (published + max_lag + 1) * groups_per_step + extra_groups

    With ``max_lag`` 0 the groups of one step may start, then the update must be published: fully
    synchronous. Source of the rule: Fu et al. 2025, AReaL. A group that is consumed without an
    update counts as dropped, so that a step with nothing to learn does not stop the run.
    ``extra_groups`` start beyond need (over-sampling): steps take what finishes first and the rest
    is carried, which adds up to ceil(extra_groups / groups_per_step) to the lag.
    """

    def __init__(
        self, groups_per_step: int, max_lag: int, published: int = 0, extra_groups: int = 0
    ):
        if groups_per_step < 1 or max_lag < 0 or published < 0 or extra_groups < 0:
            raise ValueError(
                f"groups_per_step={groups_per_step} (>= 1), max_lag={max_lag} (>= 0), "
                f"published={published} (>= 0), extra_groups={extra_groups} (>= 0)"
            )
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.extra_groups = extra_groups
        self.published = published
        self.started = published * groups_per_step
        self.dropped = 0

    def may_start(self) -> bool:
        """Whether the rule admits one more group now."""
        limit = (self.published + self.max_lag + 1) * self.groups_per_step
        return self.started - self.dropped < limit + self.extra_groups
