"""An exclusive stage has the engine stand still, and what is being played goes on afterwards."""

from __future__ import annotations

import asyncio

import pytest

from lagzero.plan.clock import run_virtual
from lagzero.runtime.local_runtime import FreeGate, PauseGate, TurnGate


class Backend:
    def __init__(self):
        self.told: list[str] = []

    async def pause(self, release: bool) -> None:
        self.told.append(f"pause {release}")

    async def resume(self) -> None:
        self.told.append("resume")


@pytest.mark.parametrize(("inner", "enters_at"), [(FreeGate, 0.0), (TurnGate, 5.0)])
def test_what_is_played_is_waited_for_only_where_the_inner_gate_says_so(inner, enters_at: float):
    backend = Backend()
    gate = PauseGate(inner(), backend, release=True)
    entered: list[float] = []

    async def play():
        async with gate.shared("generate"):
            await asyncio.sleep(5)

    async def train():
        async with gate.exclusive("train"):
            entered.append(asyncio.get_running_loop().time())
            assert backend.told == ["pause True"]

    async def both():
        playing = asyncio.create_task(play())
        await asyncio.sleep(0)
        await train()
        await playing

    run_virtual(both())
    assert entered == [enters_at]
    assert backend.told == ["pause True", "resume"]


def test_the_engine_goes_on_when_the_stage_fails():
    backend = Backend()

    async def fail():
        async with PauseGate(FreeGate(), backend, release=False).exclusive("train"):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run_virtual(fail())
    assert backend.told == ["pause False", "resume"]
