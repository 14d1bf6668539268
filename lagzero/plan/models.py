"""Models of the stages. Each satisfies its protocol, so the loop cannot tell them from real ones.

A modelled group carries no tokens: what happened to its rollouts is in its ``Visit``, which the
generator writes and the preparer takes out again.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lagzero.plan.engine import Engine, Recorder, Visit
from lagzero.plan.lengths import Draws
from lagzero.plan.meter import Meter
from lagzero.types import Batch, Group, Prompt, ScoredGroup, StepStats


def now_s() -> float:
    """Return the time of the running loop, seconds."""
    return asyncio.get_running_loop().time()


class FreeGate:
    """Each stage has machines of its own: all may run at once."""

    def shared(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter at once."""
        return nullcontext()

    def exclusive(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter at once."""
        return nullcontext()


class ModelSource:
    """Prompts that are only numbers; the data end where their lengths do.

    ``whole`` rounds lengths up to whole tokens, which is what engines write.
    """

    def __init__(
        self, lengths: Draws, group_size: int, num_prompts: int | None = None, whole: bool = False
    ):
        self._lengths, self._group_size, self._num_prompts = lengths, group_size, num_prompts
        self._whole = whole

    def at(self, index: int) -> Prompt | None:
        """Return the prompt of visit ``index``, or None past the last visit."""
        if self._num_prompts is not None and index >= self._num_prompts:
            return None
        if len(self.lengths(index)) < self._group_size:
            return None
        return Prompt(f"p{index}", (), "")

    def lengths(self, index: int) -> Sequence[float]:
        """Return the lengths of the group's rollouts: a function of the visit's number."""
        lengths = self._lengths.part(index * self._group_size, self._group_size)
        return [float(math.ceil(each)) for each in lengths] if self._whole else lengths


class Router:
    """Spreads groups over engines: in turn, or to the one with the fewest unfinished groups."""

    def __init__(self, engines: Sequence[Engine], least_loaded: bool):
        self._engines = engines
        self._loads = [0] * len(engines) if least_loaded else None
        self._heap = [(0, number) for number in range(len(engines))]  # may hold outdated loads
        self._turn = 0

    def pick(self) -> Engine:
        """Choose the engine of one more group."""
        if self._loads is None:
            self._turn += 1
            return self._engines[(self._turn - 1) % len(self._engines)]
        while True:
            load, number = self._heap[0]
            if load == self._loads[number]:
                break
            heapq.heappop(self._heap)
        self._loads[number] += 1
        heapq.heapreplace(self._heap, (load + 1, number))
        return self._engines[number]

    def left(self, engine: Engine) -> None:
        """Hear that a group has left its engine."""
        if self._loads is not None:
            self._loads[engine.number] -= 1
            heapq.heappush(self._heap, (self._loads[engine.number], engine.number))


class ModelGenerator:
    """Plays groups on modelled engines."""

    def __init__(self, source: ModelSource, router: Router, prompt_tokens: int):
        self.visits: dict[int, Visit] = {}  # of groups that have not been trained
        self.num_started = 0
        self._source, self._router, self._prompt_tokens = source, router, prompt_tokens

    async def play(self, index: int, prompt: Prompt) -> Group:
        """Return the group once the last of its rollouts has finished."""
        engine = self._router.pick()
        done = asyncio.get_running_loop().create_future()
        visit = Visit(index, self._source.lengths(index), self._prompt_tokens, done)
        self.visits[index] = visit
        self.num_started += 1
        engine.submit(visit)
        try:
            await done
        except asyncio.CancelledError:
            engine.abort(visit)
            raise
        finally:
            self._router.left(engine)
        return Group(index, prompt, ())


class ModelScorer:
    """Takes its time, as drawn; judges nothing."""

    def __init__(self, seconds: Draws | None, meter: Meter):
        self._seconds, self._meter = seconds, meter

    async def score(self, group: Group) -> ScoredGroup:
        """Return the group, some time later."""
        if self._seconds is not None:
            self._meter.advance(now_s())
            self._meter.scoring += 1
            try:
                await asyncio.sleep(self._seconds.part(group.index, 1)[0])
            finally:
                self._meter.advance(now_s())
                self._meter.scoring -= 1
        return ScoredGroup(group, ())


class ModelTrainer:
    """One optimiser step takes a fixed time and a time for each token."""

    def __init__(
        self, step_s: float, token_s: float, meter: Meter, recorder: Recorder | None = None
    ):
        self.version = 0
        self._step_s, self._token_s = step_s, token_s
        self._meter, self._recorder = meter, recorder

    async def step(self, batch: Batch) -> StepStats:
        """Train for a while; the version rises by one, unless the batch is empty."""
        if not batch.num_sequences:
            return StepStats(self.version, {})
        label = f"s{self.version}"
        self._meter.advance(now_s())
        self._meter.training = True
        if self._recorder is not None:
            self._recorder.begin("trainer/", label, now_s())
        await asyncio.sleep(self._step_s + self._token_s * batch.num_trained_tokens)
        self._meter.advance(now_s())
        self._meter.training = False
        if self._recorder is not None:
            self._recorder.end("trainer/", label, now_s())
        self.version += 1
        return StepStats(self.version, {})


class ModelPreparer:
    """Measures the groups of a step: tokens, lengths, and how stale they are.

    Each group has nothing to learn from with probability ``empty_share``; it is dropped here.
    """

    def __init__(
        self, generator: ModelGenerator, trainer: ModelTrainer, empty_share: float, seed: int
    ):
        self.num_dropped = 0
        self._generator, self._trainer = generator, trainer
        self._empty_share, self._seed = empty_share, seed

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        """Return a batch without tokens, whose metrics the loop hands to the observer."""
        visits = [self._generator.visits.pop(each.group.index) for each in groups]
        if self._empty_share:
            visits = [visit for visit in visits if not self._is_empty(visit.index)]
            self.num_dropped += len(groups) - len(visits)
        if not visits:
            return Batch((), 0, 0)
        return Batch(
            (),
            sum(len(visit.lengths) for visit in visits),
            math.ceil(sum(sum(visit.lengths) for visit in visits)),
            staleness(self._trainer.version, visits),
        )

    def _is_empty(self, index: int) -> bool:
        return random.Random(f"{self._seed} {index}").random() < self._empty_share


def staleness(version: int, visits: Sequence[Visit]) -> dict[str, float]:
    """Measure groups that policy ``version`` trains on.

    lag/mean, lag/max: versions since a rollout began. lag/token_mean: since a token was sampled,
    where engines take new weights in flight.
    """
    num_rollouts = sum(len(visit.lengths) for visit in visits)
    tokens = sum(sum(visit.lengths) for visit in visits)
    began = sum(visit.start_versions for visit in visits)
    sampled = sum(visit.token_versions for visit in visits)
    return {
        "groups": float(len(visits)),
        "tokens": tokens,
        "length/mean": tokens / num_rollouts,
        "lag/mean": version - began / num_rollouts,
        "lag/max": float(version - min(visit.oldest or 0 for visit in visits)),
        "lag/token_mean": max(0.0, version - sampled / tokens),  # rounding may go below
    }


class ModelLink:
    """Carries weights to all engines in ``seconds``; with ``pauses`` they stand still meanwhile."""

    def __init__(self, engines: Sequence[Engine], seconds: float, pauses: bool, meter: Meter):
        self._engines, self._seconds, self._pauses, self._meter = engines, seconds, pauses, meter

    async def publish(self, version: int) -> None:
        """Make ``version`` the policy of every engine; unchanged weights stay where they are."""
        if all(engine.version == version for engine in self._engines):
            return
        if self._seconds:
            self._meter.advance(now_s())
            self._meter.syncing, self._meter.held = True, self._pauses
            for engine in self._engines if self._pauses else ():
                engine.hold()
            await asyncio.sleep(self._seconds)
            self._meter.advance(now_s())
            self._meter.syncing = self._meter.held = False
        for engine in self._engines:
            engine.take_weights(version)
            if self._pauses and self._seconds:
                engine.release()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step: when, and the metrics that ``staleness`` names."""

    step: int
    at_s: float
    metrics: Mapping[str, float]


@dataclass(slots=True)
class ModelObserver:
    """Keeps what the loop reports of each step."""

    steps: list[StepRecord] = field(default_factory=list[StepRecord])

    def stage(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Time nothing: the meter sees the models themselves."""
        return nullcontext()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note the step and the virtual time."""
        if "tokens" in metrics:  # an empty step has none
            self.steps.append(StepRecord(step, now_s(), metrics))
