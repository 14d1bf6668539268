"""The simulator: the real loop and schedule under the virtual clock, with modelled stages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.plan.clock import VirtualLoop, run_virtual
from lagzero.plan.engine import Engine, Recorder, Span
from lagzero.plan.meter import Meter
from lagzero.plan.models import (
    FreeGate,
    ModelGenerator,
    ModelLink,
    ModelObserver,
    ModelPreparer,
    ModelScorer,
    ModelSource,
    ModelTrainer,
    Router,
    StepRecord,
)
from lagzero.plan.pace import Lanes, Pace, Roofline
from lagzero.plan.scenario import Scenario, as_text
from lagzero.runtime.local_runtime import TurnGate
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
    trainer_use: float  # share of the trainer's time
    trainer_idle: dict[str, float]
    tokens: float  # trained
    num_trained: int  # groups
    num_started: int
    num_dropped: int  # consumed with nothing to learn from
    num_carried: int  # rounds that ended at the partial cap
    num_callbacks: int
    spans: tuple[Span, ...]

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
        derived = ("tok_per_s", "lag_mean", "lag_token_mean", "lag_max", "length_mean")
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
    return run_virtual(_run(scenario, Recorder() if record else None, loop), loop=loop)


def _pace(of: Scenario) -> Pace:
    if of.lanes is not None:
        return Lanes(of.unit_s)
    return Roofline(
        of.params,
        of.weight_bytes,
        of.kv_bytes_per_token,
        of.bandwidth_bytes_per_s,
        of.peak_flop_per_s,
        of.efficiency,
        of.overhead_s,
    )


def _engines(of: Scenario, meter: Meter, recorder: Recorder | None) -> list[Engine]:
    if of.lanes is not None:
        return [Engine(0, _pace(of), of.lanes, meter, of.partial_cap, recorder)]
    return [
        Engine(number, _pace(of), of.max_running, meter, of.partial_cap, recorder)
        for number in range(of.engines)
    ]


async def _nothing(progress: Progress, stats: StepStats) -> None:
    """What a simulated run does after a step."""


async def _run(of: Scenario, recorder: Recorder | None, clock: VirtualLoop) -> Result:
    meter = Meter(of.lanes if of.lanes is not None else of.engines * of.max_running)
    engines = _engines(of, meter, recorder)
    lengths = of.lengths.draws(of.seed)
    source = ModelSource(lengths, of.group_size, of.prompts, whole=of.lanes is None)
    router = Router(engines, of.router == "least_loaded")
    generator = ModelGenerator(source, router, of.prompt_tokens)
    trainer = ModelTrainer(of.train_s, of.train_token_s, meter, recorder)
    preparer = ModelPreparer(generator, trainer, of.empty_share, of.seed)
    observer = ModelObserver()
    stages = Stages(
        source=source,
        generator=generator,
        scorer=ModelScorer(None if of.score is None else of.score.draws(of.seed + 1), meter),
        preparer=preparer,
        trainer=trainer,
        link=ModelLink(engines, of.sync_s, of.sync_pauses, meter),
        gate=TurnGate() if of.placement == "colocated" else FreeGate(),
        observer=observer,
    )
    schedule = LoopSchedule(
        of.steps, of.groups_per_step, of.max_lag, of.window, extra_groups=of.extra_groups
    )
    loop = Loop(stages, schedule, Progress(), _nothing)
    await loop.run()
    meter.advance(clock.time())
    spans = () if recorder is None else tuple(recorder.close(clock.time()))
    time_s = clock.time()
    slot_s = meter.num_slots * time_s or 1.0
    return Result(
        scenario=of,
        time_s=time_s,
        steps=tuple(observer.steps),
        slot_use=meter.busy_slot_s / slot_s,
        slot_idle={name: spent / slot_s for name, spent in meter.slot_idle_s.items()},
        low_share=meter.low_s / (time_s or 1.0),
        trainer_use=meter.train_s / (time_s or 1.0),
        trainer_idle={name: s / (time_s or 1.0) for name, s in meter.train_idle_s.items()},
        tokens=sum(each.metrics["tokens"] for each in observer.steps),
        num_trained=sum(int(each.metrics["groups"]) for each in observer.steps),
        num_started=generator.num_started,
        num_dropped=preparer.num_dropped,
        num_carried=sum(engine.num_carried for engine in engines),
        num_callbacks=clock.num_callbacks,
        spans=spans,
    )
