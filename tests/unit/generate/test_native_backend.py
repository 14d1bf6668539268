"""Many coroutines, one engine: each gets its own rollouts or its own failure, nothing is left."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from lagzero.engine.request import Sampling
from lagzero.errors import LagzeroError
from lagzero.types import Finish


def ids(rollouts) -> list[list[int]]:
    return [r.tokens["id"].tolist() for r in rollouts]


def test_many_callers_each_get_their_own(bench_of):
    async def main(bench):
        return await asyncio.gather(
            *(bench.ask(n, new=1 + n % 5, members=1 + n % 4) for n in range(60))
        )

    every = bench_of().run(main)
    for number, rollouts in enumerate(every):

        async def alone(bench, number=number):
            return await bench.ask(number, new=1 + number % 5, members=1 + number % 4)

        if number % 10 == 0:
            assert ids(bench_of().run(alone)) == ids(rollouts)
        assert [r.member for r in rollouts] == list(range(1 + number % 4))
        assert all(len(r.tokens) == 1 + number % 5 for r in rollouts)
        assert all(r.text == " ".join(map(str, r.tokens["id"])) for r in rollouts)


def test_callers_that_come_later_join_what_runs(bench_of):
    async def main(bench):
        first = bench.ask(1, new=40)
        await bench.until(lambda: bench.policy.num_forwards > 5)
        second = await bench.ask(2, new=3)
        assert not first.done()
        return [ids(await first), ids(second)]

    async def apart(bench):
        return [ids(await bench.ask(1, new=40)), ids(await bench.ask(2, new=3))]

    assert bench_of().run(main) == bench_of().run(apart)


def test_the_backend_works_again_after_it_was_idle_and_in_another_event_loop(bench_of):
    bench = bench_of()
    first = asyncio.run(bench.backend.complete((1,), [1], Sampling(3)))

    async def main(bench):
        return await bench.backend.complete((1,), [1], Sampling(3))

    assert ids(bench.run(main)) == ids(first)


def test_nothing_to_sample_still_answers(bench_of):
    """RF6."""

    async def main(bench):
        return await bench.ask(1, new=0, members=3)

    rollouts = bench_of().run(main)
    assert [(r.member, len(r.tokens), r.finish) for r in rollouts] == [
        (m, 0, Finish.LENGTH) for m in range(3)
    ]


@pytest.mark.parametrize("forwards", [0, 1, 5])
def test_cancelling_one_aborts_it_and_leaves_the_others(forwards, bench_of):
    """Before, during and after its prefill."""

    async def main(bench):
        bench.policy.gate.clear()
        keep, drop = bench.ask(1, new=20), bench.ask(2, new=300, members=5)
        bench.policy.gate.set()
        before = bench.policy.num_forwards
        await bench.until(lambda: bench.policy.num_forwards >= before + forwards)
        drop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drop
        later = await bench.ask(3)
        return ids(await keep), ids(later)

    async def alone(bench):
        return ids(await bench.ask(1, new=20)), ids(await bench.ask(3))

    bench = bench_of()
    assert bench.run(main) == bench_of().run(alone)
    assert bench.policy.num_forwards < 100


def test_all_may_be_cancelled_at_once(bench_of):
    async def main(bench):
        tasks = [bench.ask(n, new=200) for n in range(9)]
        await bench.until(lambda: bench.policy.num_forwards > 3)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)

    bench = bench_of()
    bench.run(main)
    assert bench.policy.num_forwards < 50


def test_an_engine_error_reaches_every_caller_and_later_ones_are_served(bench_of):
    """A failure becomes an exception, not an empty list; broken logits leave no trace."""

    async def main(bench):
        good = bench.policy.table.clone()
        tasks = [bench.ask(n, new=100) for n in range(9)]  # more members than slots
        await bench.until(lambda: bench.policy.num_forwards > 3)
        bench.policy.table.fill_(math.nan)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, FloatingPointError)
            assert "non-finite" in str(result)
        bench.policy.table.copy_(good)
        return [ids(await bench.ask(n)) for n in range(4)]

    async def healthy(bench):
        return [ids(await bench.ask(n)) for n in range(4)]

    assert bench_of().run(main) == bench_of().run(healthy)


def test_a_caller_that_comes_during_a_failing_step_is_told_or_served(bench_of):
    async def main(bench):
        good = bench.policy.table.clone()
        first = bench.ask(1)
        bench.policy.gate.clear()
        await asyncio.sleep(0.01)
        bench.policy.table.fill_(math.nan)
        second = bench.ask(2)  # queued behind the step that will fail
        await asyncio.sleep(0.01)
        bench.policy.gate.set()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert all(isinstance(r, FloatingPointError) for r in results)
        bench.policy.table.copy_(good)
        return ids(await bench.ask(3))

    assert len(bench_of().run(main)) == 2


@pytest.mark.parametrize(
    ("prompt", "seeds", "new", "error", "message"),
    [
        ((), [0], 4, LagzeroError, "no tokens"),
        ((1,) * 390, [0], 20, LagzeroError, "may grow to 410"),
        ((1,), [], 4, ValueError, "64-bit"),
        ((1,), [-5], 4, ValueError, "64-bit"),
        ((-1,), [0], 4, ValueError, "negative"),
    ],
)
def test_a_bad_request_fails_its_own_caller_alone(prompt, seeds, new, error, message, bench_of):
    async def main(bench):
        keep = bench.ask(1, new=30)
        await bench.until(lambda: bench.policy.num_forwards > 3)
        with pytest.raises(error, match=message):
            await bench.backend.complete(prompt, seeds, Sampling(new))
        return ids(await keep)

    async def alone(bench):
        return ids(await bench.ask(1, new=30))

    assert bench_of().run(main) == bench_of().run(alone)


def test_weights_may_change_between_two_steps_while_callers_wait(bench_of):
    """AS3: the announcement is a call on the same thread; nobody is aborted."""

    async def main(bench):
        tasks = [bench.ask(n, new=60, members=1) for n in range(5)]
        for version in range(1, 4):
            at = bench.policy.num_forwards + 8
            await bench.until(lambda at=at: bench.policy.num_forwards >= at)
            await bench.compute.call(bench.engine.weights_changed, version)
        return await asyncio.gather(*tasks)

    for (rollout,) in bench_of().run(main):
        assert rollout.finish is Finish.LENGTH
        assert (np.diff(rollout.tokens["version"]) >= 0).all()
        assert rollout.tokens["version"][0] == 0
        assert rollout.tokens["version"][-1] == 3
