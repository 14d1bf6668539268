"""Several engine processes behind one backend: what callers get, whatever the engines do."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lagzero.errors import EngineDied, LagzeroError, WeightSyncError
from lagzero.generate.process_backend import ProcessBackend
from lagzero.runtime.messages import EngineFailed, TakeWeights
from lagzero.runtime.process_handle import ProcessPlan
from lagzero.runtime.process_pool import DeathRule, EnginePool
from lagzero.sync.segment import Segment
from lagzero.types import Finish

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # spawned processes inherit it
import process_factories as served  # noqa: E402
from process_bench import LONG, Bench, assert_right  # noqa: E402


def test_requests_are_spread_and_each_caller_gets_its_own(tmp_path):
    async def main(bench: Bench):
        every = await asyncio.gather(*(bench.ask(n, 1 + n % 5, 1 + n % 3) for n in range(40)))
        for number, rollouts in enumerate(every):
            assert_right(rollouts, number, 1 + number % 5, 1 + number % 3)
        bench.hold()
        tasks = [bench.ask(n) for n in range(6)]
        await bench.until_held(*bench.pool.pids.values())
        assert [len(bench.backend.pending(engine)) for engine in range(2)] == [3, 3]
        bench.let_go()
        await asyncio.gather(*tasks)
        tokens = sum((1 + n % 5) * (1 + n % 3) for n in range(40)) + 6 * 2 * 5
        assert bench.backend.counters.num_sampled_tokens == tokens
        pages = [pid % 100 for pid in bench.pool.pids.values()]
        assert bench.backend.counters.max_used_pages == max(pages)

    bench = Bench(tmp_path, 2)
    bench.run(main)
    assert bench.reports == []


def test_cancelling_aborts_in_the_engine_and_taking_back_keeps_what_is_there(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        drop, stop, keep = bench.ask(1, LONG), bench.ask(2, LONG), bench.ask(3, LONG // 10)
        await bench.until_held(*bench.pool.pids.values())
        drop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drop
        bench.let_go()
        await keep
        bench.backend.take_back(["group 2", "group 1", "nobody"])
        stopped = await stop
        assert {r.finish for r in stopped} == {Finish.ABORT}
        num = len(stopped[0].tokens)
        assert LONG // 10 <= num < LONG
        assert stopped[1].tokens["id"].tolist() == served.expected(201, num)
        await bench.ask(4)  # its report comes after all others
        dropped = bench.backend.counters.num_sampled_tokens - LONG // 10 * 2 - 2 * num - 10
        assert 0 <= dropped < num  # the abort came while others ran, not with their end

    Bench(tmp_path).run(main)


def test_interrupts_from_the_keyboard_are_the_owners_affair(tmp_path):
    async def main(bench: Bench):
        for pid in bench.pool.pids.values():
            os.kill(pid, signal.SIGINT)
        assert_right(await bench.ask(1), 1)

    bench = Bench(tmp_path)
    bench.run(main)
    assert bench.reports == []


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_a_process_keeps_to_its_cores_and_threads(tmp_path):
    core = max(os.sched_getaffinity(0))
    factory = functools.partial(served.serve_what_it_sees, tmp_path)
    bench = Bench(tmp_path)
    plan = ProcessPlan(factory, threads=3, cores=(core,))
    bench.pool = EnginePool([plan], DeathRule(), bench.reports.append)
    bench.backend = ProcessBackend(bench.pool)

    async def main(bench: Bench):
        assert (tmp_path / "seen").read_text() == f"[{core}] 3"

    bench.run(main)


def test_a_factory_that_raises_is_quoted(tmp_path):
    bench = Bench(tmp_path)
    good = ProcessPlan(functools.partial(served.serve_fake, tmp_path))
    bad = ProcessPlan(functools.partial(served.fail, "smol"))
    pool = EnginePool([good, bad], DeathRule(), bench.reports.append)

    async def main():
        await ProcessBackend(pool).start()

    with pytest.raises(LagzeroError) as failed:
        asyncio.run(main())
    text = str(failed.value)
    assert "engine 1" in text
    assert "failed with FileNotFoundError: there is no model 'smol'" in text
    assert 'process_factories.py", line' in text
    assert "in fail" in text
    assert "not started again" in text
    assert pool.pids == {}


def test_a_restart_that_cannot_work_ends_in_the_reason(tmp_path):
    async def main(bench: Bench):
        with pytest.raises(EngineDied, match="the model's file is gone"):
            await bench.ask(1, first=served.EXIT)
        assert bench.pool.num_restarts == 1

    Bench(tmp_path, factory=served.serve_once).run(main)


def test_a_function_that_no_other_process_can_import_is_refused():
    plan = ProcessPlan(lambda: served.serve_fake(Path()))
    with pytest.raises(LagzeroError, match="top of a module"):
        plan.packed(1.0)


def test_a_step_that_raises_fails_its_requests_and_serves_the_next(tmp_path):
    async def main(bench: Bench):
        tasks = [bench.ask(1, LONG), bench.ask(2, first=served.BREAK)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineFailed)
            assert str(result).startswith("engine 0: ArithmeticError: the step broke")
            assert "in step" in str(result)
        with pytest.raises(LagzeroError, match="request of 2 members refused"):
            await bench.ask(3, first=served.REFUSE)
        assert_right(await bench.ask(4), 4)

    bench = Bench(tmp_path)
    bench.run(main)
    assert bench.reports == []


def test_a_message_that_nobody_knows_is_an_error_that_says_so(tmp_path):
    async def main(bench: Bench):
        task = bench.ask(1, LONG)
        bench.pool.send(0, ("not", "agreed"))
        with pytest.raises(EngineDied, match=r"does not know the message \('not', 'agreed'\)"):
            await task

    Bench(tmp_path, on_death="stop").run(main)


def test_closing_tells_those_who_wait(tmp_path):
    async def main(bench: Bench):
        task = bench.ask(1, LONG * 100)
        await asyncio.sleep(0)
        await bench.backend.close()
        with pytest.raises(EngineDied, match="were closed"):
            await task

    Bench(tmp_path).run(main)


class Memory:
    """Two engines that open a piece of shared memory each; one is refused that is not 0."""

    def __init__(self, bench: Bench):
        self.segments = [Segment(64) for _ in range(2)]
        factory = functools.partial(served.serve_fake, bench.folder)
        plans = [ProcessPlan(factory, served.OpensMemory(s.name)) for s in self.segments]
        bench.pool = EnginePool(plans, DeathRule(), bench.reports.append)
        bench.backend = ProcessBackend(bench.pool)

    def spoil(self, engine: int, slot: int) -> None:
        self.segments[engine].memory.buf[8 * slot] = 1

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


@pytest.fixture
def shared(tmp_path) -> Iterator[tuple[Bench, Memory]]:
    bench = Bench(tmp_path)
    memory = Memory(bench)
    yield bench, memory
    memory.close()


def test_a_slot_is_free_when_every_engine_has_left_it(shared):
    bench, _ = shared

    async def main(bench: Bench):
        await bench.pool.switch(TakeWeights(0, 0))
        assert await bench.pool.free_slot() == 1
        bench.hold()
        tasks = [bench.ask(1), bench.ask(2)]
        await bench.until_held(*bench.pool.pids.values())
        switching = asyncio.ensure_future(bench.pool.switch(TakeWeights(1, 1)))
        await asyncio.sleep(0)
        switching.cancel()
        free = asyncio.ensure_future(bench.pool.free_slot())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not free.done()
        bench.let_go()
        assert await free == 0
        for task in tasks:
            for rollout in await task:
                versions = rollout.tokens["version"].tolist()  # the order comes when it comes
                assert versions[0] == 0
                assert versions == sorted(versions)

    bench.run(main)


def test_after_a_refused_first_publication_the_next_takes_the_other_slot(shared):
    bench, memory = shared

    async def main(bench: Bench):
        memory.spoil(engine=1, slot=0)
        assert await bench.pool.free_slot() == 0
        with pytest.raises(WeightSyncError, match=f"{bench.pool.pids[1]} sees 1 in slot 0"):
            await bench.pool.switch(TakeWeights(0, 0))
        assert await bench.pool.free_slot() == 1  # the first engine computes with slot 0
        await bench.pool.switch(TakeWeights(0, 1))
        assert await bench.pool.free_slot() == 0

    bench.run(main)


def test_a_refusal_that_nobody_waited_for_is_raised_at_the_next_publication(shared):
    bench, memory = shared

    async def main(bench: Bench):
        await bench.pool.switch(TakeWeights(0, 0))
        memory.spoil(engine=0, slot=1)
        switching = asyncio.ensure_future(bench.pool.switch(TakeWeights(1, 1)))
        await asyncio.sleep(0)
        switching.cancel()
        with pytest.raises(WeightSyncError, match="engine 0, version 1"):
            await bench.pool.free_slot()
        assert await bench.pool.free_slot() == 1  # all are back where they were

    bench.run(main)


def test_a_new_engine_that_cannot_take_the_weights_ends_the_run(shared):
    bench, memory = shared

    async def main(bench: Bench):
        await bench.pool.switch(TakeWeights(3, 1))
        bench.hold()
        tasks = [bench.ask(1), bench.ask(2)]
        await bench.until_held(*bench.pool.pids.values())
        memory.spoil(engine=0, slot=1)
        os.kill(bench.pool.pids[0], signal.SIGKILL)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDied)
            assert "engine 0 cannot take the weights it needs to start" in str(result)
            assert "version 3" in str(result)

    bench.run(main)
