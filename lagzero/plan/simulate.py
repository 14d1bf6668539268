"""The simulator: the real loop and schedule under the virtual clock, with modelled stages."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.plan.clock import VirtualLoop, run_virtual
from lagzero.plan.engine import Engine
from lagzero.plan.meter import Meter
from lagzero.plan.models import (
    ModelAudit,
    ModelGenerator,
    ModelLink,
    ModelObserver,
    ModelPreparer,
    ModelScorer,
    ModelSource,
    ModelTrainer,
    PauseGate,
    StepRecord,
)
from lagzero.plan.pace import Lanes, Pace, Roofline
from lagzero.plan.scenario import Scenario, as_text
from lagzero.plan.timeline import Recorder, Span
from lagzero.runtime.local_runtime import FreeGate
from lagzero.schedule.router import Policy, Repacking
from lagzero.schedule.staleness import Action, Clock, Contract
from lagzero.types import StepStats


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a scenario."""

    scenario: Scenario
    time_s: float
    steps: tuple[StepRecord, ...]
    slot_use: float  # share of the generation slots' time, 0 to 1
    slot_idle: dict[str, float]  # shares of the same, by reason (``meter.IDLE``)
    low_share: float  # of the time with less than a quarter of the slots in use
    engine_idle: float  # share of the engines' time in which nothing runs on them
    trainer_use: float  # share of the trainer's time
    trainer_idle: dict[str, float]
    tokens: float  # trained
    num_trained: int  # groups
    num_started: int
    num_dropped: int  # consumed with nothing to learn from
    num_given_up: dict[str, int]  # groups, by reason
    num_restarts: int  # times that a group was played again
    given_up_length: float  # mean of what rollouts of given-up groups would have had
    lost_share: float  # of the written tokens, of groups that were given up or played again
    num_carried: int  # rounds that ended at the partial cap
    num_evicted: int  # rounds that ended because the cache was full
    num_moved: int  # rollouts that went on at another engine, so that theirs was free
    num_reread: float  # tokens of context that those left behind
    num_callbacks: int
    spans: tuple[Span, ...]

    @property
    def num_pending(self) -> int:
        """Groups that were started and are neither trained, dropped nor given up."""
        gone = self.num_trained + self.num_dropped + sum(self.num_given_up.values())
        return self.num_started - gone

    @property
    def tok_per_s(self) -> float:
        """Trained tokens a second."""
        return self.tokens / self.time_s if self.time_s else 0.0

    @property
    def lag_mean(self) -> float:
        """Versions between the start of a rollout and its training, mean over rollouts."""
        return self._mean("lag/mean", "groups")

    @property
    def lag_token_mean(self) -> float:
        """Versions between the sampling of a token and its training, mean over tokens."""
        return self._mean("lag/token_mean", "tokens")

    @property
    def lag_max(self) -> int:
        """The largest lag of a rollout."""
        return int(max((each.metrics["lag/max"] for each in self.steps), default=0))

    @property
    def lag_groups(self) -> dict[int, int]:
        """How many trained groups had which lag, counted from their oldest token."""
        counts: Counter[int] = Counter()
        for each in self.steps:
            for name, count in each.metrics.items():
                if name.startswith("lag/groups/"):
                    counts[int(name.rpartition("/")[2])] += int(count)
        return dict(sorted(counts.items()))

    @property
    def length_mean(self) -> float:
        """Mean length of the rollouts that were trained."""
        return self._mean("length/mean", "groups")

    def _mean(self, name: str, weight: str) -> float:
        total = sum(each.metrics[weight] for each in self.steps)
        summed = sum(each.metrics[name] * each.metrics[weight] for each in self.steps)
        return summed / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all of it but the bars, as JSON can hold it."""
        skipped = {"scenario", "steps", "spans"}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        keys = {f.name: as_text(getattr(self.scenario, f.name)) for f in fields(self.scenario)}
        derived = (
            "num_pending",
            "lag_groups",
            "tok_per_s",
            "lag_mean",
            "lag_token_mean",
            "lag_max",
            "length_mean",
        )
        return {
            "scenario": keys,
            **own,
            **{name: getattr(self, name) for name in derived},
            "steps": [{"step": s.step, "at_s": s.at_s, **s.metrics} for s in self.steps],
        }


def simulate(scenario: Scenario, record: bool = False) -> Result:
    """Run a scenario in virtual time. ``record`` keeps the bars of a timeline (small cases).

    Raises Deadlock when it can never end, and what the loop raises.
    """
    loop = VirtualLoop()
    with _rare_collections():
        return run_virtual(_run(scenario, Recorder() if record else None, loop), loop=loop)


@contextmanager
def _rare_collections() -> Generator[None]:
    """Collect garbage seldom: a collection visits every rollout that runs, and frees none."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _pace(of: Scenario) -> Pace:
    if of.lanes is not None:
        return Lanes(of.unit_s)
    if of.decode_steps is not None:
        return of.decode_steps
    return Roofline(
        of.params,
        of.weight_bytes,
        of.kv_bytes_per_token,
        of.bandwidth_bytes_per_s,
        of.peak_flop_per_s,
        of.efficiency,
        of.overhead_s,
    )


