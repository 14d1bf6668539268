"""The loop with modelled stages under a virtual clock: sleeping costs nothing, waiting for
nothing is an error."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.errors import LagzeroError
from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.plan.clock import Deadlock
from lagzero.plan.clock import run_virtual as run
from lagzero.runtime.local_runtime import FreeGate, TurnGate
from lagzero.types import Batch, Group, Outcome, Prompt, Score, ScoredGroup, StepStats


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class World:
    """All stages at once, and what happened in them as (time, what, number)."""

    duration: Callable[[int], float] = lambda index: 1.0  # of playing a visit
    num_prompts: int | None = None
    empty: Callable[[Sequence[int]], bool] = lambda indices: False
    flat: Callable[[int], bool] = lambda index: False  # visits that teach nothing
    broken: str = ""  # the stage that raises
    broken_after: int = 0  # calls of it that succeed first
    gate: Any = field(default_factory=TurnGate)
    train_s: float = 10.0
    version: int = 0
    events: list[tuple[float, str, int]] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def note(self, what: str, number: int) -> None:
        self.events.append((now(), what, number))
        if what == self.broken:
            self.broken_after -= 1
            if self.broken_after < 0:
                raise RuntimeError(f"{what} is broken")

    def at(self, index: int) -> Prompt | None:
        self.note("source", index)
        if self.num_prompts is not None and index >= self.num_prompts:
            return None
        return Prompt(f"p{index}", (1,), "text")

    async def play(self, index: int, prompt: Prompt) -> Group:
        self.note("play", index)
        try:
            await asyncio.sleep(self.duration(index))
        finally:
            self.events.append((now(), "played", index))
        self.note("generator", index)
        return Group(index, prompt, ())

    async def score(self, group: Group) -> ScoredGroup:
        self.note("scorer", group.index)
        await asyncio.sleep(0.1)
        return ScoredGroup(group, ())

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        self.taken = [each.group.index for each in groups]
        self.note("preparer", len(groups))
        return Batch((), len(groups), 0 if self.empty(self.taken) else 1, {"reward/mean": 0.5})

    def useful(self, scored: ScoredGroup) -> bool:
        return not self.flat(scored.group.index)

    async def step(self, batch: Batch) -> StepStats:
        self.events.append((now(), "train", self.version))
        await asyncio.sleep(self.train_s)
        self.note("trainer", self.version)
        if batch.num_trained_tokens:
            self.version += 1
            self.trained.append(self.taken)
        self.events.append((now(), "trained", self.version))
        return StepStats(self.version, {"train/loss": 1.0})

    async def publish(self, version: int) -> None:
        await asyncio.sleep(0.5)
        self.note("link", version)

    async def after(self, progress: Progress, stats: StepStats) -> None:
        self.events.append((now(), "after", progress.step))
        await asyncio.sleep(2)
        self.progress.append(progress)
        self.note("after done", progress.step)

    def times(self, what: str) -> list[tuple[float, int]]:
        return [(at, number) for at, name, number in self.events if name == what]

    def loop(self, start: Progress | None = None, **schedule: Any) -> Loop:
        world = self

        class Observer:
            @asynccontextmanager
            async def stage(self, stage: str) -> AsyncGenerator[None]:
                world.note(f"observer {stage}", 0)
                yield

            def step(self, step: int, metrics: Any) -> None:
                world.note("observer", step)
                assert {"reward/mean": 0.5, "train/loss": 1.0}.items() <= metrics.items()

        class Trainer:
            step = world.step

        stages = Stages(self, self, self, self, Trainer(), self, self.gate, Observer())  # type: ignore[arg-type]
        plan = LoopSchedule(**{"steps": 3, "groups_per_step": 4, **schedule})
        start = start or Progress()
        self.version = start.step
        return Loop(stages, plan, start, self.after)


def mixed(index: int) -> float:
    """Durations that finish out of order, over several steps."""
    return 1 + (index * 7919 % 13)


# --- dynamic sampling --------------------------------------------------------------------------


def useful_of(groups: Sequence[Sequence[int]], flat: Callable[[int], bool]) -> list[list[int]]:
    return [[index for index in step if not flat(index)] for step in groups]


def test_another_prompt_is_played_as_soon_as_a_group_turns_out_useless():
    """Odd visits teach nothing: 0 to 6 hold the first four even ones."""
    world = World(flat=lambda index: index % 2 == 1, duration=lambda index: 1.0 + index % 2)
    assert run(world.loop(steps=2, resampled_groups=4).run()) == Progress(2, 15)
    assert world.trained == [[0, 2, 4, 6], [8, 10, 12, 14]]
    starts = {index: at for at, index in world.times("play")}
    # Scored at 2.1, 1 and 3 make room for 4 and 5; 5 for 6 at 2.1 + 2.1.
    assert [starts[index] for index in range(7)] == pytest.approx([0, 0, 0, 0, 2.1, 2.1, 4.2])


def test_at_the_limit_a_step_goes_on_with_what_it_has():
    """Of visits 0 to 5 two go; 1, 3 or 5 stays in the step, where it is dropped."""
    world = World(flat=lambda index: index % 2 == 1)
    assert run(world.loop(steps=2, resampled_groups=2).run()) == Progress(2, 12)
    assert useful_of(world.trained, world.flat) == [[0, 2, 4], [6, 8, 10]]
    assert [len(step) for step in world.trained] == [4, 4]


@given(
    st.lists(st.floats(0, 30), min_size=24, max_size=24),
    st.sets(st.integers(0, 40)),
    st.integers(0, 8),
)
def test_what_a_synchronous_step_learns_from_does_not_depend_on_who_finishes_first(
    durations: list[float], flat: set[int], limit: int
):
    def steps(duration: Callable[[int], float]) -> tuple[Progress, list[list[int]]]:
        world = World(duration=duration, flat=lambda index: index in flat)
        progress = run(world.loop(steps=3, resampled_groups=limit).run())
        return progress, useful_of(world.trained, world.flat)

    assert steps(lambda index: durations[index % 24]) == steps(lambda index: 1.0)


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_in_which_everything_is_useless_ends_after_a_bounded_number_of_plays(max_lag: int):
    """RF4: each of 3 empty steps plays 4 groups and 8 more in the place of others."""
    world = World(flat=lambda index: True, empty=lambda indices: True)
    with pytest.raises(LagzeroError, match="3 steps in a row had nothing to learn from"):
        run(world.loop(steps=99, max_lag=max_lag, resampled_groups=8, max_empty_steps=3).run())
    assert len(world.times("preparer")) == 3
    played = len(world.times("play"))
    assert played == 3 * 12 if not max_lag else 3 * 12 <= played <= (3 + max_lag) * 12


def test_a_limit_above_what_ends_a_run_without_training_is_reached_all_the_same():
    world = World(flat=lambda index: index % 100 < 99)
    assert run(world.loop(steps=1, groups_per_step=1, resampled_groups=99).run()) == Progress(
        1, 100
    )
    assert world.trained == [[99]]


# --- admission ---------------------------------------------------------------------------------


def test_without_lag_a_group_starts_once_the_weights_of_the_step_before_are_published():
    world = World(duration=mixed)
    assert run(world.loop(steps=4).run()) == Progress(4, 16)
    published = {version: at for at, version in world.times("link")}
    starts = world.times("play")
    assert [index for _, index in starts] == list(range(16))  # none beyond the last step
    for at, index in starts:
        assert index < 4 or at >= published[index // 4]


@pytest.mark.parametrize("max_lag", [1, 3])
def test_with_lag_generation_runs_as_far_ahead_as_is_allowed_and_no_further(max_lag: int):
    world = World(duration=mixed, gate=FreeGate())
    run(world.loop(steps=6, max_lag=max_lag).run())
    published = [(0.0, 0), *world.times("link")]
    lags = [
        index // 4 - max(version for when, version in published if when <= at)
        for at, index in world.times("play")
    ]
    assert max(lags) == max_lag


@given(st.lists(st.floats(0, 30), min_size=12, max_size=12), st.integers(0, 2))
def test_steps_take_the_same_groups_whatever_the_finishing_order(
    durations: list[float], max_lag: int
):
    world = World(duration=lambda i: durations[i % 12], gate=FreeGate())
    assert run(world.loop(max_lag=max_lag).run()) == Progress(3, 12)
    assert world.trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_without_a_window_what_finishes_first_is_trained_first():
    world = World(duration=lambda i: 15.0 if i == 0 else 1.0 + i / 100, gate=FreeGate())
    run(world.loop(steps=3, max_lag=1, window=None).run())
    assert world.trained[0] == [1, 2, 3, 4]
    assert 0 in world.trained[2]  # it is late, and not lost
    assert world.progress[0] == Progress(1, 0, (1, 2, 3, 4))


def test_what_happens_after_a_step_has_the_engine_to_itself():
    """Else an evaluation would share batches with the next groups, and a resumed run would not."""
    world = World(duration=mixed)
    run(world.loop(steps=3).run())
    for begun, step in world.times("after"):
        assert not [i for at, i in world.times("play") if begun <= at < begun + 2], step


# --- the gate ----------------------------------------------------------------------------------


def overlaps(world: World) -> bool:
    playing, training = 0, False
    for _, what, _ in world.events:
        playing += (what == "play") - (what == "played")
        training = what == "train" or (training and what != "trained")
        if training and playing:
            return True
    return False


def test_an_exclusive_step_never_overlaps_generation():
    world = World(duration=mixed, gate=TurnGate())
    run(world.loop(steps=5, max_lag=2).run())
    assert len(world.trained) == 5
    assert not overlaps(world)


def test_on_machines_of_their_own_generation_and_training_overlap():
    world = World(duration=mixed, gate=FreeGate())
    run(world.loop(steps=5, max_lag=2).run())
    assert overlaps(world)


# --- the end of the data -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompts", "steps"),
    [
        (10, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, [[0, 1, 2]]),
    ],
)
@pytest.mark.parametrize("max_lag", [0, 2])
def test_finite_data_end_with_a_short_step(num_prompts: int, steps: list[list[int]], max_lag: int):
    world = World(duration=mixed, num_prompts=num_prompts)
    assert run(world.loop(steps=99, max_lag=max_lag).run()) == Progress(len(steps), num_prompts)
    assert world.trained == steps


def test_no_data_are_no_steps():
    world = World(num_prompts=0)
    assert run(world.loop().run()) == Progress(0, 0)
    assert world.trained == []


def test_a_run_that_is_done_does_nothing():
    world = World()
    assert run(world.loop(Progress(3, 12), steps=3).run()) == Progress(3, 12)
    assert not world.times("play")


# --- failures ----------------------------------------------------------------------------------


async def failing(world: World, **schedule: Any) -> tuple[Loop, str, set[str]]:
    loop = world.loop(**schedule)
    with pytest.raises(RuntimeError) as caught:
        await loop.run()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    return loop, str(caught.value), {task.get_name() for task in left}


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("succeeding", [0, 1])
@pytest.mark.parametrize(
    "stage",
    [
        "source",
        "generator",
        "scorer",
        "preparer",
        "trainer",
        "link",
        "observer",
        "after done",
        *(f"observer {s}" for s in ("generate", "score", "prepare", "train", "sync")),
    ],
)
def test_a_failure_in_any_stage_is_raised_and_nothing_runs_on(
    stage: str, succeeding: int, max_lag: int
):
    world = World(duration=mixed, broken=stage, broken_after=succeeding, gate=FreeGate())
    _, message, left = run(failing(world, steps=5, max_lag=max_lag))
    assert message == f"{stage} is broken"
    assert left == set()
    plays, ends = world.times("play"), world.times("played")
    assert len(plays) == len(ends)  # what was cancelled got to clean up


def test_a_failure_while_training_lets_the_step_finish_and_counts_it():
    world = World(
        duration=lambda i: 1.0 if i < 4 else 5.0,
        broken="generator",
        broken_after=4,
        gate=FreeGate(),
    )
    loop, _, _ = run(failing(world, max_lag=1))
    assert loop.progress == Progress(1, 4)
    assert world.progress == [Progress(1, 4)]


def test_a_fault_of_all_groups_is_reported_once(caplog: pytest.LogCaptureFixture):
    world = World(broken="generator")
    run(failing(world))
    gc.collect()  # asyncio complains of what nobody looked at when it is collected
    assert caplog.records == []


def test_cancelling_a_run_cancels_all_that_it_started():
    async def cancelled(world: World) -> set[Any]:
        task = asyncio.create_task(world.loop().run())
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    world = World(duration=lambda i: 100.0)
    assert run(cancelled(world)) == set()
    assert [at for at, _ in world.times("played")] == [0.5] * 4


# --- stopping and resuming ---------------------------------------------------------------------


async def stopped_at(world: World, seconds: float, **schedule: Any) -> tuple[Progress, float]:
    loop = world.loop(**schedule)
    asyncio.get_running_loop().call_later(seconds, loop.stop)
    progress = await loop.run()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return progress, now()


def test_stopping_while_generating_ends_at_once():
    world = World(duration=lambda i: 1000.0)
    assert run(stopped_at(world, 3.0)) == (Progress(0, 0), 3.0)


def test_stopping_while_training_ends_after_that_step():
    # 1 s to play, 0.1 s to score, 10 s to train, 0.5 s to publish, 2 s for what comes after
    world = World()
    progress, ended = run(stopped_at(world, 5.0))
    assert progress == Progress(1, 4)
    assert ended == pytest.approx(13.6)
    assert world.progress == [progress]


def test_stopping_does_not_wait_for_groups_that_hold_a_step_up():
    """One device, a step ahead: the step that has its groups waits for a long one to leave."""
    world = World(duration=lambda i: 1.0 if i < 4 else 1000.0)
    progress, ended = run(stopped_at(world, 5.0, max_lag=1))
    assert progress == Progress(1, 4)
    assert ended == pytest.approx(5 + 10 + 0.5 + 2)


def test_stopping_before_the_start_trains_nothing():
    async def never(world: World) -> Progress:
        loop = world.loop()
        loop.stop()
        return await loop.run()

    world = World()
    assert run(never(world)) == Progress(0, 0)
    assert world.trained == []


@given(st.floats(0, 90), st.integers(0, 2), st.sampled_from([1, 3, 8, None]))
def test_a_resumed_run_trains_each_prompt_exactly_once(
    seconds: float, max_lag: int, window: int | None
):
    """RS1: 40 prompts, stopped with some in flight and some buffered, resumed, finished."""
    schedule = {"steps": 99, "groups_per_step": 4, "max_lag": max_lag, "window": window}
    first = World(duration=mixed, num_prompts=40, gate=FreeGate())
    progress, _ = run(stopped_at(first, seconds, **schedule))
    second = World(duration=mixed, num_prompts=40, gate=FreeGate())
    assert run(second.loop(progress, **schedule).run()) == Progress(10, 40)
    trained = [index for step in [*first.trained, *second.trained] for index in step]
    assert sorted(trained) == list(range(40))
    assert len(first.trained) == progress.step


@given(st.floats(0, 70))
def test_a_synchronous_run_continues_as_if_it_had_not_been_stopped(seconds: float):
    whole = World(duration=mixed)
    run(whole.loop(steps=5).run())
    first, second = World(duration=mixed), World(duration=mixed)
    progress, _ = run(stopped_at(first, seconds, steps=5))
    run(second.loop(progress, steps=5).run())
    assert first.trained + second.trained == whole.trained


# --- nothing to learn --------------------------------------------------------------------------


def test_empty_steps_are_consumed_and_admit_as_many_groups_anew():
    world = World(duration=mixed, empty=lambda indices: indices[0] in (0, 4, 12))
    assert run(world.loop(steps=3).run()) == Progress(3, 24)
    assert world.trained == [[8, 9, 10, 11], [16, 17, 18, 19], [20, 21, 22, 23]]
    assert [(p.step, p.next_index) for p in world.progress] == [
        (0, 4),
        (0, 8),
        (1, 12),
        (1, 16),
        (2, 20),
        (3, 24),
    ]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_too_many_empty_steps_in_a_row_end_the_run(max_lag: int):
    """RF4: a bounded number of tries, then a clear stop."""
    world = World(empty=lambda indices: indices[0] >= 4, gate=FreeGate())
    loop = world.loop(steps=9, max_lag=max_lag, max_empty_steps=3)
    with pytest.raises(LagzeroError, match="3 steps in a row") as stopped:
        run(loop.run())
    assert "reward/mean=0.5" in str(stopped.value)
    assert loop.progress == Progress(1, 16)
    assert world.progress[-1] == loop.progress  # whoever saves has heard of the last one


def test_empty_steps_between_others_do_not_add_up():
    world = World(empty=lambda indices: indices[0] % 8 == 0)
    run(world.loop(steps=6, max_empty_steps=2).run())
    assert len(world.trained) == 6


def test_the_reason_of_rollouts_without_a_score_is_passed_on():
    class Failing(World):
        async def score(self, group: Group) -> ScoredGroup:
            from lagzero.types import Finish, Rollout, sampled_tokens

            rollout = Rollout(0, sampled_tokens([1], [-1.0], [0]), "a", Finish.STOP)
            score = Score(Outcome.INFRASTRUCTURE, None, reason="grader: KeyError: 'gold'")
            return ScoredGroup(Group(group.index, group.prompt, (rollout,)), (score,))

    world = Failing(empty=lambda indices: True)
    with pytest.raises(LagzeroError, match=r"4 rollouts have no score.*KeyError: 'gold'"):
        run(world.loop(max_empty_steps=1).run())


def test_a_group_that_never_returns_is_found_and_named():
    class Hanging(World):
        async def play(self, index: int, prompt: Prompt) -> Group:
            if index == 5:
                await asyncio.Event().wait()
            return await super().play(index, prompt)

    world = Hanging(duration=mixed)
    with pytest.raises(Deadlock) as stuck:
        run(world.loop().run())
    assert tuple(name for name, _ in stuck.value.tasks if not name.startswith("Task-")) == (
        "group 5",
        "producing",
    )
    assert len(world.trained) == 1
