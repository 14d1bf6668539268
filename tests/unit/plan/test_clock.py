from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator

import pytest

from lagzero.plan.clock import Deadlock, VirtualLoop, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_year_of_sleep_takes_no_time_and_wakes_in_order():
    woken: list[tuple[float, str]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((now(), name))

    async def main() -> None:
        await asyncio.gather(sleeper("year", 3.2e7), sleeper("b", 1.5), sleeper("a", 0.25))

    began = time.perf_counter()
    run_virtual(main())
    assert woken == [(0.25, "a"), (1.5, "b"), (3.2e7, "year")]
    assert time.perf_counter() - began < 1


def test_timers_of_one_instant_fire_in_the_order_they_were_set():
    fired: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(5):
            loop.call_at(7.0, fired.append, number)
        loop.call_at(6.0, fired.append, -1)
        await asyncio.sleep(8)

    run_virtual(main())
    assert fired == [-1, 0, 1, 2, 3, 4]


def test_time_stands_still_while_anything_is_ready():
    async def main() -> tuple[float, float]:
        asyncio.get_running_loop().call_later(1.0, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        before = now()
        await asyncio.sleep(1.0)
        return before, now()

    assert run_virtual(main()) == (0.0, 1.0)


def test_a_timer_in_the_past_fires_now_and_time_never_runs_back():
    async def main() -> list[float]:
        times: list[float] = []
        await asyncio.sleep(5)
        asyncio.get_running_loop().call_at(2.0, lambda: times.append(now()))
        await asyncio.sleep(1)
        return [*times, now()]

    assert run_virtual(main()) == [5.0, 6.0]


def test_a_cancelled_timer_neither_fires_nor_moves_the_clock():
    async def main() -> float:
        asyncio.get_running_loop().call_later(100, pytest.fail, "fired").cancel()
        await asyncio.sleep(1)
        return now()

    assert run_virtual(main()) == 1.0


def test_timeouts_and_events_of_asyncio_work_on_it():
    async def main() -> float:
        event = asyncio.Event()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), 30)
        return now()

    assert run_virtual(main()) == 30.0


def test_a_deadlock_names_each_task_and_where_it_waits():
    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.gather(
            asyncio.create_task(never(), name="group 7"), asyncio.create_task(never(), name="other")
        )

    with pytest.raises(Deadlock) as stuck:
        run_virtual(main())
    assert stuck.value.at_s == 2.5
    assert [name for name, _ in stuck.value.tasks if not name.startswith("Task-")] == [
        "group 7",
        "other",
    ]
    assert "group 7 waits in Event.wait" in str(stuck.value)
    assert "at 2.5 s" in str(stuck.value)


def test_what_a_program_leaves_behind_is_cancelled_and_may_clean_up():
    cleaned: list[str] = []

    async def leftover() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            cleaned.append("done")

    async def main() -> str:
        task = asyncio.create_task(leftover())
        await asyncio.sleep(1)
        return task.get_name() and "result"

    assert run_virtual(main()) == "result"
    assert cleaned == ["done"]


def test_threads_are_refused():
    async def main() -> None:
        await asyncio.to_thread(lambda: None)

    with pytest.raises(RuntimeError, match="virtual time"):
        run_virtual(main())


def trace(seed: int | None) -> list[tuple[float, int]]:
    """Thirty tasks that hand one another turns, at times that often coincide."""
    seen: list[tuple[float, int]] = []

    async def worker(number: int) -> None:
        for turn in range(4):
            seen.append((now(), number))
            await asyncio.sleep((number * 7 + turn) % 3)

    async def main() -> None:
        await asyncio.gather(*[worker(number) for number in range(30)])

    run_virtual(main(), None if seed is None else random.Random(seed))
    return seen


def test_without_a_seed_callbacks_run_first_in_first_out():
    assert trace(None) == trace(None)
    assert [number for _, number in trace(None)[:30]] == list(range(30))


def test_a_seed_permutes_what_is_ready_and_replays_exactly():
    assert trace(3) == trace(3)
    assert len({tuple(trace(seed)) for seed in range(10)}) == 10
    for seed in range(10):
        times = [at for at, _ in trace(seed)]
        assert times == sorted(times)  # the order of time is never touched
        assert sorted(trace(seed)) == sorted(trace(None))


def test_each_ready_callback_is_drawn_with_equal_chance():
    first = [trace(seed)[0][1] for seed in range(600)]
    counts = [first.count(number) for number in range(30)]
    assert min(counts) > 4  # expected 20 each, standard deviation 4.4
    assert max(counts) < 40


def test_the_loop_refuses_to_run_inside_another():
    async def main() -> None:
        loop = VirtualLoop()
        try:
            loop.run_forever()
        finally:
            loop.close()

    with pytest.raises(RuntimeError, match="already"):
        run_virtual(main())


def callbacks_per_s(number: int = 60_000) -> float:
    loop = VirtualLoop()
    left = number

    def again() -> None:
        nonlocal left
        left -= 1
        if left:
            loop.call_later(left % 3, again)

    async def main() -> None:
        for _ in range(50):
            loop.call_soon(again)
        while left > 0:
            await asyncio.sleep(1)

    began = time.process_time()
    run_virtual(main(), loop=loop)
    return loop.num_callbacks / (time.process_time() - began)


def test_callbacks_are_cheap():
    """Measured above 300,000 a second on an idle core; a tenth of it leaves room for a busy one."""
    assert max(callbacks_per_s() for _ in range(3)) > 30_000


def test_an_abandoned_async_generator_is_closed():
    closed: list[bool] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    async def main() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(1)

    run_virtual(main())
    assert closed == [True]
