"""What tests of process pools share: a backend over fake engines, and how to wait for things."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from process_factories import expected, serve_fake

from lagzero.engine.request import Sampling
from lagzero.generate.process_backend import ProcessBackend
from lagzero.runtime.process_handle import ProcessPlan
from lagzero.runtime.process_pool import DeathRule, EnginePool
from lagzero.types import Finish, Rollout

LONG = 50_000  # tokens: more than is written before a test looks


class Bench:
    """A backend over fake engines, and what it reported."""

    def __init__(self, folder: Path, num: int = 1, factory=serve_fake, **rule):
        self.folder = folder
        self.reports: list[str] = []
        plan = ProcessPlan(functools.partial(factory, folder))
        self.pool = EnginePool([plan] * num, DeathRule(**rule), self.reports.append)
        self.backend = ProcessBackend(self.pool)

    def run(self, main: Callable[[Bench], Awaitable]):
        async def bounded():
            await asyncio.wait_for(self.backend.start(), 60)
            pids = set(self.pool.pids.values())
            try:
                return await asyncio.wait_for(main(self), 60)
            finally:
                pids |= set(self.pool.pids.values())
                await self.backend.close()
                assert not [pid for pid in pids if is_there(pid)]
                assert self.backend._open == {}
                for number in range(self.pool.num_engines):
                    router, place = self.backend._router_of(number)
                    assert router.load(place) == 0

        return asyncio.run(bounded())

    def ask(
        self, number: int, new: int = 5, members: int = 2, first: int = 1, part: int = 0
    ) -> asyncio.Task:
        seeds = [100 * number + member for member in range(members)]
        asked = (first, 2), seeds, Sampling(new)
        return asyncio.ensure_future(
            self.backend.complete(*asked, label=f"group {number}", part=part)
        )

    def hold(self) -> None:
        (self.folder / "hold").touch()

    def let_go(self) -> None:
        (self.folder / "hold").unlink()

    async def until_held(self, *pids: int) -> None:
        await until(lambda: all((self.folder / f"held-{pid}").exists() for pid in pids))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def is_there(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or during, the reading
        return False
    return state != "Z"


def assert_right(rollouts: Sequence[Rollout], number: int, new: int = 5, members: int = 2) -> None:
    assert [r.member for r in rollouts] == list(range(members))
    for rollout in rollouts:
        assert rollout.finish is Finish.LENGTH
        assert rollout.tokens["id"].tolist() == expected(100 * number + rollout.member, new)
