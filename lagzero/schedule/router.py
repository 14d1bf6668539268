"""Which engine serves a request: pure objects, for live and for modelled engines."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Policy = Literal["least_loaded", "round_robin"]


class Router:
    """Spreads requests over engines, numbered from 0, some of which may be lost for a while.

    ``least_loaded`` takes the engine with the fewest requests, of equals the lowest number;
    ``round_robin`` takes the engines in turn. ``pick`` and ``left`` cost O(log engines) on average.
    """

    def __init__(self, num_engines: int, policy: Policy = "least_loaded"):
        if num_engines < 1:
            raise ValueError(f"a router needs at least one engine, not {num_engines}")
        self._policy = policy
        self._loads = [0] * num_engines
        self._is_live = [True] * num_engines
        self._turns = deque(range(num_engines))  # of live engines, the next one first
        self._heap = [(0, number) for number in range(num_engines)]  # may hold outdated loads

    @property
    def num_live(self) -> int:
        """Engines that can be picked."""
        return len(self._turns)

    def load(self, engine: int) -> int:
        """Return the number of requests that were sent to an engine and have not left it."""
        return self._loads[engine]

    def pick(self, wanted: int | None = None) -> int:
        """Choose the engine of one more request: the ``wanted`` one if it is there.

        Raises LookupError when all are lost.
        """
        if not self._turns:
            raise LookupError("every engine is lost")
        if wanted is not None and self._is_live[wanted]:
            self._loads[wanted] += 1
            self._note(wanted)
            return wanted
        if self._policy == "round_robin":
            engine = self._turns[0]
            self._turns.rotate(-1)
            self._loads[engine] += 1
            return engine
        while not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        load, engine = self._heap[0]
        self._loads[engine] = load + 1
        heapq.heapreplace(self._heap, (load + 1, engine))
        return engine

    def left(self, engine: int) -> None:
        """Hear that a request has left its engine. Raises ValueError when none was there."""
        if self._loads[engine] == 0:
            raise ValueError(f"engine {engine} has no request that could leave it")
        self._loads[engine] -= 1
        self._note(engine)

    def lost(self, engine: int) -> None:
        """Hear that an engine is gone, and its requests with it: it is not picked any more."""
        if not self._is_live[engine]:
            raise ValueError(f"engine {engine} is already lost")
        self._is_live[engine] = False
        self._loads[engine] = 0
        self._turns.remove(engine)

    def joined(self, engine: int) -> None:
        """Hear that a lost engine is back, with nothing to do; its turn is the last one."""
        if self._is_live[engine]:
            raise ValueError(f"engine {engine} is already there")
        self._is_live[engine] = True
        self._turns.append(engine)
        self._note(engine)

    def _is_current(self, load: int, engine: int) -> bool:
        return self._is_live[engine] and self._loads[engine] == load

    def _note(self, engine: int) -> None:
        """Put an engine's new load into the heap, which outdated loads must not fill for ever."""
        if self._policy == "round_robin":
            return
        heapq.heappush(self._heap, (self._loads[engine], engine))
        if len(self._heap) > 4 * len(self._loads) + 16:
            self._heap = [(self._loads[number], number) for number in self._turns]
            heapq.heapify(self._heap)


@dataclass(frozen=True, slots=True)
class Repacking:
    """When few responses are left on an engine, another one takes them over, so that it is free.

    An engine with fewer than ``below`` unfinished responses gives all of them to the fullest one
    that then has at most ``most``, which is how many an engine decodes together. The emptiest goes
    first, and who has received gives nothing away. Each move leaves one engine fewer at work, and
    only new requests make them more, so moving comes to an end. Source of the idea: the repacking
    of Sheng et al. 2025 (Laminar, arXiv:2510.12633).
    """

    below: int  # responses, >= 2
    most: int  # responses

    def moves(self, loads: Mapping[int, int]) -> dict[int, int]:
        """Return who takes over, by the engine that is freed. ``loads`` are unfinished responses
        of each engine that can serve; those without any stay out of it."""
        busy = {engine: load for engine, load in loads.items() if load}
        takes_over: dict[int, int] = {}
        for source in sorted(busy, key=lambda engine: (busy[engine], -engine)):
            if busy[source] >= self.below:  # also those that have received enough
                continue
            others = busy.keys() - takes_over.keys() - {source}
            fitting = [each for each in others if busy[each] + busy[source] <= self.most]
            if source not in takes_over.values() and fitting:
                target = max(fitting, key=lambda engine: (busy[engine], -engine))
                takes_over[source] = target
                busy[target] += busy[source]
        return takes_over
