"""Who starts, who is handed over, who is given up: everything about groups that the loop asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lagzero.errors import LagzeroError
from lagzero.schedule.admission import Admission
from lagzero.schedule.audit import ZERO_SPREAD, Audit
from lagzero.schedule.buffer import WindowedBuffer
from lagzero.schedule.staleness import Contract, Verdict
from lagzero.types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """How far to go, how far generation may run ahead, and how old samples may be."""

    steps: int  # optimiser steps in all, those before a resume included
    groups_per_step: int
    max_lag: int = 0  # policy versions
    window: int | None = 1  # of start order, at hand-over
    max_empty_steps: int = 8
    extra_groups: int = 0  # over-sampling: groups started beyond need
    surplus: Literal["carry", "drop"] = "carry"  # those not taken once a step has enough
    sync_every: int = 1  # steps from one publication to the next
    # dynamic sampling: groups without use that others are played for, from one hand-over to the
    # next at most; those beyond it are handed over
    resampled_groups: int = 0
    contract: Contract = field(default_factory=Contract)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands between two steps. It is all that a resume needs of the loop."""

    step: int = 0  # optimiser steps taken: the policy version
    next_index: int = 0  # the first visit that has not been consumed
    ahead: tuple[int, ...] = ()  # visits past it that have; empty with window 1
    resampled: int = 0  # groups without use that were given up since the last hand-over


@dataclass(slots=True)
class Visit:
    """A started visit that is neither trained nor given up."""

    prompt: Prompt
    started_at: int  # version published when it was last started
    restarts: int = 0


class Flow:
    """The groups between their start and their training. Pure: no clock, no tasks.

    Each started visit leaves in exactly one way: trained, or given up with a reason. Visits that
    are given up make room for others, so that they never stop a run.

    ``useful`` says whether training can learn from a finished group. While ``resampled_groups``
    lasts, one that is of no use is given up when it finishes, not when its turn comes: the group in
    its place starts at once. Which of them were given up then depends on who finished first, but
    not what a synchronous step trains: all useful groups among the same visits.
    """

    def __init__(
        self,
        schedule: LoopSchedule,
        start: Progress,
        useful: Callable[[ScoredGroup], bool] = lambda scored: True,
    ):
        self.schedule = schedule
        self.audit = Audit(schedule.contract)
        self._admission = Admission(
            schedule.groups_per_step,
            schedule.max_lag + schedule.sync_every - 1,
            start.step,
            schedule.extra_groups,
        )
        self._buffer: WindowedBuffer[ScoredGroup] = WindowedBuffer(
            schedule.window, start.next_index, start.ahead
        )
        self._gone_before = set(start.ahead)
        self._next = start.next_index
        self._open: dict[int, Visit] = {}  # in start order
        self._lost_in_a_row = 0
        self._useful = useful
        self._resampled = start.resampled

    @property
    def published(self) -> int:
        """The version that generators play with."""
        return self._admission.published

    def progress(self, step: int) -> Progress:
        """Return where the run stands after ``step``."""
        return Progress(step, self._buffer.first, self._buffer.ahead, self._resampled)

    def next_index(self) -> int | None:
        """Return the visit to start now, or None while admission lets none."""
        if not self._admission.may_start():
            return None
        while self._next in self._gone_before:
            self._next += 1
        return self._next

    def start(self, index: int, prompt: Prompt) -> None:
        """Note that the visit ``next_index`` named has begun."""
        self._admission.started += 1
        self._next = index + 1
        self._open[index] = Visit(prompt, self.published)
        self.audit.started(index, prompt.id)

    def restart(self, index: int, interrupted: bool = False) -> Prompt:
        """Note that a visit is played again, and return its prompt."""
        visit = self._open[index]
        if interrupted:
            self.audit.restarted(index, None, self.published - visit.started_at)
        visit.restarts += 1
        visit.started_at = self.published
        return visit.prompt

    def finish(self, index: int, scored: ScoredGroup) -> None:
        """Accept a scored group, or give it up when it is of no use."""
        if self._resampled < self.schedule.resampled_groups and not self._useful(scored):
            self._resampled += 1
            self.give_up(index, ZERO_SPREAD, scored)
        else:
            self._buffer.put(index, scored)

    def give_up(self, index: int, reason: str, scored: ScoredGroup | None = None) -> None:
        """Let a visit go untrained. Raises LagzeroError when nothing else happens any more."""
        visit = self._open.pop(index)
        scored = scored or self._buffer.item(index)
        self._buffer.skip(index)
        self._admission.dropped += 1
        self.audit.given_up(index, reason, scored, self.published - visit.started_at)
        if reason in ("surplus", ZERO_SPREAD):  # bounded by the groups that a step takes
            return
        self._lost_in_a_row += 1
        # As many as may have been started in vain, and those of as many steps as may be empty.
        of = self.schedule
        num_steps = of.max_empty_steps + of.max_lag + of.sync_every
        if self._lost_in_a_row >= num_steps * of.groups_per_step + of.extra_groups:
            raise LagzeroError(
                f"{self._lost_in_a_row} groups in a row were given up and none was trained "
                f"(schedule.max_empty_steps), so the run stops.\nThe last one: {reason}"
            )

    def take(self, version: int) -> ScoredGroup | int | None:
        """Return the next group for the step that leaves ``version``.

        An int is a visit whose group was too old and is to be played again; None: none may leave.
        """
        contract = self.schedule.contract
        while (head := self._buffer.peek()) is not None:
            index, scored = head
            visit = self._open[index]
            lag = contract.lag(scored, visit.started_at, version)
            verdict = contract.verdict(lag, visit.restarts)
            if verdict is Verdict.TRAIN:
                self._buffer.pop()
                del self._open[index]
                self._lost_in_a_row = 0
                self.audit.accepted(scored, lag)
                return scored
            if verdict is Verdict.RESTART:
                self._buffer.withdraw(index)
                self.audit.restarted(index, scored, lag)
                return index
            self.give_up(index, "stale", scored)
        return None

    def enough(self) -> list[int]:
        """Return the visits to give up once a step has its groups (``surplus: drop``)."""
        return list(self._open) if self.schedule.surplus == "drop" else []

    def close_step(self, groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
        """Return what the audit saw since the last step, which begins with ``version``."""
        self._resampled = 0
        waiting = [self._buffer.item(index) for index in self._open]
        return self.audit.step(groups, version, [each for each in waiting if each is not None])

    def publish(self, version: int, unlearnt: int) -> list[int]:
        """Let a version count, and give back the groups of a step that learnt nothing.

        Returns the visits that are to be interrupted: their play ends and begins again.
        """
        self._admission.published = version
        self._admission.dropped += unlearnt
        return [i for i in self._unfinished() if self._is_overdue(i)]

    def _unfinished(self) -> Iterable[int]:
        return [index for index in self._open if self._buffer.item(index) is None]

    def _is_overdue(self, index: int) -> bool:
        return self.schedule.contract.is_overdue(self._open[index].started_at, self.published)

    def may_restart(self, index: int) -> bool:
        """Whether an interrupted visit may begin again; if not, it is to be given up."""
        return self._open[index].restarts < self.schedule.contract.max_restarts
