from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.plan.clock import run_virtual
from lagzero.runtime.local_runtime import FreeGate
from lagzero.schedule.flow import Flow
from lagzero.schedule.staleness import Contract, Verdict, lag_counts, provable_bound
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
    given_tokens,
    sampled_tokens,
)

ACTIONS = ("wait", "drop", "recycle", "interrupt", "accept")


def group(*rows: Sequence[int], index: int = 0) -> ScoredGroup:
    """A group with one rollout for each row of token versions."""
    rollouts = tuple(
        Rollout(member, sampled_tokens([0] * len(row), [0.0] * len(row), row), "", Finish.STOP)
        for member, row in enumerate(rows)
    )
    whole = Group(index, Prompt(f"p{index}", (1,), ""), rollouts)
    return ScoredGroup(whole, (Score(Outcome.SCORED, 1.0),) * len(rollouts))


# --- lags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clock", "lag"),
    [("oldest_token", 5), ("newest_token", 3), ("start", 6)],
)
def test_the_clocks_by_hand(clock: Any, lag: int):
    # Rollouts from versions 3 to 4 and 2 to 5; started at 1; trained at 7.
    # Oldest tokens: 3 and 2, so 5. Newest: 4 and 5, and the older of the two counts.
    assert Contract("accept", clock=clock).lag(group([3, 4], [2, 2, 5]), 1, 7) == lag


def test_only_trained_tokens_count():
    scored = group([1, 4, 5])
    scored.group.rollouts[0].tokens["trained"][0] = False
    assert Contract().lag(scored, 0, 6) == 2


def test_a_group_without_trained_tokens_has_the_version_of_its_start():
    tool = Rollout(0, given_tokens([1, 2]), "", Finish.STOP)
    scored = ScoredGroup(Group(0, Prompt("p", (1,), ""), (tool,)), (Score(Outcome.SCORED, 0.0),))
    for clock in ("oldest_token", "newest_token", "start"):
        assert Contract(clock=clock).lag(scored, 4, 6) == 2  # type: ignore[arg-type]
    empty = ScoredGroup(Group(0, Prompt("p", (1,), ""), ()), ())
    assert Contract().lag(empty, 4, 6) == 2


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4))
def test_newest_is_never_older_than_oldest(rows: list[list[int]]):
    scored = group(*rows)
    oldest, newest = Contract(), Contract(clock="newest_token")
    assert oldest.lag(scored, 0, 9) == 9 - min(map(min, rows))
    assert newest.lag(scored, 0, 9) == 9 - min(map(max, rows))


def test_tokens_are_counted_by_lag():
    scored = [group([1, 1, 3]), group([3])]
    assert lag_counts(scored, 4) == {3: 2, 1: 2}
    assert lag_counts([], 4) == {}


# --- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "limit", "kept"),
    [([3], 0, True), ([3, 4], 0, False), ([3, 4], 1, True), ([3, 5], 1, False)],
)
@pytest.mark.parametrize("action", ["drop", "recycle", "interrupt"])
def test_a_sample_spans_no_more_versions_than_the_bound(
    versions: list[int], limit: int, kept: bool, action: Any
):
    """AS1: trained at once by the version that wrote its last token."""
    contract = Contract(action, limit)
    lag = contract.lag(group(versions), versions[0], versions[-1])
    assert (contract.verdict(lag, 0) is Verdict.TRAIN) == kept


def test_on_policy_means_the_trainers_own_version():
    contract = Contract("drop", 0)
    assert contract.verdict(contract.lag(group([3]), 3, 3), 0) is Verdict.TRAIN
    assert contract.verdict(contract.lag(group([3]), 3, 4), 0) is Verdict.DROP
    assert contract.verdict(contract.lag(group([4], [3]), 3, 4), 0) is Verdict.DROP  # one is older


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("bound", [0, 1, 4, None])
def test_verdicts_at_and_above_the_bound(action: Any, bound: int | None):
    contract = Contract(action, bound, max_restarts=2)
    if bound is None:
        assert contract.verdict(99, 0) is Verdict.TRAIN
        return
    assert contract.verdict(bound, 9) is Verdict.TRAIN
    above = [contract.verdict(bound + 1, restarts) for restarts in range(4)]
    expected = {
        "wait": [Verdict.TRAIN] * 4,
        "accept": [Verdict.TRAIN] * 4,
        "drop": [Verdict.DROP] * 4,
        "recycle": [Verdict.RESTART] * 2 + [Verdict.DROP] * 2,
        "interrupt": [Verdict.RESTART] * 2 + [Verdict.DROP] * 2,
    }
    assert above == expected[action]


@pytest.mark.parametrize("action", ACTIONS)
def test_only_interrupt_ends_plays(action: Any):
    contract = Contract(action, 2)
    assert not contract.is_overdue(3, 5)
    assert contract.is_overdue(3, 6) == (action == "interrupt")
    assert not Contract(action).is_overdue(0, 99)


@pytest.mark.parametrize("wrong", [{"bound": -1}, {"max_restarts": -1}])
def test_negative_limits_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="bound="):
        Contract("drop", **wrong)  # type: ignore[arg-type]


# --- the bound that the schedule proves --------------------------------------------------------


