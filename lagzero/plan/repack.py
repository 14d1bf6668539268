"""Moving the tail together: the rule of live engines (``schedule.router``) on modelled ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from lagzero.plan.engine import Receive, Visit, Waiting
from lagzero.schedule.router import Repacking, Router


class Movable(Protocol):
    """What is asked of an engine whose rollouts may move."""

    on_end: Callable[[], None] | None

    def give(self, visits: Set[Visit], receive: Receive) -> None:
        """Hand the rollouts of groups over at the next step boundary."""
        ...

    def join(self, queued: Sequence[Waiting], carried: Sequence[Waiting]) -> None:
        """Take over what another engine has handed over."""
        ...


class Packer:
    """Empties engines with few unfinished rollouts into others, as ``ProcessBackend`` does.

    It looks whenever a round has ended, unless a move is going on. What moves leaves its engine at
    the next step boundary and joins the queue of the other engine at that moment. It keeps what it
    has written, and its context is computed again there.
    """

    def __init__(self, rule: Repacking, engines: Sequence[Movable], router: Router):
        self.num_moved = 0  # rollouts
        self.num_reread = 0.0  # tokens of context that they left behind
        self._rule, self._engines, self._router = rule, engines, router
        self._here: list[set[Visit]] = [set() for _ in engines]
        self._loads = [0] * len(engines)  # rollouts that have not ended
        self._few: set[int] = set()  # engines that might be emptied: most looks end here
        self._moving = 0  # engines that have not handed over yet
        for number, engine in enumerate(engines):
            engine.on_end = functools.partial(self._ended, number)

    def add(self, visit: Visit) -> None:
        """Hear that a group has come to its engine."""
        self._here[visit.engine].add(visit)
        self._count(visit.engine)

    def remove(self, visit: Visit) -> None:
        """Hear that a group has left its engine: it has ended, or it was taken back."""
        self._here[visit.engine].remove(visit)
        self._count(visit.engine)

    def _count(self, number: int) -> None:
        load = self._loads[number] = sum(visit.left for visit in self._here[number])
        if 0 < load < self._rule.below:
            self._few.add(number)
        else:
            self._few.discard(number)

    def _ended(self, number: int) -> None:
        self._count(number)
        self._look()

    def _look(self) -> None:
        if self._moving or not self._few:
            return
        moves = self._rule.moves(dict(enumerate(self._loads)))
        self._moving = len(moves)
        for source, target in moves.items():
            leaving = frozenset(visit for visit in self._here[source] if visit.left)
            arrive = functools.partial(self._arrive, source, target)
            self._engines[source].give(leaving, arrive)

    def _arrive(
        self, source: int, target: int, queued: Sequence[Waiting], carried: Sequence[Waiting]
    ) -> None:
        for visit in {each[0] for each in (*queued, *carried)}:
            self._router.left(source)
            visit.engine = self._router.pick(target)
            self._here[source].remove(visit)
            self._here[target].add(visit)
        self.num_moved += len(queued) + len(carried)
        self.num_reread += sum(each[4] for each in (*queued, *carried) if each[5])
        self._engines[target].join(queued, carried)
        self._count(source)
        self._count(target)
        self._moving -= 1
        self._look()
