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

    def item(self, index: int) -> T | None:
        """Return the item that was put at ``index`` and is still here."""
        return self._items.get(index)

    def peek(self) -> tuple[int, T] | None:
        """Return the next (index, item) that may leave, or None while there is none."""
        while self._near and self._near[0][1] not in self._items:
            heapq.heappop(self._near)  # withdrawn or skipped
        return (index := self._near[0][1], self._items[index]) if self._near else None

    def pop(self) -> tuple[int, T] | None:
        """Hand the next (index, item) over, or None while there is none."""
        head = self.peek()
        if head is not None:
            heapq.heappop(self._near)
            self._leave(head[0])
        return head

    def withdraw(self, index: int) -> T:
        """Take an item out as if it had never been put; it may be put again."""
        self._far.pop(index, None)
        self._near = [each for each in self._near if each[1] != index]
        heapq.heapify(self._near)
        return self._items.pop(index)

    def skip(self, index: int) -> None:
        """Count an index as gone, with or without its item. Raises ValueError if it is gone."""
        if index in self._gone or index < self.first:
            raise ValueError(f"item {index} left twice")
        self._far.pop(index, None)
        self._leave(index)

    def _leave(self, index: int) -> None:
        self._items.pop(index, None)
        self._gone.add(index)
        while self.first in self._gone:
            self._gone.remove(self.first)
            if (
                self.window is not None
                and (order := self._far.pop(self.first + self.window, None)) is not None
            ):
                heapq.heappush(self._near, (order, self.first + self.window))
            self.first += 1
