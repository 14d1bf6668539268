"""The compute thread runs one call at a time to its end; the gate lets stages take turns."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from lagzero.runtime.local_runtime import ComputeThread, ThreadTrainer, TurnGate
from lagzero.types import StepStats


@pytest.fixture
def compute():
    thread = ComputeThread()
    yield thread
    thread.close()


def run(main):
    async def bounded():
        return await asyncio.wait_for(main, 20)

    return asyncio.run(bounded())


async def settle():
    """Let every task that can move do so."""
    for _ in range(20):
        await asyncio.sleep(0)


class Held:
    """A function that begins, waits until it is let go, and ends."""

    def __init__(self, error: Exception | None = None):
        self.begun, self.go, self.ended = (threading.Event() for _ in range(3))
        self.error = error

    def __call__(self):
        self.begun.set()
        assert self.go.wait(10)
        time.sleep(0.02)
        self.ended.set()
        if self.error:
            raise self.error
        return "done"


async def begun(held: Held) -> None:
    while not held.begun.is_set():
        await asyncio.sleep(0.001)


def test_calls_run_one_after_another_on_one_other_thread(compute):
    seen = []

    def note(number: int, *, name: str):
        seen.append((number, name, threading.get_ident()))
        return number * 2

    async def main():
        return await asyncio.gather(*(compute.call(note, n, name=f"n{n}") for n in range(20)))

    assert run(main()) == [2 * n for n in range(20)]
    assert [s[:2] for s in seen] == [(n, f"n{n}") for n in range(20)]
    assert {s[2] for s in seen} != {threading.get_ident()}
    assert len({s[2] for s in seen}) == 1


def test_an_exception_reaches_the_caller_and_the_thread_goes_on(compute):
    def fail():
        raise KeyError("why")

    async def main():
        with pytest.raises(KeyError, match="why"):
            await compute.call(fail)
        return await compute.call(lambda: 3)

    assert run(main()) == 3


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("error", [None, KeyError("late")])
def test_a_cancelled_call_that_has_begun_ends_before_its_caller_goes_on(compute, times, error):
    """Otherwise what follows would overlap it: a weight update beside a step."""
    held = Held(error)

    async def main():
        task = asyncio.create_task(compute.call(held))
        await begun(held)
        for _ in range(times):
            task.cancel()
            await settle()
        assert not task.done()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.ended.is_set()
        return await compute.call(lambda: 1)

    assert run(main()) == 1


def test_a_cancelled_call_that_has_not_begun_never_runs(compute):
    held, ran = Held(), []

    async def main():
        first = asyncio.create_task(compute.call(held))
        await begun(held)
        second = asyncio.create_task(compute.call(ran.append, 1))
        await settle()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not held.ended.is_set()  # it need not wait for another's call
        held.go.set()
        assert await first == "done"
        await compute.call(lambda: None)

    run(main())
    assert ran == []


def test_submitted_work_runs_after_what_is_queued(compute):
    seen = []

    async def main():
        call = asyncio.create_task(compute.call(seen.append, "call"))
        await settle()
        compute.submit(seen.append, "submitted")
        await call
        await compute.call(seen.append, "last")

    run(main())
    assert seen == ["call", "submitted", "last"]


def test_a_blocking_trainer_steps_on_the_thread(compute):
    class Trainer:
        def step(self, batch):
            return StepStats(batch, {"thread": float(threading.get_ident())})

    async def main():
        return await ThreadTrainer(Trainer(), compute).step(7)

    stats = run(main())
    assert stats.version == 7
    assert stats.metrics["thread"] != float(threading.get_ident())


class Stages:
    """Enters a gate's stages and notes who is inside."""

    def __init__(self):
        self.gate = TurnGate()
        self.inside: list[str] = []

    def enter(self, name: str) -> tuple[asyncio.Task, asyncio.Event]:
        """``s...`` shares, ``x...`` is exclusive; each stays until its event is set."""
        leave = asyncio.Event()
        scope = self.gate.shared if name[0] == "s" else self.gate.exclusive

        async def stay():
            async with scope(name):
                self.inside.append(name)
                exclusive = [n for n in self.inside if n[0] == "x"]
                assert not exclusive or self.inside == exclusive[:1]
                try:
                    await leave.wait()
                    if name.endswith("!"):
                        raise KeyError(name)
                finally:
                    self.inside.remove(name)

        return asyncio.create_task(stay()), leave


def test_shared_stages_run_together_and_an_exclusive_one_waits_for_all_of_them():
    async def main():
        s = Stages()
        one, leave_one = s.enter("s1")
        two, leave_two = s.enter("s2")
        await settle()
        assert s.inside == ["s1", "s2"]
        x, leave_x = s.enter("x")
        await settle()
        leave_one.set()
        await one
        await settle()
        assert s.inside == ["s2"]
        leave_two.set()
        await two
        await settle()
        assert s.inside == ["x"]
        leave_x.set()
        await x

    run(main())


def test_nothing_enters_beside_an_exclusive_stage_and_all_enter_after_it():
    async def main():
        s = Stages()
        x, leave_x = s.enter("x1")
        await settle()
        shared = [s.enter(f"s{n}") for n in range(3)]
        other, leave_other = s.enter("x2")
        await settle()
        assert s.inside == ["x1"]
        leave_x.set()
        await x
        await settle()
        assert s.inside == ["s0", "s1", "s2"]
        for task, leave in shared:
            leave.set()
            await task
        await settle()
        assert s.inside == ["x2"]
        leave_other.set()
        await other

    run(main())


@pytest.mark.parametrize("first", ["s!", "x!"])
@pytest.mark.parametrize("how", ["raises", "cancelled", "cancelled twice"])
def test_a_stage_that_fails_or_is_cancelled_leaves(first, how):
    async def main():
        s = Stages()
        task, leave = s.enter(first)
        await settle()
        waiting = [s.enter("x1"), s.enter("x2")]
        await settle()
        if how == "raises":
            leave.set()
        else:
            task.cancel()
            if how == "cancelled twice":
                await asyncio.sleep(0)
                task.cancel()
        with pytest.raises((KeyError, asyncio.CancelledError)):
            await task
        for waiter, go in waiting:
            go.set()
            await waiter
        assert s.inside == []

    run(main())


@pytest.mark.parametrize("name", ["s2", "x2"])
def test_one_that_gives_up_waiting_takes_nothing_with_it(name):
    async def main():
        s = Stages()
        x, leave_x = s.enter("x1")
        await settle()
        quitter, _ = s.enter(name)
        third, leave_third = s.enter("x3")
        await settle()
        quitter.cancel()
        await settle()
        assert quitter.cancelled()
        leave_x.set()
        await x
        await settle()
        assert s.inside == ["x3"]
        leave_third.set()
        await third

    run(main())


def test_a_gate_can_be_made_outside_of_an_event_loop():
    gate = TurnGate()

    async def main():
        async with gate.exclusive("train"):
            pass
        async with gate.shared("generate"):
            return True

    assert run(main())
