"""Models of the stages. Each satisfies its protocol, so the loop cannot tell them from real ones.

What happened to a modelled group is in its ``Visit``, which the generator writes and the preparer
takes out again. The group itself carries two tokens, for the staleness contract.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lagzero.plan.engine import Engine, Visit
from lagzero.plan.lengths import Draws
from lagzero.plan.meter import Meter
from lagzero.plan.repack import Packer
from lagzero.plan.timeline import Recorder
from lagzero.schedule.audit import Audit
from lagzero.schedule.router import Policy, Repacking, Router
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


def now_s() -> float:
    """Return the time of the running loop, seconds."""
    return asyncio.get_running_loop().time()


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


class PauseGate:
    """Stages share devices: engines stand still while the trainer works on theirs.

    With one pool of engines all stand still, and what they run goes on afterwards (colocated). With
    two, steps are trained on the one and on the other in turn (swap).
    """

    def __init__(self, pools: Sequence[Sequence[Engine]], slots: int, meter: Meter):
        self._pools, self._slots, self._meter = pools, slots, meter  # slots of one pool
        self._turn = 0

    def shared(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter at once: what is played on engines that stand still waits there."""
        return nullcontext()

    @asynccontextmanager
    async def exclusive(self, stage: str) -> AsyncGenerator[None]:
        """Enter once the engines of the pool whose turn it is stand still."""
        pool = self._pools[self._turn % len(self._pools)]
        self._turn += 1
        still_s = max(engine.hold() for engine in pool)
        try:
            await asyncio.sleep(still_s - now_s())
            self._meter.advance(now_s())
            self._meter.taken = self._slots
            yield
        finally:
            self._meter.advance(now_s())
            self._meter.taken = 0
            for engine in pool:
                engine.release()


class ModelGenerator:
    """Plays groups on modelled engines.

    With several pools of engines, the groups of step s are played on pool s modulo their number.
    Each group carries the versions of its oldest token and of the last token of the rollout that
    ended first, which are all that a staleness contract asks for. ``repacking``, of a single pool,
    moves the last rollouts of an engine to another one.
    """

    def __init__(
        self,
        source: ModelSource,
        pools: Sequence[Sequence[Engine]],
        policy: Policy,
        prompt_tokens: int,
        groups_per_step: int = 1,
        repacking: Repacking | None = None,
    ):
        assert repacking is None or len(pools) == 1
        self.visits: dict[int, Visit] = {}  # of groups that have not been trained
        self.lost: list[Visit] = []  # what was written for nothing
        self.source, self._pools, self._prompt_tokens = source, pools, prompt_tokens
        self._routers = [Router(len(pool), policy) for pool in pools]
        self.packer: Packer | None = None
        if repacking is not None:
            self.packer = Packer(repacking, pools[0], self._routers[0])
        self._groups_per_step = groups_per_step
        self._rollouts: dict[tuple[int, int], tuple[Rollout]] = {}

    async def play(self, index: int, prompt: Prompt) -> Group:
        """Return the group once the last of its rollouts has finished."""
        pool = index // self._groups_per_step % len(self._pools)
        router, engines = self._routers[pool], self._pools[pool]
        done = asyncio.get_running_loop().create_future()
        lengths = self.source.lengths(index)
        visit = Visit(index, lengths, self._prompt_tokens, done, router.pick())
        self.give_up(index)  # it was played before
        self.visits[index] = visit
        engines[visit.engine].submit(visit)
        if self.packer is not None:
            self.packer.add(visit)
        try:
            await done
        except asyncio.CancelledError:
            engines[visit.engine].abort(visit)
            raise
        finally:
            router.left(visit.engine)
            if self.packer is not None:
                self.packer.remove(visit)
        return Group(index, prompt, self._history(visit.oldest or 0, visit.newest or 0))

    def give_up(self, index: int) -> None:
        """Hear that what was written for a visit will not be trained."""
        if index in self.visits:
            self.lost.append(self.visits.pop(index))

    def _history(self, oldest: int, newest: int) -> tuple[Rollout]:
        """Return one rollout of two tokens; there are few pairs of versions, so each is kept."""
        if (oldest, newest) not in self._rollouts:
            tokens = sampled_tokens([0, 0], [0.0, 0.0], [oldest, newest])
            self._rollouts[oldest, newest] = (Rollout(0, tokens, "", Finish.STOP),)
        return self._rollouts[oldest, newest]


class ModelAudit(Audit):
    """The audit, which also tells the generator what is given up, and counts it."""

    def __init__(self, contract: Contract, generator: ModelGenerator):
        super().__init__(contract, self._longest)
        self.num_started = 0
        self.num_restarts = 0
        self.num_given_up: Counter[str] = Counter()
        self.given_up_lengths = (0.0, 0)  # sum of what they would have had, number of rollouts
        self._generator = generator

    def _longest(self, scored: ScoredGroup) -> float:
        return max(self._generator.source.lengths(scored.group.index))

    def started(self, index: int, prompt_id: str) -> None:
        """Count a visit."""
        super().started(index, prompt_id)
        self.num_started += 1

    def restarted(self, index: int, scored: ScoredGroup | None, lag: int) -> None:
        """Count a visit that is played again."""
        super().restarted(index, scored, lag)
        self.num_restarts += 1

    def given_up(self, index: int, reason: str, scored: ScoredGroup | None, age: int) -> None:
        """Count a visit that is not played any more, and its lengths."""
        super().given_up(index, reason, scored, age)
        self.num_given_up[reason] += 1
        lengths = self._generator.source.lengths(index)
        total, number = self.given_up_lengths
        self.given_up_lengths = (total + sum(lengths), number + len(lengths))
        self._generator.give_up(index)


class ModelScorer:
    """Takes its time, as drawn; judges nothing."""

    def __init__(self, seconds: Draws | None, meter: Meter):
        self._seconds, self._meter = seconds, meter
        self._score = Score(Outcome.SCORED, 0.0)

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
        return ScoredGroup(group, (self._score,) * len(group.rollouts))


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

    Each group has nothing to learn from with probability ``empty_share``; it is dropped here, when
    the schedule has not had another played in its place.
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

    def useful(self, scored: ScoredGroup) -> bool:
        """Say whether there is something to learn from a group."""
        return not self._is_empty(scored.group.index)

    def _is_empty(self, index: int) -> bool:
        return random.Random(f"{self._seed} {index}").random() < self._empty_share


def staleness(version: int, visits: Sequence[Visit]) -> dict[str, float]:
    """Measure groups that policy ``version`` trains on.

    lag/mean, lag/max: versions since a rollout began. lag/token_mean: since a token was sampled,
    where engines take new weights in flight. lag/groups/n: groups whose oldest token has lag n.
    """
    num_rollouts = sum(len(visit.lengths) for visit in visits)
    tokens = sum(sum(visit.lengths) for visit in visits)
    began = sum(visit.start_versions for visit in visits)
    lags = Counter(version - (visit.oldest or 0) for visit in visits)
    sampled = sum(visit.token_versions for visit in visits)
    return {
        "groups": float(len(visits)),
        "tokens": tokens,
        "length/mean": tokens / num_rollouts,
        "lag/mean": version - began / num_rollouts,
        "lag/max": float(max(lags)),
        **{f"lag/groups/{lag}": float(count) for lag, count in lags.items()},
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
