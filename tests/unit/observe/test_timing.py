"""Stage times under a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from lagzero.observe.timing import StageClock


class Hand:
    """A clock moved by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stages_one_after_the_other():
    async def run() -> dict[str, float]:
        hand = Hand()
        clock = StageClock(hand)
        async with clock.stage("generate"):
            hand.now += 3
        hand.now += 1
        async with clock.stage("train"):
            hand.now += 2
        return clock.take()

    assert asyncio.run(run()) == {"generate": 3, "train": 2, "step": 6}


def test_many_tasks_in_one_stage_count_the_wall_time_once():
    async def run() -> dict[str, float]:
        hand = Hand()
        clock = StageClock(hand)
        async with clock.stage("generate"):
            hand.now += 1
            async with clock.stage("generate"):
                hand.now += 2
            async with clock.stage("score"):
                hand.now += 4
        hand.now += 8
        return clock.take()

    assert asyncio.run(run()) == {"generate": 7, "score": 4, "step": 15}


def test_a_stage_across_the_end_of_a_step_is_split():
    async def run() -> list[dict[str, float]]:
        hand = Hand()
        clock = StageClock(hand)
        async with clock.stage("generate"):
            hand.now += 1
            first = clock.take()
            assert clock.running() == ("generate",)
            hand.now += 2
        hand.now += 4
        return [first, clock.take(), clock.take()]

    assert asyncio.run(run()) == [
        {"generate": 1, "step": 1},
        {"generate": 2, "step": 6},
        {"step": 0},
    ]


def test_a_stage_that_fails_is_still_timed_and_left():
    async def run() -> dict[str, float]:
        hand = Hand()
        clock = StageClock(hand)
        with pytest.raises(RuntimeError, match="x"):
            async with clock.stage("train"):
                hand.now += 2
                raise RuntimeError("x")
        assert clock.running() == ()
        return clock.take()

    assert asyncio.run(run())["train"] == 2
