"""Some engine processes stand still while the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from lagzero.errors import EngineDied
from lagzero.generate.process_backend import ProcessBackend

sys.path.append(str(Path(__file__).parent))  # spawned processes inherit it
from process_bench import LONG, Bench, assert_right, until


def in_halves(folder: Path, **rule) -> Bench:
    bench = Bench(folder, 2, **rule)
    bench.backend = ProcessBackend(bench.pool, num_parts=2)
    return bench


def test_the_paused_half_waits_and_the_other_plays(tmp_path):
    async def main(bench: Bench):
        await bench.pool.pause([0])
        held, played = bench.ask(1, part=0), bench.ask(2, part=1)
        assert_right(await played, 2)
        assert_right(await bench.ask(4, part=1), 4)
        assert not held.done()
        assert [len(bench.backend.pending(engine)) for engine in range(2)] == [1, 0]
        bench.pool.resume([0])
        assert_right(await held, 1)

    in_halves(tmp_path).run(main)


def test_a_request_stays_in_its_part_and_goes_on_after_a_pause(tmp_path):
    async def main(bench: Bench):
        tasks = [bench.ask(n, LONG // 10, part=0) for n in range(3)]
        await asyncio.sleep(0)
        assert [len(bench.backend.pending(engine)) for engine in range(2)] == [3, 0]
        await bench.pool.pause([0])
        sampled = bench.backend.counters.num_sampled_tokens
        assert_right(await bench.ask(9, part=1), 9)
        assert bench.backend.counters.num_sampled_tokens == sampled + 10
        bench.pool.resume([0])
        for number, task in enumerate(tasks):
            assert_right(await task, number, LONG // 10)

    in_halves(tmp_path).run(main)


def test_an_engine_that_is_replaced_in_a_pause_stands_still_too(tmp_path):
    async def main(bench: Bench):
        await bench.pool.pause([0])
        task = bench.ask(1, part=0)
        os.kill(bench.pool.pids[0], signal.SIGKILL)
        await until(lambda: len(bench.reports) == 2)
        assert "group 1" in bench.reports[0]
        await bench.pool.pause([0])  # asks the new one as well, and waits for its answer
        assert_right(await bench.ask(2, part=1), 2)
        assert not task.done()
        bench.pool.resume([0])
        assert_right(await task, 1)

    in_halves(tmp_path).run(main)


def test_a_death_ends_the_wait_for_it(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        task = bench.ask(1, part=0)
        pid = bench.pool.pids[0]
        await bench.until_held(pid)
        pausing = asyncio.ensure_future(bench.pool.pause([0, 1]))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await pausing
        with pytest.raises(EngineDied):
            await task

    in_halves(tmp_path, on_death="stop").run(main)


def test_a_cancelled_pause_lets_the_engines_go_on(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        task = bench.ask(1, part=0)
        await bench.until_held(bench.pool.pids[0])
        pausing = asyncio.ensure_future(bench.pool.pause([0]))
        await asyncio.sleep(0.01)
        assert not pausing.done()
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        bench.let_go()
        assert_right(await task, 1)

    in_halves(tmp_path).run(main)