def _pools(of: Scenario, meter: Meter, recorder: Recorder | None) -> list[list[Engine]]:
    """Make the engines: one pool of all, or two halves that swap."""
    if of.lanes is not None:
        return [[Engine(0, _pace(of), of.lanes, meter, of.partial_cap, recorder)]]
    engines = [
        Engine(
            number,
            _pace(of),
            of.max_running,
            meter,
            of.partial_cap,
            recorder,
            of.kv_tokens,
            of.prefill_tok_per_s,
        )
        for number in range(of.engines)
    ]
    if of.placement == "swap":
        return [engines[: of.engines // 2], engines[of.engines // 2 :]]
    return [engines]


def _schedule(of: Scenario) -> LoopSchedule:
    return LoopSchedule(
        of.steps,
        of.groups_per_step,
        of.max_lag,
        of.window,
        extra_groups=of.extra_groups,
        surplus=cast("Literal['carry', 'drop']", of.surplus),
        sync_every=of.sync_every,
        contract=Contract(
            cast("Action", of.action), of.bound, cast("Clock", of.clock), of.max_restarts
        ),
        resampled_groups=of.resample_limit * of.groups_per_step,
    )


async def _nothing(progress: Progress, stats: StepStats) -> None:
    """What a simulated run does after a step."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The models of a run whose books are read at its end."""

    meter: Meter
    engines: list[Engine]
    generator: ModelGenerator
    preparer: ModelPreparer
    observer: ModelObserver
    audit: ModelAudit


async def _run(of: Scenario, recorder: Recorder | None, clock: VirtualLoop) -> Result:
    meter = Meter(of.lanes if of.lanes is not None else of.engines * of.max_running)
    pools = _pools(of, meter, recorder)
    engines = [engine for pool in pools for engine in pool]
    lengths = of.lengths.draws(of.seed)
    source = ModelSource(lengths, of.group_size, of.prompts, whole=of.lanes is None)
    policy = cast("Policy", of.router)
    repacking = None if of.repack_below is None else Repacking(of.repack_below, of.max_running)
    generator = ModelGenerator(
        source, pools, policy, of.prompt_tokens, of.groups_per_step, repacking
    )
    trainer = ModelTrainer(of.train_s, of.train_token_s, meter, recorder)
    preparer = ModelPreparer(generator, trainer, of.empty_share, of.seed)
    turns = PauseGate(pools, meter.num_slots // len(pools), meter)
    observer = ModelObserver()
    stages = Stages(
        source=source,
        generator=generator,
        scorer=ModelScorer(None if of.score is None else of.score.draws(of.seed + 1), meter),
        preparer=preparer,
        trainer=trainer,
        link=ModelLink(engines, of.sync_s, of.sync_pauses, meter),
        gate=FreeGate() if of.placement == "disaggregated" else turns,
        observer=observer,
    )
    schedule = _schedule(of)
    loop = Loop(stages, schedule, Progress(), _nothing)
    loop.flow.audit = audit = ModelAudit(schedule.contract, generator)
    await loop.run()
    meter.advance(clock.time())
    spans = () if recorder is None else tuple(recorder.close(clock.time()))
    return _result(of, _Parts(meter, engines, generator, preparer, observer, audit), clock, spans)


def _result(of: Scenario, parts: _Parts, clock: VirtualLoop, spans: tuple[Span, ...]) -> Result:
    meter, steps, audit = parts.meter, parts.observer.steps, parts.audit
    packer = parts.generator.packer
    time_s = clock.time()
    slot_s = meter.num_slots * time_s or 1.0
    return Result(
        scenario=of,
        time_s=time_s,
        steps=tuple(steps),
        slot_use=meter.busy_slot_s / slot_s,
        slot_idle={name: spent / slot_s for name, spent in meter.slot_idle_s.items()},
        low_share=meter.low_s / (time_s or 1.0),
        engine_idle=meter.idle_engine_s / (len(parts.engines) * time_s or 1.0),
        trainer_use=meter.train_s / (time_s or 1.0),
        trainer_idle={name: s / (time_s or 1.0) for name, s in meter.train_idle_s.items()},
        tokens=sum(each.metrics["tokens"] for each in steps),
        num_trained=sum(int(each.metrics["groups"]) for each in steps),
        num_started=audit.num_started,
        num_dropped=parts.preparer.num_dropped,
        num_given_up=dict(audit.num_given_up),
        num_restarts=audit.num_restarts,
        given_up_length=audit.given_up_lengths[0] / max(audit.given_up_lengths[1], 1),
        lost_share=_lost_share(parts.generator, parts.engines),
        num_carried=sum(engine.num_carried for engine in parts.engines),
        num_evicted=sum(engine.num_evicted for engine in parts.engines),
        num_moved=0 if packer is None else packer.num_moved,
        num_reread=0.0 if packer is None else packer.num_reread,
        num_callbacks=clock.num_callbacks,
        spans=spans,
    )


def _lost_share(generator: ModelGenerator, engines: Sequence[Engine]) -> float:
    written = sum(engine.num_tokens for engine in engines)
    return sum(visit.written for visit in generator.lost) / (written or 1.0)
