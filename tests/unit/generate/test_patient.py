"""Groups that do not end cost one group, and neither the step nor the run."""

from __future__ import annotations

import asyncio

import pytest

from lagzero.errors import GroupLost
from lagzero.generate.patient import PatientGenerator
from lagzero.plan.clock import run_virtual
from lagzero.types import Group, Prompt

PROMPT = Prompt("p7", (1,), "")


class Slow:
    """Ends its first ``num_lost`` plays never, later ones after 3 seconds."""

    def __init__(self, num_lost: int):
        self.num_lost = num_lost
        self.began: list[float] = []
        self.cancelled: list[float] = []

    async def play(self, index: int, prompt: Prompt) -> Group:
        now = asyncio.get_running_loop().time
        self.began.append(now())
        try:
            if len(self.began) <= self.num_lost:
                await asyncio.Event().wait()
            await asyncio.sleep(3)
        except asyncio.CancelledError:
            self.cancelled.append(now())
            raise
        return Group(index, prompt, ())


def test_a_group_in_time_is_left_alone():
    slow, said = Slow(0), []
    group = run_virtual(PatientGenerator(slow, 3.5, 1, said.append).play(4, PROMPT))
    assert (group.index, slow.began, said) == (4, [0.0], [])


def test_a_lost_group_is_named_cancelled_and_begun_again():
    slow, said = Slow(1), []
    group = run_virtual(PatientGenerator(slow, 10, 1, said.append).play(4, PROMPT))
    assert group.index == 4
    assert (slow.began, slow.cancelled) == ([0.0, 10.0], [10.0])
    assert said == [
        "group 4 (prompt p7) has not ended within 10 s (rollout.timeout_s): it begins again"
    ]


def test_after_the_last_retry_the_group_is_given_up():
    slow, said = Slow(9), []
    with pytest.raises(GroupLost, match="timeout"):
        run_virtual(PatientGenerator(slow, 10, 2, said.append).play(4, PROMPT))
    assert slow.began == [0.0, 10.0, 20.0]
    assert [line.rpartition(": ")[2] for line in said] == [
        "it begins again",
        "it begins again",
        "it is given up",
    ]
