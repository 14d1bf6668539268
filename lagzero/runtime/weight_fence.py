"""Which slots of the shared weights may be read by whom: pure bookkeeping, no processes."""

from __future__ import annotations


class WeightFence:
    """Knows for each engine the slot that it computes with, and those it was told to take.

    An engine answers each order in turn. It may read a slot from the order on, and until it has
    taken a later one; a slot that nobody may read can be written.
    """

    def __init__(self) -> None:
        self._used: dict[int, int | None] = {}
        self._ordered: dict[int, list[int]] = {}

    def joined(self, engine: int) -> None:
        """Note an engine that computes with weights of its own."""
        self._used[engine] = None
        self._ordered[engine] = []

    def lost(self, engine: int) -> None:
        """Forget an engine that is gone: it reads nothing any more."""
        self._used.pop(engine, None)
        self._ordered.pop(engine, None)

    def ordered(self, engine: int, slot: int) -> None:
        """Note that an engine was told to take a slot."""
        self._ordered[engine].append(slot)

    def taken(self, engine: int) -> None:
        """Note that an engine has carried out its oldest order and left the slot before."""
        self._used[engine] = self._ordered[engine].pop(0)

    def refused(self, engine: int) -> None:
        """Note that an engine has refused its oldest order and stays where it was."""
        self._ordered[engine].pop(0)

    def used(self, engine: int) -> int | None:
        """Return the slot that an engine is known to compute with; None: weights of its own."""
        return self._used[engine]

    def is_settled(self, engine: int) -> bool:
        """Whether an engine has answered every order. An engine that is gone has."""
        return not self._ordered.get(engine)

    @property
    def is_quiet(self) -> bool:
        """Whether every engine has answered every order."""
        return not any(self._ordered.values())

    def readable(self) -> set[int]:
        """Return the slots that some engine may read now or later."""
        slots = {slot for orders in self._ordered.values() for slot in orders}
        return slots | {slot for slot in self._used.values() if slot is not None}
