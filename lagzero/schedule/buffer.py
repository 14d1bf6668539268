"""Hand finished groups over in start order, within a window."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class WindowedBuffer(Generic[T]):
    """Finished items, keyed by start index, handed over in start order within a window.

    An item may leave when its index is below ``first + window``, where ``first`` is the lowest
    index that has not left yet; among those, the one that finished first leaves first. Window 1 is
    strict start order; None has no bound (first finished, first out), which favours short items.
    ``first`` and ``ahead`` are what a resumed buffer goes on from.
    """

    def __init__(self, window: int | None = 1, first: int = 0, ahead: Iterable[int] = ()):
        if window is not None and window < 1:
            raise ValueError(f"window={window}; it is at least 1, or None for no bound")
        self.window = window
        self.first = first
        self._items: dict[int, T] = {}
        self._num_put = 0  # finishing order
        self._near: list[tuple[int, int]] = []  # heap of (finishing order, index) that may leave
        self._far: dict[int, int] = {}  # index beyond the window -> finishing order
        self._gone = set(ahead)  # left already, above first

    def __len__(self) -> int:
        return len(self._items)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Indices above ``first`` that have left already, ascending."""
        return tuple(sorted(self._gone))

    def put(self, index: int, item: T) -> None:
        """Accept a finished item. Raises ValueError for an index that was seen before."""
        if index in self._items or index in self._gone or index < self.first:
            raise ValueError(f"item {index} was handed in twice")
        self._items[index] = item
        if self.window is None or index < self.first + self.window:
            heapq.heappush(self._near, (self._num_put, index))
        else:
            self._far[index] = self._num_put
        self._num_put += 1

    def pop(self) -> tuple[int, T] | None:
        """Return the next (index, item) that may leave, or None while there is none."""
        if not self._near:
            return None
        _, index = heapq.heappop(self._near)
        self._gone.add(index)
        while self.first in self._gone:
            self._gone.remove(self.first)
            if (
                self.window is not None
                and (order := self._far.pop(self.first + self.window, None)) is not None
            ):
                heapq.heappush(self._near, (order, self.first + self.window))
            self.first += 1
        return index, self._items.pop(index)