@pytest.mark.parametrize(
    ("max_lag", "size", "window", "extra", "every", "bound"),
    [
        (0, 4, 1, 0, 1, 0),
        (2, 4, 1, 0, 1, 2),
        (2, 4, 2, 0, 1, 3),  # one group may be overtaken, which is up to a step
        (2, 4, 5, 0, 1, 3),
        (2, 4, 6, 0, 1, 4),
        (0, 4, 1, 4, 1, 1),
        (0, 4, 2, 4, 1, 2),
        (0, 4, 1, 0, 3, 2),
        (1, 4, None, 0, 1, None),
    ],
)
def test_the_provable_bound_by_hand(
    max_lag: int, size: int, window: int | None, extra: int, every: int, bound: int | None
):
    assert provable_bound(max_lag, size, window, extra, every) == bound


def largest_lag(schedule: LoopSchedule, delays: list[int], steps: int) -> int:
    """Play with a delay for each group, in groups handed over; return the largest lag seen."""
    flow = Flow(schedule, Progress())
    version, taken, largest = 0, 0, 0
    due: dict[int, int] = {}
    began: dict[int, int] = {}
    while version < steps:
        while (index := flow.next_index()) is not None:
            flow.start(index, Prompt(f"p{index}", (1,), ""))
            due[index] = taken + delays[index % len(delays)]
            began[index] = flow.published
        ready = sorted((at, i) for i, at in due.items() if at <= taken)
        # nobody is ready: the one that is due next ends, as time would pass until then
        for _, index in ready or sorted((at, i) for i, at in due.items())[:1]:
            del due[index]
            flow.finish(index, group([began[index]], index=index))
        while (scored := flow.take(version)) is not None:
            assert isinstance(scored, ScoredGroup)
            oldest = int(scored.group.rollouts[0].tokens["version"][0])
            largest = max(largest, version - oldest)
            taken += 1
            if taken % schedule.groups_per_step == 0:
                version += 1
                flow.publish(version if version % schedule.sync_every == 0 else flow.published, 0)
                break
    return largest


@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 7),
    st.integers(1, 3),
    st.lists(st.integers(0, 60), min_size=1, max_size=40),
)
def test_no_schedule_exceeds_the_provable_bound(
    max_lag: int, size: int, window: int, extra: int, every: int, delays: list[int]
):
    schedule = LoopSchedule(99, size, max_lag, window, extra_groups=extra, sync_every=every)
    bound = provable_bound(max_lag, size, window, extra, every)
    assert bound is not None
    assert largest_lag(schedule, delays, 12) <= bound


def test_the_provable_bound_is_reached():
    """One group that is passed by as many as the window lets pass."""
    schedule = LoopSchedule(99, 4, 1, 5)
    assert provable_bound(1, 4, 5, 0, 1) == 2
    assert largest_lag(schedule, [0, 0, 0, 0, 0, 0, 0, 60, *[0] * 32], 12) == 2


# --- a limit of 0 with everything in flight stale (AS1) ------------------------------------------


class Slow:
    """All stages; a play takes longer than a step, so at limit 0 all in flight go stale."""

    def __init__(self, play_s: float):
        self.play_s = play_s
        self.version = 0
        self.published = 0
        self.plays: Counter[int] = Counter()
        self.lags: list[int] = []

    def at(self, index: int) -> Prompt:
        return Prompt(f"p{index}", (1,), "")

    async def play(self, index: int, prompt: Prompt) -> Group:
        self.plays[index] += 1
        began = self.published
        await asyncio.sleep(self.play_s + index % 3)
        return group([began], index=index).group

    async def score(self, group: Group) -> ScoredGroup:
        return ScoredGroup(group, (Score(Outcome.SCORED, 1.0),))

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        self.lags += [self.version - int(g.group.rollouts[0].tokens["version"][0]) for g in groups]
        return Batch((), len(groups), 1)

    def useful(self, scored: ScoredGroup) -> bool:
        return True

    async def publish(self, version: int) -> None:
        self.published = version

    @asynccontextmanager
    async def stage(self, stage: str):
        yield

    def step(self, step: int, metrics: Any) -> None:
        pass

    async def after(self, progress: Progress, stats: StepStats) -> None:
        pass

    def run(self, **schedule: Any) -> Progress:
        world = self

        class Trainer:
            async def step(self, batch: Batch) -> StepStats:
                await asyncio.sleep(1.0)
                world.version += 1
                return StepStats(world.version, {})

        stages = Stages(self, self, self, self, Trainer(), self, FreeGate(), self)  # type: ignore[arg-type]
        plan = LoopSchedule(**{"steps": 20, "groups_per_step": 4, "window": None, **schedule})
        return run_virtual(Loop(stages, plan, Progress(), self.after).run())


@pytest.mark.parametrize("window", [1, 3, None])
@pytest.mark.parametrize("max_lag", [1, 3])
@pytest.mark.parametrize("action", ["drop", "recycle", "interrupt"])
@pytest.mark.parametrize("play_s", [0.1, 1.5, 7.0])
def test_a_limit_of_zero_never_deadlocks(
    action: Any, max_lag: int, window: int | None, play_s: float
):
    world = Slow(play_s)
    contract = Contract(action, 0, max_restarts=1)
    assert world.run(max_lag=max_lag, window=window, contract=contract).step == 20
    assert set(world.lags) == {0}
    assert max(world.plays.values()) <= 2  # started and, at most, once again


@pytest.mark.parametrize("action", ["drop", "recycle", "interrupt"])
def test_a_limit_that_a_new_group_just_keeps_between_two_transfers(action: Any):
    """With a transfer every third step the freshest groups are up to two versions old."""
    world = Slow(0.5)
    contract = Contract(action, 2, max_restarts=1)
    assert world.run(steps=21, sync_every=3, max_lag=1, contract=contract).step == 21
    assert set(world.lags) == {0, 1, 2}
