"""The books of one explored run: what became of each visit, and what must never happen to one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from lagzero.loop import Progress
from lagzero.schedule.audit import ZERO_SPREAD, Audit
from lagzero.schedule.staleness import Contract
from lagzero.types import ScoredGroup

Event = tuple[float, str, tuple[int, ...]]  # when (seconds), what, and the groups that it is about


@dataclass(frozen=True, slots=True)
class Saved:
    """What the last checkpoint holds: progress, and how the visits behind it ended."""

    progress: Progress = field(default_factory=Progress)
    given_up: frozenset[int] = frozenset()

    consumed: frozenset[int] = frozenset()  # groups of all steps, empty ones included


@dataclass(slots=True)
class Ledger:
    """Hears of everything in the life of a visit. Resumes from ``saved``."""

    saved: Saved
    max_plays: int  # of one visit: once, and as often again as the contract allows
    max_resampled: int = 0  # groups of no use, from one step to the next
    events: list[Event] = field(default_factory=list[Event])
    wrong: list[str] = field(default_factory=list[str])
    given_up: dict[int, str] = field(default_factory=dict[int, str])  # index -> reason
    began: dict[int, int] = field(default_factory=dict[int, int])  # index -> version, last play
    taken: tuple[int, ...] = ()  # groups of the present step
    flat: set[int] = field(default_factory=set[int])  # groups found to be of no use
    num_resampled: int = field(init=False)  # since groups were handed over
    _plays: dict[int, int] = field(default_factory=dict[int, int])
    _gone: frozenset[int] = frozenset()  # given up when the present step ended
    _num_resampled_then: int = 0  # likewise

    def __post_init__(self) -> None:
        self.num_resampled = self.saved.progress.resampled

    def expect(self, holds: bool, otherwise: str) -> None:
        """Write down what is wrong unless it holds."""
        if not holds:
            self.wrong.append(otherwise)

    def note(self, what: str, *numbers: int) -> None:
        """Add to the history."""
        self.events.append((asyncio.get_running_loop().time(), what, numbers))

    def play(self, index: int, version: int) -> None:
        """A visit is played, for the first time or again."""
        self.note("play", index)
        number = self._plays[index] = self._plays.get(index, 0) + 1
        self.expect(number <= self.max_plays, f"group {index} was started too often")
        over = index in self.given_up or index in self.saved.consumed
        self.expect(not over, f"group {index} was played after its end")
        self.began[index] = version

    def give_up(self, index: int, reason: str) -> None:
        """A visit ends untrained."""
        self.note(reason, index)
        self.expect(bool(reason), f"group {index} was given up without a reason")
        # a play that waits for its turn may be overdue, or not be needed, before it begins
        unplayed = reason in ("surplus", "interrupted")
        self.expect(index in self.began or unplayed, f"group {index} never began")
        self.expect(index not in self.given_up, f"group {index} was given up twice")
        trained = index in self.saved.consumed or index in self.taken
        self.expect(not trained, f"group {index} was given up after it was trained")
        self.given_up[index] = reason
        if reason == ZERO_SPREAD:
            self.num_resampled += 1
            self.expect(index in self.flat, f"group {index} was of use, and given up")
            self.expect(
                self.num_resampled <= self.max_resampled,
                f"{self.num_resampled} groups were resampled, limit {self.max_resampled}",
            )

    def take(self, indices: tuple[int, ...]) -> None:
        """A step has its groups."""
        self.taken = indices
        self.note("take", *indices)
        again = self.saved.consumed.intersection(indices)
        self.expect(
            not again and len(set(indices)) == len(indices),
            f"groups {sorted(again) or indices} were trained twice",
        )
        flat = self.flat.intersection(indices)
        self.expect(not flat, f"groups {sorted(flat)} of no use were trained, with resamples left")
        lost = (self.given_up.keys() | self.saved.given_up).intersection(indices)
        self.expect(not lost, f"groups {sorted(lost)} were trained after they were given up")

    def step_ended(self) -> None:
        """A step is finished; its progress is that of this moment."""
        self._gone = self.saved.given_up | self.given_up.keys()
        self._num_resampled_then = self.num_resampled

    def save(self, progress: Progress) -> None:
        """The step that ended last is saved."""
        self.note("saved", progress.step)
        self.expect(
            progress.resampled == self._num_resampled_then,
            f"{self._num_resampled_then} groups were resampled, saved: {progress.resampled}",
        )
        self.saved = Saved(progress, self._gone, self.saved.consumed.union(self.taken))
        gone = {*range(progress.next_index), *progress.ahead}
        self.expect(
            gone == {*self.saved.consumed, *self.saved.given_up},
            f"progress {progress} is not what was consumed and given up",
        )

    def is_over(self, num_prompts: int) -> bool:
        """Whether every visit of finite data has ended."""
        ended = self.saved.consumed | self.saved.given_up | self.given_up.keys()
        return len(ended) == num_prompts

    def violations(self) -> list[str]:
        """List what went wrong, with the check that needs the end of the run.

        A visit that began and is behind the saved progress was trained or given up; another is
        pending: the resumed run starts it again.
        """
        saved = self.saved
        ended = saved.consumed | saved.given_up
        lost = [
            index
            for index in self.began
            if index not in ended
            and (index < saved.progress.next_index or index in saved.progress.ahead)
        ]
        return [*self.wrong, *([f"groups {lost} are lost"] if lost else [])]


class LedgerAudit(Audit):
    """The audit, which also tells the ledger what is given up.

    Its own sums take longer than all the rest of a schedule; without ``sums`` it only tells.
    """

    def __init__(self, contract: Contract, ledger: Ledger, sums: bool):
        super().__init__(contract)
        self._ledger, self._sums = ledger, sums

    def started(self, index: int, prompt_id: str) -> None:
        """Pass it on."""
        if self._sums:
            super().started(index, prompt_id)

    def accepted(self, scored: ScoredGroup, lag: int) -> None:
        """Pass it on."""
        if self._sums:
            super().accepted(scored, lag)

    def restarted(self, index: int, scored: ScoredGroup | None, lag: int) -> None:
        """Pass it on."""
        if self._sums:
            super().restarted(index, scored, lag)

    def given_up(self, index: int, reason: str, scored: ScoredGroup | None, age: int) -> None:
        """Tell the ledger, and pass it on."""
        self._ledger.give_up(index, reason)
        if self._sums:
            super().given_up(index, reason, scored, age)

    def step(
        self, groups: Sequence[ScoredGroup], version: int, waiting: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Pass it on."""
        self._ledger.num_resampled = 0
        return super().step(groups, version, waiting) if self._sums else {}
