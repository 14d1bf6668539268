from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.observe.catalog import checked
from lagzero.plan.clock import run_virtual
from lagzero.runtime.local_runtime import FreeGate
from lagzero.schedule.audit import Audit, averages, lag_metrics
from lagzero.schedule.staleness import Contract
from lagzero.types import (
    Batch,
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Score,
    ScoredGroup,
    StepStats,
    sampled_tokens,
)


def scored(
    index: int, versions: Sequence[Sequence[int]], reward: float = 1.0, prompt: str = ""
) -> ScoredGroup:
    """A group with one rollout for each row of token versions."""
    rollouts = tuple(
        Rollout(member, sampled_tokens([0] * len(row), [0.0] * len(row), row), "", Finish.STOP)
        for member, row in enumerate(versions)
    )
    group = Group(index, Prompt(prompt or f"p{index}", (1,), ""), rollouts)
    return ScoredGroup(group, (Score(Outcome.SCORED, reward),) * len(rollouts))


# --- lags --------------------------------------------------------------------------------------


def test_lags_are_counted_in_trained_tokens():
    group = scored(0, [[3, 3, 4], [5]])
    group.group.rollouts[0].tokens["trained"][0] = False
    # at version 5: lags 2, 1, 0
    assert lag_metrics([group], 5) == {
        "lag/token_mean": 1.0,
        "lag/max": 2.0,
        "lag/share/0": 1 / 3,
        "lag/share/1": 1 / 3,
        "lag/share/2": 1 / 3,
    }


def test_large_lags_share_a_figure():
    found = lag_metrics([scored(0, [[0, 1, 2, 3]])], 10)  # lags 10, 9, 8, 7
    shares = {name: value for name, value in found.items() if name.startswith("lag/share/")}
    assert shares == {**{f"lag/share/{n}": 0.0 for n in range(7)}, "lag/share/7": 0.25} | {
        "lag/share/8_up": 0.75
    }


def test_without_tokens_there_are_no_lags():
    assert lag_metrics([], 5) == {}
    assert lag_metrics([scored(0, [[]])], 5) == {}


@given(st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=1, max_size=5))
def test_the_histogram_equals_counting_one_by_one(rows: list[list[int]]):
    found = lag_metrics([scored(0, rows)], 12)
    lags = [12 - version for row in rows for version in row]
    if not lags:
        assert found == {}
        return
    counts = Counter(min(lag, 8) for lag in lags)
    for lag in range(9):
        name = "lag/share/8_up" if lag == 8 else f"lag/share/{lag}"
        assert found.get(name, 0.0) == pytest.approx(counts[lag] / len(lags))
    assert found["lag/token_mean"] == pytest.approx(np.mean(lags))
    assert found["lag/max"] == max(lags)


# --- what a step reports -----------------------------------------------------------------------


def test_a_step_tells_who_was_trained_given_up_and_kept():
    audit = Audit(Contract("drop", 1))
    for index in range(8):
        audit.started(index, f"p{index}")
    trained = [scored(0, [[4, 4], [4, 4]], 1.0), scored(1, [[3, 4, 4, 4], [4, 4]], 0.0)]
    audit.accepted(trained[0], 0)
    audit.accepted(trained[1], 1)
    audit.given_up(2, "stale", scored(2, [[1] * 10, [1] * 20], 0.5), 3)
    audit.given_up(3, "interrupted", None, 2)
    audit.given_up(4, "engine 1 died", None, 0)
    audit.restarted(5, scored(5, [[1]]), 3)
    found = audit.step(trained, 4, [scored(6, [[4] * 7], 0.25)])
    assert found == {
        "lag/token_mean": 0.1,
        "lag/max": 1.0,
        "lag/share/0": 0.9,
        "lag/share/1": 0.1,
        "lag/group_mean": 0.5,
        "lag/group_max": 1.0,
        "staleness/given_up/count": 3.0,
        "staleness/given_up/share": 3 / 5,
        "staleness/given_up/stale/count": 1.0,
        "staleness/given_up/stale/length_mean": 15.0,
        "staleness/given_up/stale/reward_mean": 0.5,
        "staleness/given_up/interrupted/count": 1.0,
        "staleness/given_up/lost/count": 1.0,
        "staleness/trained/length_mean": 2.5,
        "staleness/trained/reward_mean": 0.5,
        "staleness/waiting/count": 1.0,
        "staleness/waiting/length_mean": 7.0,
        "staleness/waiting/reward_mean": 0.25,
        "staleness/playing/count": 2.0,  # 5, again, and 7
        "staleness/restarts/count": 1.0,
        "staleness/alarm": 0.0,
    }
    assert checked(found) == found  # every name is in the catalogue


def test_counts_are_of_one_step():
    audit = Audit(Contract("drop", 1))
    audit.started(0, "a")
    audit.given_up(0, "stale", None, 2)
    audit.step([], 4, [])
    assert audit.step([], 5, []) == {
        "staleness/given_up/count": 0.0,
        "staleness/given_up/share": 0.0,
        "staleness/waiting/count": 0.0,
        "staleness/playing/count": 0.0,
        "staleness/restarts/count": 0.0,
        "staleness/alarm": 0.0,
    }


