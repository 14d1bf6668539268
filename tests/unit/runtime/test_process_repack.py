"""The last responses of several engines are moved together, and nobody can tell from the result."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from pathlib import Path

import pytest

from lagzero.generate.process_backend import ProcessBackend
from lagzero.runtime.messages import TakeWeights
from lagzero.runtime.process_handle import ProcessPlan
from lagzero.runtime.process_pool import DeathRule, EnginePool
from lagzero.schedule.router import Repacking
from lagzero.sync.segment import Segment
from lagzero.types import Finish

sys.path.append(str(Path(__file__).parent))  # spawned processes inherit it
import process_factories as served
from process_bench import LONG, Bench, assert_right, until

SOME = LONG // 10  # tokens: long enough for a move to come before the end


def packing(folder: Path, num: int = 2, below: int = 3, most: int = 8, **rule) -> Bench:
    bench = Bench(folder, num, **rule)
    bench.backend = ProcessBackend(bench.pool, repacking=Repacking(below, most))
    return bench


def loads(bench: Bench) -> list[int]:
    return [len(bench.backend.pending(engine)) for engine in range(bench.pool.num_engines)]


def test_a_tail_is_moved_and_its_tokens_are_those_of_one_that_stays(tmp_path):
    """Engines 0, 1, 2 have groups 0 and 3, 1 and 4, 2 and 5; the later ones end at once."""

    async def main(bench: Bench):
        tasks = [bench.ask(n, SOME) for n in range(3)] + [bench.ask(n, 5) for n in range(3, 6)]
        await asyncio.sleep(0)
        assert loads(bench) == [2, 2, 2]
        await until(lambda: bench.backend.num_moved >= 4)
        assert sorted(loads(bench)) == [0, 0, 3]
        fresh = bench.ask(6)
        await asyncio.sleep(0)
        assert sorted(loads(bench)) == [0, 1, 3]  # it goes to an engine that is free
        assert_right(await fresh, 6)
        for number, task in enumerate(tasks):
            assert_right(await task, number, SOME if number < 3 else 5)
        assert bench.backend.num_moved == 4

    packing(tmp_path, 3).run(main)


def test_each_token_keeps_the_version_that_sampled_it(tmp_path):
    """The new weights are sent while the first is sampled, and before anything can move."""
    bench, segment = Bench(tmp_path), Segment(64)
    plan = ProcessPlan(
        functools.partial(served.serve_fake, tmp_path), served.OpensMemory(segment.name)
    )
    bench.pool = EnginePool([plan] * 2, DeathRule(), bench.reports.append)
    bench.backend = ProcessBackend(bench.pool, repacking=Repacking(3, 8))

    async def main(bench: Bench):
        bench.hold()
        stays, moves, ends = bench.ask(1, SOME, members=3), bench.ask(2, SOME), bench.ask(3, 1)
        await bench.until_held(*bench.pool.pids.values())
        switching = asyncio.ensure_future(bench.pool.switch(TakeWeights(1, 1)))
        await asyncio.sleep(0)
        bench.let_go()
        await asyncio.gather(switching, ends)
        for number, task, members in ((1, stays, 3), (2, moves, 2)):
            rollouts = await task
            assert_right(rollouts, number, SOME, members)
            for rollout in rollouts:
                versions = rollout.tokens["version"].tolist()
                assert versions == sorted(versions)
                assert set(versions) == {0, 1}
        assert bench.backend.num_moved == 2

    try:
        bench.run(main)
    finally:
        segment.close()


def test_taking_back_while_a_request_moves_ends_it_where_it_is(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        keep, short, gone = bench.ask(1, SOME, members=3), bench.ask(2, LONG), bench.ask(3, 1)
        await bench.until_held(*bench.pool.pids.values())
        bench.let_go()
        await gone
        assert [entry.target for entry in bench.backend._open.values()] == [None, 0]
        bench.backend.take_back(["group 2"])
        rollouts = await short
        assert {rollout.finish for rollout in rollouts} == {Finish.ABORT}
        assert_right(await keep, 1, SOME, 3)
        assert bench.backend.num_moved == 0

    packing(tmp_path).run(main)


def test_cancelling_while_a_request_moves_ends_it(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        keep, short, gone = bench.ask(1, SOME, members=3), bench.ask(2, LONG), bench.ask(3, 1)
        await bench.until_held(*bench.pool.pids.values())
        bench.let_go()
        await gone
        short.cancel()
        with pytest.raises(asyncio.CancelledError):
            await short
        assert_right(await keep, 1, SOME, 3)

    packing(tmp_path).run(main)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_a_request_moves_loses_nothing(tmp_path, victim: int):
    """Killed in the step before the answer (1, the source), or before it has received (0)."""

    async def main(bench: Bench):
        bench.hold()
        keep, short, gone = bench.ask(1, SOME, members=3), bench.ask(2, SOME), bench.ask(3, 1)
        pids = dict(bench.pool.pids)
        await bench.until_held(*pids.values())
        bench.let_go()
        await gone
        assert [entry.target for entry in bench.backend._open.values()] == [None, 0]
        os.kill(pids[victim], signal.SIGKILL)
        assert_right(await keep, 1, SOME, 3)
        assert_right(await short, 2, SOME)
        assert f"pid {pids[victim]}" in bench.reports[0]

    packing(tmp_path).run(main)


def test_what_was_moved_before_a_death_keeps_what_it_had_then(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        keep, short, gone = bench.ask(1, LONG, members=3), bench.ask(2, SOME), bench.ask(3, 1)
        await bench.until_held(*bench.pool.pids.values())
        bench.let_go()
        await gone
        await until(lambda: bench.backend.num_moved == 2)
        (moved,) = [e for e in bench.backend._open.values() if e.label == "group 2"]
        had = {member: len(tokens) for member, tokens in moved.begun.items()}
        assert min(had.values()) >= 1
        os.kill(bench.pool.pids[0], signal.SIGKILL)
        await until(lambda: len(bench.reports) >= 1)
        assert {m: len(tokens) for m, tokens in zip((0, 1), moved.sent.begun, strict=True)} == had
        assert moved.engine == 1
        assert_right(await short, 2, SOME)
        keep.cancel()
        await asyncio.gather(keep, return_exceptions=True)

    packing(tmp_path).run(main)
