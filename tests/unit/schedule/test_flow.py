from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.errors import LagzeroError
from lagzero.schedule.flow import Flow, LoopSchedule, Progress
from lagzero.schedule.staleness import Action, Contract
from lagzero.types import (
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Score,
    ScoredGroup,
    sampled_tokens,
)


def scored(index: int, version: int) -> ScoredGroup:
    rollout = Rollout(0, sampled_tokens([0], [0.0], [version]), "", Finish.STOP)
    return ScoredGroup(
        Group(index, Prompt(f"p{index}", (1,), ""), (rollout,)), (Score(Outcome.SCORED, 1.0),)
    )


def is_useful(group: ScoredGroup) -> bool:
    return group.group.index % 3 != 1


class Player:
    """Plays at random against a flow, as the loop would, and keeps books of its own."""

    def __init__(self, schedule: LoopSchedule, seed: int, start: Progress):
        self.schedule = schedule
        self.rng = random.Random(seed)
        self.flow = Flow(schedule, start, is_useful)
        self.version = start.step
        self.gone_before = {*range(start.next_index), *start.ahead}
        self.playing: dict[int, int] = {}  # visit -> version that its play began with
        self.plays: Counter[int] = Counter()
        self.fates: dict[int, str] = {}
        self.step_groups: list[ScoredGroup] = []
        self.lags: list[int] = []
        self.num_unlearnt = 0
        self.before = start.step * schedule.groups_per_step  # trained before a resume
        self.num_resampled = start.resampled  # since a step was closed

    def start(self) -> None:
        schedule = self.schedule
        trained = sum(fate == "trained" for fate in self.fates.values())
        open_or_trained = len(self.plays) - (len(self.fates) - trained) - self.num_unlearnt
        ahead = self.flow.published + schedule.max_lag + schedule.sync_every
        limit = ahead * schedule.groups_per_step + schedule.extra_groups
        index = self.flow.next_index()
        assert (index is not None) == (self.before + open_or_trained < limit)
        if index is None:
            return
        assert index not in self.plays
        assert index not in self.gone_before
        self.flow.start(index, Prompt(f"p{index}", (1,), ""))
        self.play(index)

    def play(self, index: int) -> None:
        self.playing[index] = self.flow.published
        self.plays[index] += 1

    def finish(self) -> None:
        if self.playing:
            index = self.rng.choice(list(self.playing))
            group = scored(index, self.playing.pop(index))
            self.flow.finish(index, group)
            if not is_useful(group) and self.num_resampled < self.schedule.resampled_groups:
                self.num_resampled += 1
                self.fates[index] = "resampled"

    def lose(self) -> None:
        if self.playing:
            self.end(self.rng.choice(list(self.playing)), "engine died")

    def end(self, index: int, reason: str) -> None:
        self.playing.pop(index, None)
        self.fates[index] = reason
        self.flow.give_up(index, reason)

    def take(self) -> None:
        opened = set(self.plays) - set(self.fates)
        taken = self.flow.take(self.version)
        for index in opened - set(self.flow._open):
            self.fates[index] = "stale"
        if isinstance(taken, int):
            self.flow.restart(taken)
            self.play(taken)
        elif taken is not None:
            index = taken.group.index
            assert self.fates[index] == "stale"  # it has left just now
            self.fates[index] = "trained"
            self.lags.append(self.version - int(taken.group.rollouts[0].tokens["version"][0]))
            self.step_groups.append(taken)
            if len(self.step_groups) == self.schedule.groups_per_step:
                self.close()

    def close(self) -> None:
        for index in self.flow.enough():
            self.end(index, "surplus")
        metrics = self.flow.close_step(self.step_groups, self.version)
        assert metrics["staleness/playing/count"] == len(self.playing)
        self.num_resampled = 0
        learnt = self.rng.random() < 0.8
        self.version += learnt
        every = self.schedule.sync_every
        published = self.version if self.version % every == 0 else self.flow.published
        unlearnt = 0 if learnt else len(self.step_groups)
        self.num_unlearnt += unlearnt
        self.step_groups = []
        for index in self.flow.publish(published, unlearnt):
            assert index in self.playing
            if self.flow.may_restart(index):
                self.flow.restart(index)
                self.play(index)
            else:
                self.end(index, "interrupted")
        self.check()

    def check(self) -> None:
        progress = self.flow.progress(self.version)
        assert progress.resampled == self.num_resampled
        gone = {*range(progress.next_index), *progress.ahead}
        assert gone == self.gone_before | set(self.fates)
        opened = set(self.plays) - set(self.fates)
        assert set(self.flow._open) == opened
        assert set(self.playing) <= opened


