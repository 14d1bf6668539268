"""Blocks of groups are played in one place after the other, whatever is lost on the way."""

from __future__ import annotations

import asyncio

import pytest

from lagzero.errors import GroupLost
from lagzero.generate.turns import TurnsGenerator
from lagzero.types import Group, Prompt

PROMPT = Prompt("p", (1,), "")


class Place:
    """Notes what is played here; loses the groups that it is told to."""

    def __init__(self, lost: set[int]):
        self.played: list[int] = []
        self.lost = lost

    async def play(self, index: int, prompt: Prompt) -> Group:
        self.played.append(index)
        await asyncio.sleep(0)
        if index in self.lost:
            raise GroupLost("timeout")
        return Group(index, prompt, ())


def test_each_turn_is_one_steps_groups():
    places = [Place(set()), Place(set())]
    generator = TurnsGenerator(places, 2)

    async def main():
        groups = await asyncio.gather(*(generator.play(n, PROMPT) for n in range(7)))
        assert [group.index for group in groups] == list(range(7))

    asyncio.run(main())
    assert [place.played for place in places] == [[0, 1, 4, 5], [2, 3, 6]]


def test_after_a_lost_group_the_next_turns_are_whole_again():
    """Steps of 2: 1 is lost, so 2, already begun elsewhere, comes into the first step; the
    second takes 3 and 4, the third 5 and 6."""
    places = [Place({1}), Place(set())]
    generator = TurnsGenerator(places, 2)

    async def main():
        done = await asyncio.gather(
            *(generator.play(n, PROMPT) for n in range(4)), return_exceptions=True
        )
        assert [type(each) for each in done] == [Group, GroupLost, Group, Group]
        await asyncio.gather(*(generator.play(n, PROMPT) for n in range(4, 9)))

    asyncio.run(main())
    assert [place.played for place in places] == [[0, 1, 5, 6], [2, 3, 4, 7, 8]]


def test_a_failure_counts_as_begun():
    class Broken:
        async def play(self, index: int, prompt: Prompt) -> Group:
            raise ArithmeticError

    place = Place(set())
    generator = TurnsGenerator([Broken(), place], 1)

    async def main():
        with pytest.raises(ArithmeticError):
            await generator.play(0, PROMPT)
        await generator.play(1, PROMPT)

    asyncio.run(main())
    assert place.played == [1]
