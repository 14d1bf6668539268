"""The loop under random times, faults, stops and orders of callbacks; and that this can fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from lagzero.loop import Loop, Progress
from lagzero.plan.explore import draw_setup, explore, main, run_schedule
from lagzero.plan.faults import FAULTS, World
from lagzero.runtime.local_runtime import TurnGate
from lagzero.schedule.admission import Admission
from lagzero.schedule.buffer import WindowedBuffer
from lagzero.schedule.flow import Flow
from lagzero.schedule.staleness import Contract, Verdict

SCHEDULES, PART = 20_000, 2_500  # parts, so that several workers share them


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(PART, SCHEDULES, PART))],
)
def test_no_schedule_violates_what_must_always_hold(first: int):
    """AS3: what runs is never aborted by a publication; RS1: none lost, none trained twice."""
    bad = explore(first, PART)
    assert {outcome.number: outcome.violations for outcome in bad} == {}


def test_schedules_reach_every_fault_and_every_ending():
    outcomes = [run_schedule(number) for number in range(1500)]
    endings = Counter(outcome.ending for outcome in outcomes)
    kinds = ("finished", "failed", "stuck", "stopped", "cancelled", "refused")
    assert min(endings[each] for each in kinds) > 10
    struck = Counter(o.setup.fault.kind for o in outcomes if o.ending in ("failed", "stuck"))
    assert set(struck) == {*FAULTS} - {"engine dies"}  # which ends no run
    assert min(struck.values()) > 10
    setups = [outcome.setup for outcome in outcomes]
    assert {setup.window for setup in setups} == {1, 2, 3, 8, None}
    assert {setup.max_lag for setup in setups} == {0, 1, 2, 3}
    seen = Counter(what for outcome in outcomes for what in {each[1] for each in outcome.events})
    happenings = ("dies", "re-sent", "is back", "stale", "surplus", "interrupted", "zero_spread")
    assert min(seen[each] for each in happenings) > 10
    assert sum("cannot be had" in what for what in seen) > 10
    replayed = Counter(
        outcome.setup.contract.action
        for outcome in outcomes
        if len({each[2] for each in outcome.events if each[1] == "play"})
        < sum(each[1] == "play" for each in outcome.events)
    )
    assert min(replayed[each] for each in ("recycle", "interrupt")) > 10


@pytest.mark.parametrize("number", [865, 1297, 2399, 2428])
def test_schedules_that_once_found_something_stay_clean(number: int):
    """A consumer and a producer that both sleep, although what was given up has made room."""
    assert run_schedule(number).violations == ()


def test_a_schedule_replays_exactly():
    for number in range(60):
        assert run_schedule(number) == run_schedule(number)


def test_a_schedule_replays_exactly_in_another_process():
    """With other hash seeds, so that the order of a set would show."""
    code = (
        "import hashlib\nfrom lagzero.plan.explore import run_schedule\n"
        "text = repr([run_schedule(n) for n in range(100)])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )

    def digest(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        return done.stdout

    assert digest("1") == digest("2")


# --- the harness finds what is broken ----------------------------------------------------------


def found(count: int = 400) -> str:
    return "\n".join("; ".join(outcome.violations) for outcome in explore(0, count))


def test_one_group_too_many_is_found(monkeypatch: pytest.MonkeyPatch):
    def lax(self: Admission) -> bool:
        limit = (self.published + self.max_lag + 1) * self.groups_per_step + self.extra_groups
        return self.started - self.dropped <= limit

    monkeypatch.setattr(Admission, "may_start", lax)
    assert "has lag 1, bound 0" in found()


def test_a_group_that_is_handed_over_twice_is_found(monkeypatch: pytest.MonkeyPatch):
    take = Flow.take
    last: list[Any] = []

    def again(self: Flow, version: int) -> Any:
        taken = take(self, version)
        if taken is None and last:
            return last.pop()
        last[:] = [] if taken is None or isinstance(taken, int) else [taken]
        return taken

    monkeypatch.setattr(Flow, "take", again)
    assert "trained twice" in found(100)


def test_a_contract_that_lets_old_groups_pass_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Contract, "verdict", lambda *_: Verdict.TRAIN)
    assert "has lag 2, bound 1" in found()


def test_a_group_that_is_played_for_ever_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Flow, "may_restart", lambda *_: True)
    assert "was started too often" in found(1000)


def test_a_group_that_is_given_up_and_waited_for_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WindowedBuffer, "skip", lambda *_: None)
    assert "nothing can happen any more" in found(100)


def test_room_that_nobody_hears_of_is_found(monkeypatch: pytest.MonkeyPatch):
    """A group that is given up makes room, and the last news was before that."""
    take = Flow.take

    def silent(self: Flow, version: int) -> Any:
        dropped = self._admission.dropped  # pyright: ignore[reportPrivateUsage]
        taken = take(self, version)
        self._admission.dropped = dropped  # pyright: ignore[reportPrivateUsage]
        return taken

    monkeypatch.setattr(Flow, "take", silent)
    assert "nothing can happen any more" in found()


def test_an_interrupted_play_that_goes_on_is_found(monkeypatch: pytest.MonkeyPatch):
    end = Loop._end_play  # pyright: ignore[reportPrivateUsage]

    def forgetful(self: Loop, index: int, reason: str, again: bool) -> None:
        self._plays.pop(index, None)  # pyright: ignore[reportPrivateUsage]
        end(self, index, reason, again)

    monkeypatch.setattr(Loop, "_end_play", forgetful)
    assert "raised" in found()


def test_a_group_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch):
    put = WindowedBuffer[Any].put

    def losing(self: Any, index: int, item: Any) -> None:
        if index != 2:
            put(self, index, item)

    monkeypatch.setattr(WindowedBuffer, "put", losing)
    assert "nothing can happen any more" in found(100)


def test_progress_that_forgets_what_overtook_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WindowedBuffer, "ahead", ())
    assert "is not what was consumed and given up" in found(100)


def test_more_resampling_than_a_step_may_do_is_found(monkeypatch: pytest.MonkeyPatch):
    close = Flow.close_step

    def never_full(self: Flow, *arguments: Any) -> Any:
        metrics = close(self, *arguments)
        self._resampled = -1  # pyright: ignore[reportPrivateUsage]
        return metrics

    monkeypatch.setattr(Flow, "close_step", never_full)
    assert "groups were resampled, limit" in found()


def test_groups_of_use_that_are_given_up_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(World, "useful", lambda self, scored: False)
    assert "was of use, and given up" in found(100)


def test_a_wake_up_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch):
    def forgetful(self: Any, task: Any) -> None:
        self._tasks.pop(task)

    monkeypatch.setattr(Loop, "_ended", forgetful)
    assert "nothing can happen any more" in found(100)


def test_turns_that_overlap_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TurnGate, "exclusive", TurnGate.shared)
    assert "training in a generating turn" in found()


def test_a_stop_that_is_not_obeyed_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Loop, "stop", lambda self: None)
    assert "a step began after stop" in found()


def test_tasks_that_run_on_are_found(monkeypatch: pytest.MonkeyPatch):
    run = Loop.run

    async def leaking(self: Loop) -> Progress:
        helper = asyncio.create_task(asyncio.sleep(1e9), name="helper")
        progress = await run(self)
        assert not helper.done()
        return progress

    monkeypatch.setattr(Loop, "run", leaking)
    assert "tasks were left running: ['helper']" in found(20)


def test_the_command_reports_and_replays(capsys: pytest.CaptureFixture[str]):
    assert main(["--schedules", "30", "--seed", "100"]) == 0
    assert capsys.readouterr().out.startswith("30 schedules from 100, 0 with violations")
    assert main(["--replay", "7"]) == 0
    shown = capsys.readouterr().out
    assert str(draw_setup(7)) in shown
    assert "play 0" in shown


def test_a_violation_makes_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(WindowedBuffer, "ahead", ())
    assert main(["--schedules", "50"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    number = int(first.split()[1].rstrip(":"))
    assert main(["--replay", str(number)]) == 1
    assert "is not what was consumed" in capsys.readouterr().out