def test_rollouts_without_a_score_have_a_length_and_no_reward():
    group = scored(0, [[1, 1]]).group
    unscored = ScoredGroup(group, (Score(Outcome.UNSCORABLE, None),))
    assert averages("x", [unscored]) == {"x/length_mean": 2.0}
    assert averages("x", []) == {}


# --- the alarm ---------------------------------------------------------------------------------


def visit(audit: Audit, index: int, length: int, reason: str, prompt: str = "") -> None:
    """Start a visit and end it."""
    audit.started(index, prompt or f"p{index}")
    group = scored(index, [[0] * length], prompt=prompt)
    if reason:
        audit.given_up(index, reason, None if reason == "interrupted" else group, 3)
    else:
        audit.accepted(group, 0)


def test_the_alarm_says_how_much_is_lost_once_and_what_to_do():
    audit = Audit(Contract("drop", 2))
    for index in range(64):
        long = index % 4 == 3
        visit(audit, index, 90 if long else 10, "stale" if long else "", "hard" if long else "")
    metrics = audit.step([], 1, [])
    assert metrics["staleness/alarm"] == 1.0
    assert metrics["staleness/long_share"] == 0.25
    assert metrics["staleness/long_trained_share"] == 0.0
    assert metrics["staleness/long_lost_share"] == 1.0
    assert checked(metrics) == metrics
    (text,) = audit.alarms()
    assert "16 of the last 16 long ones were given up (100%), 0 of 48 others" in text
    assert "25% of what ended and 0% of what is trained" in text
    assert "90 tokens or more" in text
    assert "16 stale (action drop, bound 2)" in text
    assert "hard (16 times)" in text
    assert "Remedy: a larger staleness.bound" in text
    for index in range(64, 64 + 4096):
        if index == 64 + 4095:
            assert audit.step([], 2, [])["staleness/alarm"] == 1.0
            assert audit.alarms() == []  # said already
        visit(audit, index, 90 if index % 4 == 3 else 10, "stale" if index % 4 == 3 else "")
    audit.step([], 2, [])
    (text,) = audit.alarms()  # a reminder, of the last 512 visits
    assert "128 of the last 128 long ones" in text


