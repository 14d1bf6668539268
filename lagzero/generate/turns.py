"""Groups that are played in one place and in another in turn."""

from __future__ import annotations

from collections.abc import Sequence

from lagzero.errors import GroupLost
from lagzero.protocols import Generator
from lagzero.types import Group, Prompt


class TurnsGenerator:
    """Plays so many groups with the first generator, as many with the next, and so on round.

    Groups are counted as they begin; one that is lost leaves its place to the next that begins. So
    the groups of each step are those of one turn, where steps take groups in start order.
    """

    def __init__(self, generators: Sequence[Generator], groups_per_turn: int):
        self._generators = generators
        self._groups_per_turn = groups_per_turn
        self._num_begun = 0

    async def play(self, index: int, prompt: Prompt) -> Group:
        """Return the group of visit ``index``."""
        turn = self._num_begun // self._groups_per_turn
        self._num_begun += 1
        try:
            return await self._generators[turn % len(self._generators)].play(index, prompt)
        except GroupLost:
            self._num_begun -= 1
            raise
