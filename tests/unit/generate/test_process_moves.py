"""Who is asked what when the last responses of an engine move to another: no processes at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lagzero.engine.request import Completion, Sampling
from lagzero.generate.process_backend import ProcessBackend
from lagzero.runtime.messages import AddRequest, Completions, TakeBack, ToEngine
from lagzero.schedule.router import Repacking
from lagzero.types import Finish, sampled_tokens


class Pool:
    """Engines that only listen; the test speaks for them."""

    error = None

    def __init__(self, num_engines: int):
        self.num_engines = num_engines
        self.sent: list[tuple[int, ToEngine]] = []

    def send(self, engine: int, message: ToEngine) -> None:
        self.sent.append((engine, message))

    def news(self) -> list[tuple[int, ToEngine]]:
        sent, self.sent = self.sent, []
        return sent


class Talk:
    """A backend of engines that say what the test wants them to."""

    def __init__(self, num_engines: int, rule: Repacking | None, **options: Any):
        self.pool = Pool(num_engines)
        pool: Any = self.pool
        self.backend = ProcessBackend(pool, repacking=rule, **options)

    async def ask(self, *seeds: int, begun=(), **options: Any) -> asyncio.Task:
        task = asyncio.ensure_future(
            self.backend.complete((1, 2), seeds, Sampling(9), begun, **options)
        )
        await asyncio.sleep(0)
        return task

    def says(self, engine: int, *ended: tuple[int, int, int, Finish]) -> None:
        """Each ended member: request id, its number there, how many tokens, and how."""
        parts = [
            Completion(number, member, tokens(length), "", finish, 0)
            for number, member, length, finish in ended
        ]
        nothing: Any = None
        self.backend.heard(engine, Completions(tuple(parts), nothing, 0))


def tokens(length: int):
    return sampled_tokens(list(range(length)), [-1.0] * length, [3] * length)


def test_members_that_ended_stay_behind_and_the_others_go_on_from_what_they_have():
    """Engine 0 has request 0 of three, engine 1 request 1 of three; a member of each ends."""

    async def main():
        talk = Talk(2, Repacking(below=3, most=8))
        first, second = await talk.ask(70, 71, 72), await talk.ask(80, 81, 82)
        talk.pool.news()
        talk.says(1, (1, 1, 4, Finish.STOP))
        assert talk.pool.news() == [(1, TakeBack((1,)))]
        talk.says(0, (0, 0, 1, Finish.STOP))  # no second wave meanwhile
        assert talk.pool.news() == []
        talk.says(1, (1, 0, 2, Finish.ABORT), (1, 2, 0, Finish.ABORT))
        ((engine, added),) = talk.pool.news()
        assert isinstance(added, AddRequest)
        assert (engine, added.request.id, added.request.seeds) == (0, 2, (80, 82))
        assert [len(begun) for begun in added.request.begun] == [2, 0]
        assert added.request.sampling == Sampling(9)
        assert talk.backend.num_moved == 2
        talk.says(0, (2, 1, 7, Finish.LENGTH), (2, 0, 5, Finish.STOP))
        done = await second
        assert [(r.member, len(r.tokens), r.finish) for r in done] == [
            (0, 5, Finish.STOP),
            (1, 4, Finish.STOP),
            (2, 7, Finish.LENGTH),
        ]
        talk.says(0, (0, 1, 3, Finish.STOP), (0, 2, 3, Finish.STOP))
        await first
        assert [talk.backend._routers[0].load(n) for n in range(2)] == [0, 0]

    asyncio.run(main())


def test_what_ends_before_it_is_taken_back_does_not_move():
    async def main():
        talk = Talk(2, Repacking(below=3, most=8))
        await talk.ask(70, 71, 72)
        second, third = await talk.ask(80, 81), await talk.ask(90)
        talk.pool.news()
        talk.says(1, (2, 0, 1, Finish.STOP))  # request 2 was on engine 1
        await third
        assert talk.pool.news() == [(1, TakeBack((1,)))]
        talk.says(1, (1, 0, 3, Finish.STOP), (1, 1, 3, Finish.STOP))
        assert len(await second) == 2
        assert talk.pool.news() == []

    asyncio.run(main())


def test_a_request_that_came_with_tokens_keeps_them_when_it_moves_untouched():
    async def main():
        talk = Talk(2, Repacking(below=3, most=8))
        await talk.ask(70, 71, 72)
        await talk.ask(80, begun=(tokens(4),))
        await talk.ask(90)
        talk.pool.news()
        talk.says(1, (2, 0, 1, Finish.STOP))
        assert talk.pool.news() == [(1, TakeBack((1,)))]
        talk.says(1, (1, 0, 4, Finish.ABORT))
        ((engine, added),) = talk.pool.news()
        assert engine == 0
        assert len(added.request.begun[0]) == 4
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(main())


def test_without_the_rule_nobody_moves():
    async def main():
        talk = Talk(2, None)
        await talk.ask(70, 71)
        await talk.ask(80, 81)
        talk.pool.news()
        talk.says(1, (1, 0, 1, Finish.STOP))
        assert talk.pool.news() == []
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("part", [0, 1])
def test_a_request_goes_to_the_least_loaded_engine_of_its_part(part: int):
    async def main():
        talk = Talk(6, None, num_parts=2)
        for seed in range(4):
            await talk.ask(seed, part=part)
        placed = [engine - 3 * part for engine, _ in talk.pool.news()]
        assert placed == [0, 1, 2, 0]
        view = talk.backend.part(1 - part)
        task = asyncio.ensure_future(view.complete((1,), (5,), Sampling(1), label="other"))
        await asyncio.sleep(0)
        ((engine, _),) = talk.pool.news()
        assert engine == 3 * (1 - part)
        for each in asyncio.all_tasks() - {asyncio.current_task()}:
            each.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