def test_an_alarm_that_ended_may_be_raised_again():
    audit = Audit(Contract("interrupt", 2))
    texts: list[str] = []
    for index in range(3 * 640):
        long = index % 4 == 3
        losing = index // 640 != 1
        visit(audit, index, 90 if long else 10, "interrupted" if long and losing else "")
        if index % 16 == 15:
            audit.step([], index // 16, [])
            texts += audit.alarms()
    assert len(texts) == 2
    assert "did not finish" in texts[0]


def test_giving_up_long_and_short_alike_is_no_alarm():
    audit = Audit(Contract("drop", 2))
    for index in range(2000):
        visit(audit, index, 90 if index % 4 == 3 else 10, "stale" if index % 3 == 0 else "")
        if index % 16 == 15:
            assert audit.step([], 1, [])["staleness/alarm"] == 0.0
    assert audit.alarms() == []


def test_lost_groups_are_counted_and_tell_nothing_about_length():
    audit = Audit(Contract("drop", 2))
    for index in range(400):
        audit.started(index, f"p{index}")
        if index % 4:
            audit.accepted(scored(index, [[0] * (index % 7)]), 0)
        else:
            audit.given_up(index, "engine 0 died", None, 1)
    metrics = audit.step([], 1, [])
    assert metrics["staleness/given_up/lost/count"] == 100
    assert metrics["staleness/selection_p"] == 1.0


def test_groups_that_ran_out_of_time_count_as_long():
    audit = Audit(Contract("wait"))
    for index in range(128):
        audit.started(index, f"p{index}")
        if index % 8:
            audit.accepted(scored(index, [[0] * (index % 7)]), 0)
        else:
            audit.given_up(index, "timeout: no end within 60 s", None, 1)
    metrics = audit.step([], 1, [])
    assert metrics["staleness/given_up/timeout/count"] == 16
    assert metrics["staleness/alarm"] == 1.0
    (text,) = audit.alarms()
    assert "16 timeout" in text
    assert "Remedy: a larger rollout.timeout_s" in text


def test_the_first_play_is_what_the_data_are_like():
    """A prompt whose long answer was replaced by a short one counts as long."""
    audit = Audit(Contract("recycle", 2))
    for index in range(32):
        audit.started(index, f"p{index}")
        if index % 2:
            audit.restarted(index, scored(index, [[0] * 90]) if index % 4 == 1 else None, 3)
        audit.accepted(scored(index, [[0] * 10]), 0)
    assert audit.step([], 1, [])["staleness/long_share"] == 0.5


def test_a_prompt_that_was_trained_is_not_named():
    audit = Audit(Contract("drop", 2))
    for index in range(64):
        name = "one" if index % 2 else "two"
        visit(audit, index, 90 if index % 4 == 3 else 10, "stale" if index % 4 == 3 else "", name)
    audit.step([], 1, [])
    assert "again and again" not in audit.alarms()[0]


def test_another_measure_of_length_may_be_given():
    audit = Audit(Contract("drop", 2), length=lambda scored: float(scored.group.index % 2))
    for index in range(32):
        visit(audit, index, 5, "stale" if index % 2 else "")
    assert audit.step([], 1, [])["staleness/alarm"] == 1.0


# --- two kinds of prompts, lasting 1 and 5 steps, for 200 steps through the loop ----------------


class TwoKinds:
    """All stages. Every fourth prompt is slow: 5 steps and 50 tokens, against 1 and 10."""

    def __init__(self) -> None:
        self.version = 0
        self.plays: Counter[int] = Counter()
        self.trained: list[int] = []
        self.metrics: list[dict[str, float]] = []

    @staticmethod
    def is_slow(index: int) -> bool:
        return index % 4 == 3

    def at(self, index: int) -> Prompt:
        return Prompt(f"slow{index % 12}" if self.is_slow(index) else f"fast{index}", (1,), "")

    async def play(self, index: int, prompt: Prompt) -> Group:
        self.plays[index] += 1
        began = self.version
        # 10 s a step; the ends of plays fall between the steps
        await asyncio.sleep((50.0 if self.is_slow(index) else 10.0) - 1 + (index % 7) / 8)
        num = 50 if self.is_slow(index) else 10
        tokens = sampled_tokens([0] * num, [0.0] * num, [began] * num)
        return Group(index, prompt, (Rollout(0, tokens, "", Finish.STOP),))

    async def score(self, group: Group) -> ScoredGroup:
        return ScoredGroup(group, (Score(Outcome.SCORED, 1.0),))

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        self.trained += [each.group.index for each in groups]
        return Batch((), len(groups), 1)

    def useful(self, scored: ScoredGroup) -> bool:
        return True

    async def publish(self, version: int) -> None:
        self.version = version

    @asynccontextmanager
    async def stage(self, stage: str):
        yield

    async def after(self, progress: Progress, stats: StepStats) -> None:
        pass

    def run(self, max_lag: int, window: int | None, contract: Contract) -> list[str]:
        world = self

        class Trainer:
            version = 0

            async def step(self, batch: Batch) -> StepStats:
                await asyncio.sleep(10.0)
                self.version += 1
                return StepStats(self.version, {})

        class Observer:
            stage = world.stage

            def step(self, step: int, metrics: Any) -> None:
                checked(metrics)
                world.metrics.append(dict(metrics))

        stages = Stages(self, self, self, self, Trainer(), self, FreeGate(), Observer())  # type: ignore[arg-type]
        schedule = LoopSchedule(200, 8, max_lag, window, contract=contract)
        loop = Loop(stages, schedule, Progress(), self.after)
        run_virtual(loop.run())
        return loop.flow.audit.alarms()

    def slow_share(self) -> float:
        return sum(map(self.is_slow, self.trained)) / len(self.trained)


def test_dropping_starves_the_slow_kind_and_the_alarm_says_so():
    """AS4, drop: groups that last 5 steps are always above a bound of 2."""
    world = TwoKinds()
    alarms = world.run(2, None, Contract("drop", 2))
    assert len(world.trained) == 1600
    assert world.slow_share() == 0.0
    (text,) = alarms
    assert "long ones were given up (100%), 0 of" in text
    assert "50 tokens or more" in text
    assert "and 0% of what is trained" in text
    assert [f"slow{n}" in text.split("again and again")[1] for n in (3, 7, 11)] == [True] * 3
    page = (Path(__file__).parents[3] / "docs" / "staleness.md").read_text(encoding="utf-8")
    assert " ".join(text.split()) in " ".join(page.split())  # it is the page's example
    assert world.metrics[-1]["staleness/long_lost_share"] == 1.0
    assert world.metrics[-1]["staleness/alarm"] == 1.0


@pytest.mark.parametrize("action", ["recycle", "interrupt"])
def test_no_prompt_is_played_for_ever(action: Any):
    """AS4, recycle: each visit is played 3 times at most, and the loss is named."""
    world = TwoKinds()
    (text,) = world.run(6, None, Contract(action, 2, max_restarts=2))
    assert max(world.plays.values()) == 3
    assert len(world.trained) == 1600
    assert "long ones were given up" in text
    assert world.metrics[-1]["staleness/restarts/count"] > 0


@pytest.mark.parametrize(
    ("max_lag", "window", "contract"),
    [
        (2, 1, Contract("wait", 2)),
        (6, None, Contract("accept", 2)),
        (2, None, Contract("accept", 2)),
    ],
)
def test_waiting_and_accepting_keep_the_share_of_the_slow_kind(
    max_lag: int, window: int | None, contract: Contract
):
    """AS4, wait and accept: a quarter of the prompts is slow, and of the trained, within 10 %."""
    world = TwoKinds()
    assert world.run(max_lag, window, contract) == []
    assert world.slow_share() == pytest.approx(0.25, rel=0.1)
    lags = [each["lag/max"] for each in world.metrics]
    assert (max(lags) <= 2) == (contract.action == "wait")
