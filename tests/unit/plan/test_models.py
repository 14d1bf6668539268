"""What the modelled stages do that no simulation reaches: groups that are cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lagzero.plan.clock import run_virtual
from lagzero.plan.engine import Engine
from lagzero.plan.lengths import parse_lengths
from lagzero.plan.meter import Meter
from lagzero.plan.models import ModelGenerator, ModelScorer, ModelSource, PauseGate
from lagzero.plan.pace import Lanes, Roofline
from lagzero.types import Group, Prompt

PROMPT = Prompt("p", (), "")


def test_a_cancelled_group_leaves_its_engine_to_the_next():
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        meter = Meter(1)
        source = ModelSource(parse_lengths("list:100,3").draws(0), 1)
        generator = ModelGenerator(source, [[Engine(0, Lanes(), 1, meter)]], "least_loaded", 0)
        long = asyncio.create_task(generator.play(0, PROMPT))
        short = asyncio.create_task(generator.play(1, PROMPT))
        await asyncio.sleep(2)
        long.cancel()
        await short
        meter.advance(loop.time())
        return loop.time(), meter.busy_slot_s

    assert run_virtual(main()) == (5.0, 5.0)


def test_a_cancelled_scoring_is_not_counted_on():
    async def main() -> Meter:
        meter = Meter(1)
        scorer = ModelScorer(parse_lengths("fixed:9").draws(0), meter)
        task = asyncio.create_task(scorer.score(Group(0, PROMPT, ())))
        await asyncio.sleep(1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(1)
        meter.advance(2.0)
        return meter

    meter = run_virtual(main())
    assert (meter.scoring, meter.slot_idle_s["reward"], meter.slot_idle_s["data"]) == (0, 1.0, 1.0)


def test_data_end_where_their_number_or_their_lengths_do():
    draws = parse_lengths("fixed:2.5").draws(0)
    source = ModelSource(draws, 3, num_prompts=2, whole=True)
    assert [source.at(index) is None for index in range(4)] == [False, False, True, True]
    assert source.lengths(1) == [3.0, 3.0, 3.0]
    assert ModelSource(draws, 3).lengths(1) == [2.5, 2.5, 2.5]


def test_engines_stand_still_while_a_step_trains_and_go_on_afterwards():
    """Lengths 10 on two lanes of two pools; from 2 s on, pool 0 is held for 5 s, then pool 1."""

    async def main() -> tuple[list[float], dict[str, float], float]:
        loop = asyncio.get_running_loop()
        meter = Meter(2)
        source = ModelSource(parse_lengths("fixed:10").draws(0), 1)
        pools = [[Engine(0, Lanes(), 1, meter)], [Engine(1, Lanes(), 1, meter)]]
        generator = ModelGenerator(source, pools, "least_loaded", 0)
        gate = PauseGate(pools, 1, meter)
        ended = [0.0, 0.0]

        async def play(index: int) -> None:
            await generator.play(index, PROMPT)
            ended[index] = loop.time()

        plays = [asyncio.create_task(play(index)) for index in range(2)]
        await asyncio.sleep(2)
        async with gate.exclusive("train"):
            await asyncio.sleep(5)
        async with gate.exclusive("train"):
            await asyncio.sleep(1)
        await asyncio.gather(*plays)
        return ended, meter.slot_idle_s, meter.busy_slot_s

    ended, idle, _ = run_virtual(main())
    assert ended == [15.0, 11.0]
    assert idle["turn"] == 0.0  # its rollout still has the slot


def test_a_step_that_shares_devices_begins_once_the_decode_step_has_ended():
    """Decode steps of 1 s; the trainer asks for the devices at 1.5 s and gets them at 2 s."""

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        meter = Meter(4)
        source = ModelSource(parse_lengths("fixed:3").draws(0), 1)
        pools = [[Engine(0, Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0), 4, meter)]]
        generator = ModelGenerator(source, pools, "least_loaded", 0)
        play = asyncio.create_task(generator.play(0, PROMPT))
        await asyncio.sleep(1.5)
        async with PauseGate(pools, 4, meter).exclusive("train"):
            began = loop.time()
            await asyncio.sleep(10)
        await play
        return began, loop.time()

    assert run_virtual(main()) == (2.0, 13.0)


def test_a_group_carries_the_oldest_token_and_the_end_of_its_first_rollout():
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        source = ModelSource(parse_lengths("list:2,9").draws(0), 2)
        engine = Engine(0, Lanes(), 2, Meter(2))
        loop.call_at(1.0, engine.take_weights, 3)
        loop.call_at(5.0, engine.take_weights, 4)
        generator = ModelGenerator(source, [[engine]], "least_loaded", 0)
        group = await generator.play(0, PROMPT)
        return [int(each) for each in group.rollouts[0].tokens["version"]]

    assert run_virtual(main()) == [0, 3]


def test_what_is_played_again_was_written_for_nothing():
    async def main() -> tuple[list[float], float]:
        source = ModelSource(parse_lengths("fixed:10").draws(0), 1)
        engine = Engine(0, Lanes(), 2, Meter(2))
        generator = ModelGenerator(source, [[engine]], "least_loaded", 0)
        play = asyncio.create_task(generator.play(0, PROMPT))
        await asyncio.sleep(4)
        play.cancel()
        with suppress(asyncio.CancelledError):
            await play
        await generator.play(0, PROMPT)
        return [visit.written for visit in generator.lost], engine.num_tokens

    assert run_virtual(main()) == ([4.0], 14.0)
