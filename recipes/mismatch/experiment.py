"""One run: lagzero's loop, trainer and engine, with a sampler that may be distorted."""

from __future__ import annotations

from pathlib import Path

from conditions import Distortion
from distort import distorted_serving
from rich.console import Console

from lagzero import build
from lagzero.build_serving import build_serving
from lagzero.config import Config
from lagzero.evaluate import evaluate
from lagzero.loop import Loop, Stages
from lagzero.observe.live import make_view
from lagzero.observe.metrics import MetricsLog, read_metrics
from lagzero.observe.observer import RunObserver
from lagzero.run import eval_metrics, reward_failure
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.schedule.flow import Progress
from lagzero.types import StepStats


async def train(config: Config, distortion: Distortion, metrics: Path) -> list[dict[str, float]]:
    """Train under a distortion; return one mapping of metrics a step, also written to a file.

    ``eval/sampled_reward_mean`` is of the trainer's own policy, sampled without any distortion.
    """
    config = build.prepare_process(config)
    console = Console(quiet=True)
    scorer = build.build_scorer(config, reward_failure(Console()))
    data = build.build_data(config)
    compute = ComputeThread()
    policy = build.build_policy(config)
    serving = distorted_serving(config, policy, compute, distortion)
    undistorted = build_serving(config, policy, compute, print)
    training = build.build_training(config, policy, compute)
    observer = RunObserver(MetricsLog(metrics), make_view(console, config.schedule.steps))

    async def measure(progress: Progress, stats: StepStats | None = None) -> None:
        if data.eval is None or progress.step % config.eval.every:
            return
        async with observer.stage("evaluate"):
            await undistorted.link.publish(progress.step)
            result = await evaluate(
                data.eval,
                undistorted.eval_sampled,
                scorer,
                config.eval.num_prompts,
                scorer.rewards[0].name,
            )
        observer.evaluated(progress.step, eval_metrics({"sampled": result}))

    stages = Stages(
        source=data.train,
        generator=serving.train,
        scorer=scorer,
        preparer=training.preparer,
        trainer=training.on_thread,
        link=serving.link,
        gate=serving.gate,
        observer=observer,
    )
    try:
        await serving.link.publish(0)
        await measure(Progress())
        await Loop(stages, build.loop_schedule(config), Progress(), measure).run()
    finally:
        for part in (compute, scorer, observer):
            part.close()
    return read_metrics(metrics)