SCHEDULES = st.builds(
    LoopSchedule,
    steps=st.just(99),
    groups_per_step=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    window=st.sampled_from([1, 2, 5, None]),
    max_empty_steps=st.just(10**6),
    extra_groups=st.integers(0, 3),
    surplus=st.sampled_from(["carry", "drop"]),
    sync_every=st.integers(1, 3),
    contract=st.builds(
        Contract,
        action=st.sampled_from(["wait", "drop", "recycle", "interrupt", "accept"]),
        bound=st.one_of(st.none(), st.integers(0, 4)),
        clock=st.sampled_from(["oldest_token", "newest_token", "start"]),
        max_restarts=st.integers(0, 2),
    ),
    resampled_groups=st.integers(0, 5),
)


@given(
    SCHEDULES,
    st.integers(0, 2**31),
    st.sampled_from([Progress(), Progress(3, 9, (10, 12)), Progress(3, 9, (), 2)]),
)
def test_every_visit_has_one_fate_and_admission_keeps_to_its_formula(
    schedule: LoopSchedule, seed: int, start: Progress
):
    player = Player(schedule, seed, start)
    moves = [player.start] * 4 + [player.finish] * 4 + [player.take] * 4 + [player.lose]
    for _ in range(150):
        player.rng.choice(moves)()
    contract = schedule.contract
    player.check()
    assert max(player.plays.values(), default=0) <= 1 + contract.max_restarts
    if contract.action not in ("recycle", "interrupt"):
        assert max(player.plays.values(), default=0) <= 1
    if contract.bound is not None and contract.action in ("drop", "recycle", "interrupt"):
        assert max(player.lags, default=0) <= contract.bound
    else:
        assert "stale" not in player.fates.values()
    if contract.action != "interrupt":
        assert "interrupted" not in player.fates.values()
    assert all(lag >= 0 for lag in player.lags)


# --- by hand -----------------------------------------------------------------------------------


def begun(**schedule: Any) -> Flow:
    """A flow of two groups a step that has started all it may."""
    flow = Flow(LoopSchedule(**{"steps": 9, "groups_per_step": 2, **schedule}), Progress())
    start_all(flow)
    return flow


def start_all(flow: Flow) -> list[int]:
    started: list[int] = []
    while (index := flow.next_index()) is not None:
        flow.start(index, Prompt(f"p{index}", (1,), ""))
        started.append(index)
    return started


def indices(taken: ScoredGroup | int | None) -> Any:
    return taken.group.index if isinstance(taken, ScoredGroup) else taken


def test_a_stale_group_is_passed_over_and_another_takes_its_place():
    flow = begun(max_lag=1, contract=Contract("drop", 0))
    for index in range(4):
        flow.finish(index, scored(index, 0))
    assert [indices(flow.take(0)) for _ in range(2)] == [0, 1]
    flow.publish(1, 0)
    assert start_all(flow) == [4, 5]
    assert flow.take(1) is None  # 2 and 3 have lag 1, and go
    assert start_all(flow) == [6, 7]
    flow.finish(4, scored(4, 1))
    assert indices(flow.take(1)) == 4  # in start order: 2 and 3 are gone
    assert flow.progress(1) == Progress(1, 5)


def test_a_recycled_group_is_trained_with_the_present_weights_or_not_at_all():
    flow = begun(max_lag=1, window=2, contract=Contract("recycle", 0, max_restarts=1))
    for index in range(4):
        flow.finish(index, scored(index, 0))
    flow.take(0)
    flow.take(0)
    flow.publish(1, 0)
    assert flow.take(1) == 2
    assert flow.restart(2).id == "p2"
    assert flow.take(1) == 3
    flow.restart(3)
    flow.finish(2, scored(2, 1))
    assert indices(flow.take(1)) == 2
    flow.publish(2, 0)
    flow.finish(3, scored(3, 1))
    assert flow.take(2) is None  # too old again: no third play
    assert flow.progress(2) == Progress(2, 4)


def test_interrupting_ends_the_plays_that_a_version_makes_too_old():
    flow = begun(max_lag=2, contract=Contract("interrupt", 1, max_restarts=1))
    flow.finish(0, scored(0, 0))
    flow.finish(1, scored(1, 0))
    assert flow.publish(1, 0) == []
    assert start_all(flow) == [6, 7]
    assert flow.publish(2, 0) == [2, 3, 4, 5]  # not 0 and 1, which are done, nor 6 and 7
    assert flow.may_restart(2)
    flow.restart(2)
    assert not flow.may_restart(2)
    assert flow.publish(3, 0) == [3, 4, 5, 6, 7]  # those that were not begun again, too


