"""Pools of engines take turns in standing still, and the trainer takes the place of each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lagzero.plan.clock import run_virtual
from lagzero.runtime.local_runtime import SwapGate


class Engines:
    """Engines that take a second to reach the end of a step."""

    def __init__(self):
        self.told: list[object] = []

    async def pause(self, engines: Sequence[int]) -> None:
        await asyncio.sleep(1)
        self.told.append(("pause", list(engines)))

    def resume(self, engines: Sequence[int]) -> None:
        self.told.append(("resume", list(engines)))


def gate_of(engines: Engines) -> SwapGate:
    return SwapGate([range(2), range(2, 4)], engines, lambda number: engines.told.append(number))


def test_a_step_is_trained_where_one_pool_stands_still_then_where_the_other_does():
    engines = Engines()
    gate = gate_of(engines)

    async def main():
        for step in range(3):
            async with gate.shared("generate"), gate.exclusive("train"):
                engines.told.append(f"step {step}")

    run_virtual(main())
    assert engines.told == [
        *(("pause", [0, 1]), 0, "step 0", ("resume", [0, 1])),
        *(("pause", [2, 3]), 1, "step 1", ("resume", [2, 3])),
        *(("pause", [0, 1]), 0, "step 2", ("resume", [0, 1])),
    ]


def test_engines_go_on_when_the_step_fails():
    engines = Engines()

    async def main():
        async with gate_of(engines).exclusive("train"):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run_virtual(main())
    assert engines.told[-1] == ("resume", [0, 1])


def test_the_trainer_moves_only_once_the_engines_stand_still():
    engines = Engines()
    entered: list[float] = []

    async def main():
        async with gate_of(engines).exclusive("train"):
            entered.append(asyncio.get_running_loop().time())

    run_virtual(main())
    assert entered == [1.0]
