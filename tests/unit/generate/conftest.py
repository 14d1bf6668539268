"""A backend on a scripted policy, for every test of the native backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Sampling
from lagzero.generate.native_backend import NativeBackend
from lagzero.runtime.local_runtime import ComputeThread

SIZE = 50


class Random:
    """A policy whose next token depends on the last one alone.

    ``gate`` may hold a forward up; ``hold_after(n)`` closes it in the n-th forward from now.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    exact = None
    native = None
    context_limit = 1 << 20

    def __init__(self):
        self.table = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        self.gate = threading.Event()
        self.gate.set()
        self.num_forwards = 0
        self.num_begun = 0
        self.hold_at = 0

    def hold_after(self, forwards: int) -> None:
        self.hold_at = self.num_begun + forwards

    def hidden(self, ids: torch.Tensor, position_ids: torch.Tensor, plan: object) -> torch.Tensor:
        self.num_begun += 1
        if self.num_begun == self.hold_at:
            self.gate.clear()
        assert self.gate.wait(20)
        self.num_forwards += 1
        return torch.nn.functional.one_hot(ids, SIZE).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden.argmax(-1)]


class Digits:
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class Bench:
    """A backend on a scripted policy, in an event loop that ends with everything checked."""

    def __init__(self, **limits):
        self.policy = Random()
        sizes = {"max_running": 6, "page_size": 4, "kv_cache_tokens": 400, **limits}
        self.engine = Engine(self.policy, Digits(), EngineLimits(**sizes))
        self.compute = ComputeThread()
        self.backend = NativeBackend(self.engine, self.compute)

    def run(self, main: Callable, **options):
        async def bounded():
            result = await asyncio.wait_for(main(self), 30)
            await self.compute.call(lambda: None)  # what was queued has run
            return result

        try:
            result = asyncio.run(bounded(), **options)
        finally:
            self.policy.gate.set()
            self.compute.close()
        self.assert_clean()
        return result

    def ask(self, number: int, new: int = 6, members: int = 2, begun=()) -> asyncio.Task:
        prompt = (number % SIZE, (number * 7) % SIZE)
        seeds = [100 * number + member for member in range(members)]
        return asyncio.ensure_future(
            self.backend.complete(prompt, seeds, Sampling(new), begun, label=f"group {number}")
        )

    def assert_clean(self):
        assert self.backend._open == {}
        assert self.backend._ended == {}
        assert not self.backend._takers
        assert not self.engine.has_work
        self.engine.check_integrity()

    async def held(self) -> None:
        """Wait until a forward has been held up."""
        await self.until(lambda: not self.policy.gate.is_set())

    async def idle(self) -> None:
        """Let everything happen that can: callbacks, then all that they queued on the thread."""
        for _ in range(5):
            await asyncio.sleep(0)
            await self.compute.call(lambda: None)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(scope="session")
def bench_of() -> type[Bench]:
    """Make a bench: ``bench_of(**limits)``."""
    return Bench