def test_surplus_is_all_that_a_step_left_over():
    flow = begun(extra_groups=2, window=None, surplus="drop")
    for index in (3, 1, 0):
        flow.finish(index, scored(index, 0))
    assert [indices(flow.take(0)), indices(flow.take(0))] == [3, 1]
    assert flow.enough() == [0, 2]
    for index in flow.enough():
        flow.give_up(index, "surplus")
    assert flow.progress(0) == Progress(0, 4)
    flow.publish(1, 0)
    assert start_all(flow) == [4, 5, 6, 7]
    assert begun(extra_groups=2, window=None).enough() == []  # carried


def test_groups_of_a_step_that_learnt_nothing_make_room():
    flow = begun()
    for index in range(2):
        flow.finish(index, scored(index, 0))
        flow.take(0)
    flow.publish(0, 2)
    assert start_all(flow) == [2, 3]


def test_a_group_without_use_makes_room_until_the_step_has_given_up_its_share():
    flow = Flow(LoopSchedule(9, 2, resampled_groups=3), Progress(), is_useful)  # not 1, 4, 7, ..
    assert start_all(flow) == [0, 1]
    flow.finish(1, scored(1, 0))
    assert start_all(flow) == [2]
    flow.finish(2, scored(2, 0))
    flow.finish(0, scored(0, 0))
    assert start_all(flow) == []
    assert flow.progress(0) == Progress(0, 0, (1,), 1)
    taken = [flow.take(0), flow.take(0)]
    assert [indices(each) for each in taken] == [0, 2]
    metrics = flow.close_step([each for each in taken if isinstance(each, ScoredGroup)], 0)
    assert metrics["staleness/given_up/zero_spread/count"] == 1
    assert metrics["staleness/given_up/share"] == 1 / 3
    assert metrics["staleness/given_up/zero_spread/length_mean"] == 1
    assert flow.progress(1) == Progress(1, 3)


def test_a_resumed_step_has_what_was_left_of_its_share():
    schedule = LoopSchedule(9, 1, resampled_groups=2)
    flow = Flow(schedule, Progress(0, 1, (), 1), lambda group: False)
    assert start_all(flow) == [1]
    flow.finish(1, scored(1, 0))
    assert start_all(flow) == [2]
    flow.finish(2, scored(2, 0))  # the limit: it is handed over
    assert start_all(flow) == []
    assert indices(flow.take(0)) == 2


def test_a_resumed_flow_leaves_out_what_was_consumed():
    flow = Flow(LoopSchedule(9, 2, max_lag=1, window=None), Progress(3, 5, (6, 8)))
    assert start_all(flow) == [5, 7, 9, 10]
    assert flow.progress(3) == Progress(3, 5, (6, 8))


def test_a_visit_that_was_given_up_cannot_come_back():
    flow = begun()
    flow.give_up(0, "engine died")
    with pytest.raises(ValueError, match="item 0 was handed in twice"):
        flow.finish(0, scored(0, 0))
    assert flow.take(0) is None
    assert start_all(flow) == [2]


def test_a_run_that_only_loses_groups_ends_and_says_why():
    flow = Flow(LoopSchedule(9, 2, max_empty_steps=3), Progress())
    with pytest.raises(LagzeroError, match="none was trained") as stopped:
        for _ in range(100):
            for index in start_all(flow):
                flow.give_up(index, "the sandbox cannot be reached")
    assert "the sandbox cannot be reached" in str(stopped.value)


def test_trained_groups_between_losses_keep_a_run_going():
    flow = Flow(LoopSchedule(999, 1, max_empty_steps=3, window=None), Progress())
    for version in range(50):
        for _ in range(2):
            (index,) = start_all(flow)
            flow.give_up(index, "engine died")
        (index,) = start_all(flow)
        flow.finish(index, scored(index, version))
        assert indices(flow.take(version)) == index
        flow.publish(version + 1, 0)


@pytest.mark.parametrize("action", ["wait", "accept"])
def test_waiting_and_accepting_train_whatever_comes(action: Action):
    flow = begun(contract=Contract(action, 0))
    flow.finish(0, scored(0, 0))
    assert indices(flow.take(7)) == 0
