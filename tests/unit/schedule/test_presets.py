"""Each preset against its peer's rule, in numbers worked out by hand, run through the flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.schedule import presets
from lagzero.schedule.flow import Flow, Progress
from lagzero.schedule.presets import Preset
from lagzero.types import Finish, Group, Outcome, Prompt, Rollout, Score, ScoredGroup
from lagzero.types import sampled_tokens as tokens


class Driver:
    """Starts all that is admitted, and trains what finishes in start order."""

    def __init__(self, preset: Preset):
        self.preset = preset
        self.flow = Flow(preset.schedule(steps=10**6, max_empty_steps=10**6), Progress())
        self.version = 0
        self.began: dict[int, int] = {}  # groups that are being played, and with which version
        self.ends: dict[int, str] = {}
        self.start_all()

    def start_all(self) -> int:
        """Start until admission lets none, and return how many."""
        num = 0
        while (index := self.flow.next_index()) is not None:
            self.flow.start(index, Prompt(f"p{index}", (1,), ""))
            self.began[index] = self.flow.published
            num += 1
        return num

    def finish(self, index: int, *versions: int) -> None:
        """End a play; its tokens are of the version it began with, or as given."""
        row = versions or (self.began[index],)
        rollout = Rollout(0, tokens([0] * len(row), [0.0] * len(row), row), "", Finish.STOP)
        group = Group(index, Prompt(f"p{index}", (1,), ""), (rollout,))
        del self.began[index]
        self.flow.finish(index, ScoredGroup(group, (Score(Outcome.SCORED, 1.0),)))

    def take(self) -> int | None:
        """Return the group that is handed over next."""
        taken = self.flow.take(self.version)
        if isinstance(taken, int):
            self.began[taken] = self.flow.published
            self.flow.restart(taken)
            return self.take()
        return None if taken is None else taken.group.index

    def step(self, but: int | None = None) -> int:
        """Train a step on the oldest groups other than ``but``; return how many may start then."""
        taken: list[int] = []
        while len(taken) < self.preset.groups_per_step:
            if (index := self.take()) is None:
                self.finish(min(i for i in self.began if i != but))
            else:
                taken.append(index)
        for index in self.flow.enough():
            self.flow.give_up(index, "surplus")
        self.version += 1
        published = (
            self.version if self.version % self.preset.sync_every == 0 else self.flow.published
        )
        for index in self.flow.publish(published, 0):
            if self.flow.may_restart(index):
                self.flow.restart(index)
            else:
                self.flow.give_up(index, "interrupted")
                del self.began[index]
        return self.start_all()

    def fate(self, index: int, lag: int) -> str:
        """Let ``lag`` versions pass before a group finishes; tell what becomes of it then."""
        target = self.version + lag
        while self.version < target:
            self.step(but=index)
        if index not in self.began:
            return "interrupted"
        self.finish(index)
        while (taken := self.take()) is not None:
            if taken == index:
                return "trained"
        return "restarted" if index in self.began else "given up"


def fates(make: Callable[[], Preset], group: int, lags: range) -> list[str]:
    return [Driver(make()).fate(group, lag) for lag in lags]


# --- ours --------------------------------------------------------------------------------------


def test_sync_starts_one_step_at_a_time():
    run = Driver(presets.sync(4))
    assert len(run.began) == 4
    assert [run.step() for _ in range(3)] == [4, 4, 4]
    assert run.flow.published == 3


def test_one_step_off_has_lag_one_after_the_first_step():
    run = Driver(presets.one_step_off(4))
    assert run.began == dict.fromkeys(range(8), 0)
    assert run.step() == 4  # 0 to 3 are trained at version 0
    assert {run.began[i] for i in range(4, 8)} == {0}  # lag 1 when version 1 trains them
    assert {run.began[i] for i in range(8, 12)} == {1}
    assert run.step() == 4


# --- AReaL and SkyRL ---------------------------------------------------------------------------


def test_areal_capacity():
    run = Driver(presets.areal(8, max_head_offpolicyness=2))
    assert len(run.began) == 24  # (2 + 0 + 1) * 8 - 0
    assert [run.step(), run.step()] == [8, 8]  # (2 + 1 + 1) * 8 = 32 in all, then 40


def test_areal_without_offpolicyness_is_synchronous():
    run = Driver(presets.areal(8, max_head_offpolicyness=0))
    assert len(run.began) == 8
    assert run.step() == 8


def test_areal_gives_rejected_samples_their_place_back():
    run = Driver(presets.areal(8, max_head_offpolicyness=0))
    run.flow.give_up(3, "the reward could not be computed")
    assert run.start_all() == 1


def test_areal_trains_what_is_older_than_its_bound():
    assert fates(lambda: presets.areal(4, 1), 0, range(6)) == ["trained"] * 6
    assert presets.areal(4, 1, max_concurrent_rollouts=3).max_playing == 3
    assert presets.areal(4).kv_on_update == "recompute"


@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 6))
def test_skyrl_counts_from_the_step_being_worked_on(size: int, stale: int, version: int):
    run = Driver(presets.skyrl(size, max_staleness_steps=stale))
    for _ in range(version):
        run.step()
    global_step = version + 1
    started = version * size + len(run.began)
    assert started == (stale + global_step) * size


def test_skyrl_trains_and_warns():
    assert fates(lambda: presets.skyrl(4, 1), 0, range(5)) == ["trained"] * 5
    run = Driver(presets.skyrl(4, 1))
    for _ in range(3):
        run.step(but=0)
    run.finish(0)
    groups = [run.flow.take(run.version)]
    # its lag is 3, above 1: the audit of the step says so
    assert run.flow.close_step(groups, run.version)["lag/max"] == 3.0  # type: ignore[arg-type]


def test_skyrl_may_keep_or_recompute():
    assert presets.skyrl(4).kv_on_update == "keep"
    again = presets.skyrl(4, preserve_inflight_kv_cache_on_weight_update=False)
    assert again.kv_on_update == "recompute"
    assert presets.skyrl(4, num_parallel_generation_workers=6).max_playing == 6


# --- PipelineRL --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_lag", "first"),
    [(0, 4), (1, 5), (8, 5), (9, 6), (32, 8), (33, 9)],  # 4 + ceil(max_lag / 8)
)
def test_pipelinerl_counts_its_lag_in_samples(max_lag: int, first: int):
    run = Driver(presets.pipelinerl(4, attempts=8, max_lag=max_lag))
    assert len(run.began) == first
    assert [run.step(), run.step()] == [4, 4]


@pytest.mark.parametrize(
    ("interval", "steps"),
    [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)],  # of 4 * 8 = 32 samples each
)
def test_pipelinerl_transfers_after_whole_steps(interval: int, steps: int):
    run = Driver(presets.pipelinerl(4, 8, 16, weight_update_interval=interval))
    assert run.preset.sync_every == steps
    assert len(run.began) == 2 + 4 * steps  # ceil(16 / 8) + groups of one period
    assert [run.step() for _ in range(2 * steps)] == ([0] * (steps - 1) + [4 * steps]) * 2


def test_pipelinerl_never_rejects_for_age():
    assert fates(lambda: presets.pipelinerl(4, 8, 32), 0, range(6)) == ["trained"] * 6
    assert presets.pipelinerl(4, 8, 0).kv_on_update == "keep"


# --- prime-rl ----------------------------------------------------------------------------------


def test_prime_rl_is_one_batch_ahead_with_a_batch_in_flight():
    run = Driver(presets.prime_rl(4))
    assert len(run.began) == 12  # batches 0 and 1, and 4 in flight
    assert [run.step(), run.step()] == [4, 4]


@pytest.mark.parametrize(
    ("level", "factor", "first"), [(0, 1.0, 8), (2, 1.0, 16), (1, 2.5, 18), (1, 0.4, 9)]
)
def test_prime_rl_levels_and_oversampling(level: int, factor: float, first: int):
    # (level + 1) * 4 + floor(factor * 4)
    run = Driver(presets.prime_rl(4, level, oversampling_factor=factor))
    assert len(run.began) == first


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_prime_rl_cancels_in_flight_groups_beyond_the_limit(limit: int):
    """Trained at lag ``limit``, cancelled by the very next version."""
    found = fates(lambda: presets.prime_rl(4, max_off_policy_steps=limit), 0, range(limit + 3))
    assert found == ["trained"] * (limit + 1) + ["interrupted"] * 2


def test_prime_rl_starts_another_group_for_a_cancelled_one():
    run = Driver(presets.prime_rl(4, max_off_policy_steps=0))
    assert sorted(run.began) == list(range(12))
    # 0 to 3 are trained, 4 to 11 cancelled; 4 are admitted by the version and 8 by the cancelled
    assert run.step() == 12
    assert sorted(run.began) == list(range(12, 24))


def test_prime_rl_leaves_finished_groups_out_of_later_batches():
    run = Driver(presets.prime_rl(4, max_off_policy_steps=1))
    for index in range(12):
        run.finish(index)
    assert run.step() == 4  # 0 to 3, at version 0
    assert run.step() == 4  # 4 to 7, at version 1: lag 1
    assert run.take() is None  # 8 to 11 would have lag 2
    assert run.start_all() == 4


# --- TRL ---------------------------------------------------------------------------------------


def small_trl(**settings: Any) -> Preset:
    return presets.trl(4, **{"num_generations": 8, "queue_maxsize": 16, **settings})


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"max_staleness": 2}, 4 + 10),  # (2 * 32 + 16) / 8 = 10 beside the 4 that train
        ({"max_inflight_tasks": 20}, 4 + 5),  # ceil((20 + 16) / 8)
        ({"max_inflight_tasks": 16}, 4 + 4),
    ],
)
def test_trl_plays_and_queues_so_many(settings: dict[str, int], first: int):
    run = Driver(small_trl(**settings))
    assert len(run.began) == first
    assert run.step() == 4


@pytest.mark.parametrize(
    ("stale", "every", "bound"), [(0, 1, 0), (1, 1, 1), (4, 1, 4), (0, 2, 1), (1, 2, 3), (2, 3, 8)]
)
def test_trl_drops_above_the_bound_and_not_at_it(stale: int, every: int, bound: int):
    """Of a group that begins at version 0; bound = every * (stale + 1) - 1."""

    def make() -> Preset:
        return small_trl(max_staleness=stale, weight_sync_steps=every, max_inflight_tasks=1000)

    found = fates(make, 0, range(bound - 1 if bound else 0, bound + 3))
    assert found == ["trained"] * (len(found) - 2) + ["given up"] * 2


@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 6), st.integers(0, 40))
def test_the_bound_of_trl_in_versions_is_its_rule_in_transfers(
    stale: int, every: int, transfers: int, lag: int
):
    began = transfers * every  # groups begin with a version that was transferred
    bound = small_trl(
        max_staleness=stale, weight_sync_steps=every, max_inflight_tasks=8
    ).contract.bound
    assert bound is not None
    dropped = (began + lag) // every - transfers > stale
    assert dropped == (lag > bound)


def test_trl_without_staleness_generates_nothing_by_default():
    with pytest.raises(ValueError, match="generates nothing"):
        small_trl(max_staleness=0)
    assert small_trl(max_staleness=0, max_inflight_tasks=8).contract.bound == 0


# --- verl --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "first", "later"),
    [
        # groups that may start before the first transfer, and what each step then lets start
        ({}, 10, [10, 10]),
        ({"staleness_threshold": 0.5}, 15, [10, 10]),
        ({"staleness_threshold": 0.37}, 13, [10, 10]),  # int(10 * 1.37)
        ({"staleness_threshold": 1.0}, 20, [10, 10]),
        ({"require_batches": 2, "staleness_threshold": 0.1}, 22, [20, 20]),
        ({"trigger_parameter_sync_step": 3}, 30, [0, 0, 30, 0, 0, 30]),
        ({"trigger_parameter_sync_step": 3, "staleness_threshold": 0.5}, 45, [0, 0, 30]),
    ],
)
def test_verl_allows_a_fraction_of_the_samples_to_be_left_from_before(
    settings: dict[str, Any], first: int, later: list[int]
):
    run = Driver(presets.verl(10, **settings))
    assert len(run.began) == first
    assert [run.step() for _ in later] == later


@given(
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 2.0]),
    st.integers(0, 3),
)
def test_verl_carried_and_new_groups_keep_to_its_formula(
    batch: int, batches: int, every: int, threshold: float, periods: int
):
    run = Driver(presets.verl(batch, batches, every, threshold))
    for _ in range(periods * every):
        run.step()
    assert len(run.began) == int(batch * batches * (threshold + 1) * every)


def test_verl_drops_nothing():
    assert fates(lambda: presets.verl(4, staleness_threshold=1.0), 0, range(6)) == ["trained"] * 6


def test_verl_partial_rollouts_need_staleness():
    assert presets.verl(4, staleness_threshold=0.5).kv_on_update == "recompute"
    assert presets.verl(4, staleness_threshold=0.5, partial_rollout=False).kv_on_update is None
    assert presets.verl(4).kv_on_update is None


# --- all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: presets.sync(0),
        lambda: presets.areal(4, -1),
        lambda: presets.skyrl(4, -1),
        lambda: presets.pipelinerl(4, 0, 8),
        lambda: presets.pipelinerl(4, 8, -1),
        lambda: presets.pipelinerl(4, 8, 8, 0),
        lambda: presets.prime_rl(4, -1),
        lambda: presets.prime_rl(4, max_off_policy_steps=-1),
        lambda: presets.prime_rl(4, oversampling_factor=-0.5),
        lambda: presets.trl(4, num_generations=0),
        lambda: presets.trl(4, weight_sync_steps=0),
        lambda: presets.verl(0),
        lambda: presets.verl(4, trigger_parameter_sync_step=0),
        lambda: presets.verl(4, staleness_threshold=-0.1),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], Preset]):
    with pytest.raises(ValueError, match=">= "):
        make()


def test_a_schedule_is_made_of_it():
    preset = presets.trl(4, max_staleness=1, weight_sync_steps=2, max_inflight_tasks=8)
    schedule = preset.schedule(steps=50, max_empty_steps=3)
    assert (schedule.steps, schedule.max_empty_steps, schedule.groups_per_step) == (50, 3, 4)
    assert schedule.extra_groups == math.ceil((8 + 1024) / 8)
    assert (schedule.sync_every, schedule.window, schedule.contract.bound) == (2, None, 3)
