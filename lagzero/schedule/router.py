"""Which engine serves the next request: a pure object, for live and for modelled engines."""

from __future__ import annotations

import heapq
from collections import deque
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

    def pick(self) -> int:
        """Choose the engine of one more request. Raises LookupError when all are lost."""
        if not self._turns:
            raise LookupError("every engine is lost")
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
