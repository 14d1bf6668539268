"""Wall-clock of max_lag 0, 1, 2, 4 on one long-tailed workload, beside what the simulator predicts.

Every response has the same forced length whatever max_lag is; the trainer and one engine process
have a core each. Every max_lag is run in turn, `--repeats` times. Before and after each run its
speeds are measured: decode steps at several batch sizes, optimiser steps at two sizes, a weight
transfer. For each run the simulator is given the lengths and the means of these two, and nothing
else: a machine that others share drifts by more than the simulator errs. Medians are printed.

Cores of one machine share memory, caches and often arithmetic units, so a stage is slower while
the other runs. By default a process of the lowest priority does on each core, whenever it is idle,
what the core's stage does (one decodes such responses, one trains on them), so that both stages
have one speed throughout, as devices of their own would; --no-burners leaves that out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_TOKENS = 4  # so few that prefill, which is not modelled, takes no time
_TRAINED = (8, 48)  # tokens of each response in the optimiser steps that are timed


def main() -> None:
    """Measure speeds, run, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=4, help="groups a step")
    parser.add_argument("--samples", type=int, default=4, help="rollouts a group")
    parser.add_argument(
        "--lengths", default="lognormal:median=24,sigma=1,min=4,max=192", help="tokens a response"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--burners", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--burn", choices=["train", "engine"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.burn:
        asyncio.run(_burn(options))
        return
    burners = _burners() if options.burners else []
    workload = Workload(options, "disaggregated")
    try:
        asyncio.run(workload.measure())
    finally:
        for each in burners:
            each.kill()
    workload.report()


def _burners() -> list[subprocess.Popen[bytes]]:
    """Keep each core busy: the last one is the engine's."""
    *others, engine = sorted(os.sched_getaffinity(0))
    stages = {**dict.fromkeys(others, "train"), engine: "engine"}
    command = [sys.executable, *sys.argv, "--burn"]
    return [
        subprocess.Popen([*command, stage], preexec_fn=lambda core=core: _yield_to_all(core))
        for core, stage in stages.items()
    ]


def _yield_to_all(core: int) -> None:
    """Run on one core, and only while nothing else wants to."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


async def _burn(options: argparse.Namespace) -> None:
    """Do what a stage does, until the process that asked for it is gone."""
    parent = os.getppid()
    workload = Workload(options, "colocated")
    async with workload.serving.running():
        await workload.serving.link.publish(0)
        groups = [await workload.play(index) for index in range(options.groups)]
        while os.getppid() == parent:
            if options.burn == "train":
                await workload.train(groups)
            else:
                await asyncio.gather(*map(workload.play, range(options.groups)))


@dataclass(frozen=True, slots=True)
class Run:
    """What one run took, and was predicted to take from the speeds around it."""

    max_lag: int
    seconds: float
    train_s: float
    speeds: dict[str, float]  # seconds of each stage, by name
    predicted_s: float
    predicted_train_s: float

    def row(self) -> tuple[float, ...]:
        """Return seconds, those predicted and their error, and the same of training in seconds."""
        error = self.predicted_s / self.seconds - 1
        return self.seconds, self.predicted_s, error, self.train_s, self.predicted_train_s


class Workload:
    """One trainer, one engine process, and the loop between them at any max_lag."""

    def __init__(self, options: argparse.Namespace, placement: str):
        from lagzero import build
        from lagzero.build_serving import build_serving
        from lagzero.config_load import parse_config
        from lagzero.plan.lengths import parse_lengths

        self.options = options
        config = parse_config(
            {
                "model": {"path": options.model, "threads": 1},
                "data": {"train": [{"kind": "arithmetic", "size": 1}]},
                "score": {"rewards": [{"use": "number_answer"}]},
                "rollout": {"group_size": options.samples},
                "schedule": {
                    "groups_per_step": options.groups,
                    "max_lag": int(placement == "disaggregated"),
                },
                "placement": {"kind": placement},
                "train": {"optimizer": {"lr": 1e-9}},
                "eval": {"before": False, "after": False},
            }
        )
        self.config = config = build.prepare_process(config)
        self.compute = build.ComputeThread()
        policy = build.build_policy(config)
        self.serving = build_serving(config, policy, self.compute, print)
        self.training = build.build_training(config, policy, self.compute)
        self.lengths = parse_lengths(options.lengths).draws(0)
        self.version = 0
        self.runs: list[Run] = []

    async def measure(self) -> None:
        """Run each max_lag in turn, between measurements of the speeds."""
        async with self.serving.running():
            await self.serving.link.publish(0)
            await self._time_stages()  # a warm-up
            before = await self._time_stages()
            for number, lag in itertools.product(
                range(self.options.repeats), self.options.max_lags
            ):
                seconds, train_s = await self._run(lag)
                after = await self._time_stages()
                speeds = {name: statistics.mean((before[name], after[name])) for name in after}
                predicted = await asyncio.to_thread(self._predict, lag, speeds)  # a loop of its own
                run = Run(lag, seconds, train_s, speeds, *predicted)
                self.runs.append(run)
                before = after
                print(
                    f"{number + 1} max_lag {lag}: {seconds:.1f} s, of training {train_s:.1f} s; "
                    f"predicted {run.predicted_s:.1f} and {run.predicted_train_s:.1f} s",
                    flush=True,
                )
        self.compute.close()

    def report(self) -> None:
        """Print the speeds, and a table: measured and predicted seconds for each max_lag."""
        print()
        for name in self.runs[0].speeds:
            median_s = statistics.median(run.speeds[name] for run in self.runs)
            print(f"{name}: {median_s * 1e3:.1f} ms")
        print(
            f"\n{'max_lag':>8} {'measured':>10} {'speed-up':>9} {'predicted':>10} {'error':>7}"
            f" {'training':>10} {'predicted':>10}"
        )
        first = None
        for lag in self.options.max_lags:
            runs = [run for run in self.runs if run.max_lag == lag]
            rows = zip(*(run.row() for run in runs), strict=True)
            measured, predicted, error, train_s, predicted_train_s = map(statistics.median, rows)
            first = first or measured
            print(
                f"{lag:8d} {measured:8.1f} s {first / measured:8.2f}x {predicted:8.1f} s "
                f"{error:+7.1%} {train_s:8.1f} s {predicted_train_s:8.1f} s"
            )

    async def _run(self, max_lag: int) -> tuple[float, float]:
        """Run the loop for ``steps`` steps; return its seconds, and those of training."""
        from lagzero.loop import Loop, LoopSchedule, Progress, Stages

        async def after(progress: Any, stats: Any) -> None:
            self.version = stats.version

        clock = TrainingClock()
        stages = Stages(
            source=Source(),
            generator=ForcedLengths(self),
            scorer=AlternatingScorer(),
            preparer=self.training.preparer,
            trainer=self.training.on_thread,
            link=self.serving.link,
            gate=self.serving.gate,
            observer=clock,
        )
        last = self.version + self.options.steps
        schedule = LoopSchedule(last, self.options.groups, max_lag)
        begun = time.perf_counter()
        await Loop(stages, schedule, Progress(self.version), after).run()
        return time.perf_counter() - begun, clock.train_s

    def _sizes(self) -> list[int]:
        # Close together where the tail is: a step's time is no straight line in few sequences.
        full = self.options.groups * self.options.samples
        return sorted(n for n in {1, 2, 3, 4, full // 2, full} if 0 < n <= full)

    async def _time_stages(self) -> dict[str, float]:
        """Return the seconds of each stage alone, by name."""
        speeds = {
            f"decode step of {size}": await self._decode_step_s(size, 32) for size in self._sizes()
        }
        for length in _TRAINED:
            speeds[f"optimiser step on {length} tokens each"] = await self._train_step_s(length)
        begun = time.perf_counter()
        await self.serving.link.publish(self.version)
        return {**speeds, "transfer": time.perf_counter() - begun}

    def _predict(self, max_lag: int, speeds: dict[str, float]) -> tuple[float, float]:
        """Return the seconds of a run, and of its training, as the simulator has them."""
        from lagzero.plan.lengths import LengthSpec
        from lagzero.plan.pace import Measured
        from lagzero.plan.scenario import Scenario
        from lagzero.plan.simulate import simulate

        options = self.options
        full = options.groups * options.samples
        short, long = (speeds[f"optimiser step on {length} tokens each"] for length in _TRAINED)
        token_s = (long - short) / (full * (_TRAINED[1] - _TRAINED[0]))
        most = (options.steps + max_lag + 1) * full
        result = simulate(
            Scenario(
                steps=options.steps,
                max_lag=max_lag,
                groups_per_step=options.groups,
                group_size=options.samples,
                lengths=LengthSpec("as run", "list", tuple(self.lengths.part(0, most))),
                prompt_tokens=0,
                engines=1,
                max_running=self.config.engine.max_running,
                decode_steps=Measured(
                    tuple((size, speeds[f"decode step of {size}"]) for size in self._sizes())
                ),
                train_s=max(0.0, short - token_s * full * _TRAINED[0]),
                train_token_s=token_s,
                sync_s=speeds["transfer"],
            )
        )
        return result.time_s, result.trainer_use * result.time_s

    async def _decode_step_s(self, num_sequences: int, num_tokens: int) -> float:
        """Return the seconds of one decode step."""
        begun = time.perf_counter()
        await self.sample([num_tokens] * num_sequences, -1)
        return (time.perf_counter() - begun) / num_tokens

    async def _train_step_s(self, length: int) -> float:
        """Return the seconds of one step on responses of a length, preparation included."""
        from lagzero.types import Group

        options = self.options
        rollouts = tuple(await self.sample([length] * options.samples, -9))
        groups = [Group(index, Source().at(index), rollouts) for index in range(options.groups)]
        begun = time.perf_counter()
        await self.train(groups)
        return time.perf_counter() - begun

    async def train(self, groups: Sequence[Any]) -> None:
        """Take one optimiser step on groups of rollouts."""
        scored = [await AlternatingScorer().score(group) for group in groups]
        batch = await self.training.preparer.prepare(scored)
        stats = await self.training.on_thread.step(batch)
        self.version = stats.version

    async def play(self, index: int) -> Any:
        """Return visit ``index``: rollouts of the lengths that its number has."""
        from dataclasses import replace

        from lagzero.types import Group

        size = self.options.samples
        lengths = [int(each) for each in self.lengths.part(index * size, size)]
        rollouts = await self.sample(lengths, index)
        numbered = tuple(replace(each, member=member) for member, each in enumerate(rollouts))
        return Group(index, Source().at(index), numbered)

    async def sample(self, lengths: Sequence[int], index: int) -> list[Any]:
        """Sample one response of each length."""
        from lagzero.engine.request import Sampling, derive_seed

        prompt = tuple(range(1000, 1000 + PROMPT_TOKENS))
        calls = [
            self.serving.backend.complete(
                prompt,
                (derive_seed(index, member),),
                Sampling(length),
                label=f"group {index} member {member}",
            )
            for member, length in enumerate(lengths)
        ]
        return list(itertools.chain(*await asyncio.gather(*calls)))


class Source:
    """Endless prompts; their tokens do not matter."""

    def at(self, index: int) -> Any:
        from lagzero.types import Prompt

        return Prompt(f"p{index}", tuple(range(1000, 1000 + PROMPT_TOKENS)), "")


class ForcedLengths:
    """Plays each visit with the lengths that its number has."""

    def __init__(self, workload: Workload):
        self._workload = workload

    async def play(self, index: int, prompt: Any) -> Any:
        return await self._workload.play(index)


class AlternatingScorer:
    """Rewards 0, 1, 0, 1: every group has something to learn from."""

    async def score(self, group: Any) -> Any:
        from lagzero.types import Outcome, Score, ScoredGroup

        scores = [Score(Outcome.SCORED, float(n % 2)) for n in range(len(group.rollouts))]
        return ScoredGroup(group, tuple(scores))


class TrainingClock:
    """Notes the seconds in which the trainer works."""

    def __init__(self) -> None:
        self.train_s = 0.0

    @contextlib.asynccontextmanager
    async def stage(self, stage: str) -> AsyncIterator[None]:
        """Time a stage."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            if stage in ("prepare", "train"):
                self.train_s += time.perf_counter() - begun

    def step(self, step: int, metrics: Any) -> None:
        """Note nothing."""


if __name__ == "__main__":
    main()
