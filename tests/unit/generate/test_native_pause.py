"""Pausing for a trainer, taking requests back, and going on elsewhere lose no token."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from lagzero.engine.engine import Unfinished
from lagzero.engine.request import Sampling
from lagzero.types import Finish


def ids(rollouts) -> list[list[int]]:
    return [r.tokens["id"].tolist() for r in rollouts]


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("limits", [{}, {"round_tokens": 4, "kv_on_update": "recompute"}])
def test_a_pause_stops_between_two_steps_and_loses_nothing(release, limits, bench_of):
    """WS1: a trainer has the thread, and the memory if it wants; then all goes on."""

    async def main(bench):
        tasks = [bench.ask(n, new=20, members=3) for n in range(4)]
        for pause in range(1, 4):
            at = bench.policy.num_forwards + 3
            await bench.until(lambda at=at: bench.policy.num_forwards >= at)
            await bench.backend.pause(release)
            forwards = bench.policy.num_forwards
            assert (bench.engine._cache is None) == release
            assert release == (bench.engine._scheduler.pool.num_used == 0)
            await bench.compute.call(bench.engine.weights_changed, pause)
            tasks.append(bench.ask(3 + pause, new=5))  # it comes in the pause and waits
            await bench.idle()
            assert bench.policy.num_forwards == forwards
            assert not any(task.done() for task in tasks)
            await bench.backend.resume()
        return await asyncio.gather(*tasks)

    async def undisturbed(bench):
        tasks = [bench.ask(n, new=20, members=3) for n in range(4)]
        return await asyncio.gather(*tasks, *(bench.ask(n, new=5) for n in range(4, 7)))

    sizes = {"max_running": 3, **limits}
    got, want = bench_of(**sizes).run(main), bench_of(**sizes).run(undisturbed)
    assert [ids(group) for group in got] == [ids(group) for group in want]
    for rollouts in got:
        for rollout in rollouts:
            assert rollout.finish is Finish.LENGTH
            assert (np.diff(rollout.tokens["version"]) >= 0).all()


@pytest.mark.parametrize("release", [True, False])
def test_pausing_an_idle_backend_holds_later_requests_until_it_resumes(release, bench_of):
    """Before the very first step; pausing twice is one pause, resuming without one does nothing."""

    async def main(bench):
        before = bench.policy.num_forwards
        await bench.backend.resume()
        await bench.backend.pause(release)
        await bench.backend.pause(release)
        task = bench.ask(1)
        await bench.idle()
        assert bench.policy.num_forwards == before
        assert not task.done()
        await bench.backend.resume()
        return ids(await task)

    async def alone(bench):
        return ids(await bench.ask(1))

    assert bench_of().run(main) == bench_of().run(alone)


def test_cancelling_works_in_a_pause(bench_of):
    """All of those that wait, so that nothing is left to resume; later ones are served."""

    async def main(bench):
        tasks = [bench.ask(n, new=100) for n in range(5)]
        await bench.until(lambda: bench.policy.num_forwards > 3)
        await bench.backend.pause(release=True)
        tasks.append(bench.ask(5))
        await bench.idle()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await bench.compute.call(lambda: None)
        bench.assert_clean()
        await bench.backend.resume()
        return ids(await bench.ask(6))

    async def alone(bench):
        return ids(await bench.ask(6))

    assert bench_of().run(main) == bench_of().run(alone)


def test_a_cancelled_pause_is_none(bench_of):
    """It is cancelled while it waits for the step that runs."""

    async def main(bench):
        bench.policy.hold_after(4)
        task = bench.ask(1, new=20)
        await bench.held()
        pause = asyncio.ensure_future(bench.backend.pause(release=True))
        await asyncio.sleep(0)
        pause.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pause
        bench.policy.gate.set()
        return ids(await task)

    async def alone(bench):
        return ids(await bench.ask(1, new=20))

    assert bench_of().run(main) == bench_of().run(alone)


def test_a_step_that_fails_while_a_pause_waits_for_it_is_told(bench_of):
    async def main(bench):
        good = bench.policy.table.clone()
        bench.policy.hold_after(4)
        task = bench.ask(1, new=20)
        await bench.held()
        pause = asyncio.ensure_future(bench.backend.pause(release=False))
        await asyncio.sleep(0)
        bench.policy.table.fill_(math.nan)
        bench.policy.gate.set()
        with pytest.raises(FloatingPointError):
            await task
        await pause
        bench.policy.table.copy_(good)
        later = bench.ask(2)
        await bench.backend.resume()
        return ids(await later)

    async def alone(bench):
        return ids(await bench.ask(2))

    assert bench_of().run(main) == bench_of().run(alone)


@pytest.mark.parametrize("paused", [True, False])
def test_what_is_taken_back_goes_on_at_another_backend(paused, bench_of):
    """Its caller gets the tokens so far; other requests are left alone."""

    async def main(bench):
        bench.policy.hold_after(8)
        first, other = bench.ask(1, new=20, members=3), bench.ask(2, new=20, members=1)
        await bench.held()
        pause = asyncio.ensure_future(bench.backend.pause(release=False)) if paused else None
        places = asyncio.ensure_future(bench.backend.unfinished())
        await asyncio.sleep(0)
        if not paused:
            bench.backend.take_back(["group 1", "group 9"])
            await asyncio.sleep(0)
        bench.policy.gate.set()
        assert await places == {
            "group 1": Unfinished(3, 0, 0, 24),
            "group 2": Unfinished(1, 0, 0, 8),
        }
        if pause is not None:
            await pause
            bench.backend.take_back(["group 1", "group 9"])
        parts = await first
        assert not other.done()
        await bench.backend.resume()
        return parts, ids(await other)

    async def rest(bench):
        return ids(await bench.ask(1, new=20, members=3, begun=[part.tokens for part in parts]))

    async def whole(bench):
        return ids(await bench.ask(1, new=20, members=3)), ids(await bench.ask(2, 20, 1))

    parts, other = bench_of().run(main)
    assert [part.member for part in parts] == [0, 1, 2]
    assert {part.finish for part in parts} == {Finish.ABORT}
    assert [len(part.tokens) for part in parts] == [8] * 3
    assert bench_of().run(whole) == (bench_of().run(rest), other)


def test_taking_back_a_group_returns_its_ended_members_as_they_ended(bench_of):
    """The second member is begun with all but its last token, so it ends first."""

    async def whole(bench):
        return await bench.ask(1, new=60, members=2)

    full = bench_of().run(whole)

    async def main(bench):
        begun = [full[0].tokens[:0], full[1].tokens[:59]]
        task = bench.ask(1, new=60, members=2, begun=begun)
        await bench.until(lambda: bench.policy.num_forwards > 5)
        bench.backend.take_back(["group 1"])
        return await task

    parts = bench_of().run(main)
    assert [part.finish for part in parts] == [Finish.ABORT, Finish.LENGTH]
    assert ids(parts)[1] == ids(full)[1]
    assert ids(parts)[0] == ids(full)[0][: len(parts[0].tokens)]


def test_forgotten_prefixes_are_computed_again(bench_of):
    async def main(bench):
        sampling = Sampling(2)
        for _ in range(2):
            await bench.backend.complete((1,) * 9, [0], sampling)
        before = bench.backend.counters.num_cached_tokens
        await bench.backend.forget_prefixes()
        await bench.backend.complete((1,) * 9, [0], sampling)
        return before, bench.backend.counters.num_cached_tokens

    assert bench_of().run(main) == (8, 8)


def test_begun_tokens_that_do_not_fit_their_request_are_refused(bench_of):
    async def main(bench):
        (done,) = await bench.ask(1, members=1)
        with pytest.raises(ValueError, match="begun tokens for 1 members, but 2 seeds"):
            await bench.ask(1, members=2, begun=[done.tokens])

    bench_of().run(main)
