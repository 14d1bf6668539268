"""What the modelled stages do that no simulation reaches: groups that are cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lagzero.plan.clock import run_virtual
from lagzero.plan.engine import Engine
from lagzero.plan.lengths import parse_lengths
from lagzero.plan.meter import Meter
from lagzero.plan.models import ModelGenerator, ModelScorer, ModelSource, Router
from lagzero.plan.pace import Lanes
from lagzero.types import Group, Prompt

PROMPT = Prompt("p", (), "")


def test_a_cancelled_group_leaves_its_engine_to_the_next():
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        meter = Meter(1)
        source = ModelSource(parse_lengths("list:100,3").draws(0), 1)
        router = Router([Engine(0, Lanes(), 1, meter)], least_loaded=True)
        generator = ModelGenerator(source, router, 0)
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
