"""One run from start to end: measure, train, checkpoint, measure again, save."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from lagzero import build
from lagzero.config import Config
from lagzero.config_load import to_yaml
from lagzero.errors import LagzeroError
from lagzero.evaluate import EvalResult, evaluate
from lagzero.loop import Loop, LoopSchedule, Progress, Stages
from lagzero.observe.live import make_view
from lagzero.observe.metrics import MetricsLog
from lagzero.observe.observer import RunObserver
from lagzero.observe.summary import Accuracy, Tally, final_summary
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.train.checkpoint import Checkpoint, latest, load_checkpoint, save_checkpoint
from lagzero.train.model import save_policy
from lagzero.types import StepStats

T = TypeVar("T")
Evaluation = Mapping[str, EvalResult]  # by kind: greedy, sampled


class Run:
    """A training run in its folder.

    ``config.yaml``, ``metrics.jsonl``, ``checkpoints/step-*/`` and, at the end, ``policy/``.
    """

    def __init__(self, config: Config, folder: Path, console: Console, resume: bool):
        self.config = config
        self.folder = folder
        self.console = console
        build.prepare_process(config)
        self.compute = ComputeThread()
        self.policy = build.build_policy(config)
        self.data = build.build_data(config, self.policy)
        for note in self.data.notes:
            console.print(note, highlight=False)
        serving_policy = build.build_serving_policy(config, self.policy)
        # Adapters of a resumed run are in its checkpoint, so versions start from there.
        self.serving = build.build_serving(config, serving_policy, self.compute, 0)
        self.training = build.build_training(
            config, self.policy, serving_policy, self.serving, self.compute
        )
        self.scorer = build.build_scorer(config)
        self.progress, self.before = self._restore() if resume else (Progress(), None)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        self.observer = RunObserver(
            MetricsLog(folder / "metrics.jsonl", self.progress.step if resume else None),
            make_view(console, config.schedule.steps),
            probes=(EngineProbe(self.serving.engine),),
        )
        self._saved_step = self.progress.step if resume else -1
        self._trained_s = 0.0
        self._interrupt: Callable[[], object] | None = None

    async def train(self) -> bool:
        """Run to the end. Returns False when a signal ended it early (a checkpoint is then saved)."""
        stop = asyncio.Event()
        _on_signals(stop)
        try:
            # A resumed engine must not start from the model's own weights.
            await self.training.link.publish(self.progress.step)
            if self.before is None and self.config.eval.before:
                self.before = await self._evaluate(stop)
            finished = not stop.is_set() and await self._train(stop)
            after = None
            if finished and self.config.eval.after:
                after = await self._evaluate(stop)
            if finished:
                await self.compute.call(save_policy, self.policy, self.folder / "policy")
        finally:
            self.observer.close()
            self.scorer.close()
            self.compute.close()
        self._report(finished, after)
        return finished

    async def _train(self, stop: asyncio.Event) -> bool:
        schedule = self.config.schedule
        loop = Loop(
            Stages(
                source=self.data.train,
                generator=self.serving.train,
                scorer=self.scorer,
                preparer=self.training.preparer,
                trainer=self.training.on_thread,
                link=self.training.link,
                gate=self.training.gate,
                observer=self.observer,
            ),
            LoopSchedule(
                schedule.steps,
                schedule.groups_per_step,
                schedule.max_lag,
                max_empty_steps=schedule.max_empty_steps,
            ),
            self.progress,
            self._after_step,
        )
        self._interrupt = loop.stop.set
        watcher = asyncio.create_task(_forward(stop, loop.stop))
        self._began = time.monotonic()
        try:
            self.progress = await loop.run()
        except Exception:
            self.progress = loop.progress
            if self.training.trainer.version == self.progress.step:  # else a step is half done
                await self._save()
            raise
        finally:
            watcher.cancel()
        await self._save()
        return not stop.is_set()

    async def _after_step(self, progress: Progress, stats: StepStats) -> None:
        self.progress = progress
        config = self.config
        limit = config.schedule.time_limit_s
        if limit is not None and time.monotonic() - self._began >= limit and self._interrupt:
            self._interrupt()
        if progress.step % config.checkpoint.every == 0:
            await self._save()
        if config.eval.every and progress.step % config.eval.every == 0:
            paused = time.monotonic()
            await self._evaluate(asyncio.Event())
            self._began += time.monotonic() - paused  # measuring is not training

    async def _save(self) -> None:
        if self.progress.step == self._saved_step:
            return
        async with self.observer.stage("checkpoint"):
            await self.compute.call(self._save_now)
        self._saved_step = self.progress.step

    def _save_now(self) -> None:
        tensors, values = self.training.trainer.state_dict()
        parts: dict[str, Any] = {"cursor": dataclasses.asdict(self.progress)}
        if self.before is not None:
            parts["before"] = {k: dataclasses.asdict(v) for k, v in self.before.items()}
        save_checkpoint(
            self.folder,
            Checkpoint(self.progress.step, tensors, values, parts),
            lambda folder: save_policy(self.policy, folder),
            self.config.checkpoint.keep,
        )

    def _restore(self) -> tuple[Progress, Evaluation | None]:
        newest = latest(self.folder)
        if newest is None:
            raise LagzeroError(f"{self.folder} has no complete checkpoint to resume from")
        checkpoint = load_checkpoint(newest, parts=("cursor",))
        self.training.trainer.load_state_dict(checkpoint.tensors, checkpoint.values)
        progress = Progress(**checkpoint.parts["cursor"])
        self.console.print(
            f"resuming from {newest}: step {progress.step}, prompt {progress.next_index}",
            highlight=False,
        )
        before = checkpoint.parts.get("before")
        return progress, None if before is None else {k: EvalResult(**v) for k, v in before.items()}

    async def _evaluate(self, stop: asyncio.Event) -> Evaluation | None:
        if self.data.eval is None:
            return None
        async with self.observer.stage("evaluate"):
            work = measure(self.config, self.data.eval, self.serving, self.scorer)
            results = await _unless(stop, work)
        if results is not None:
            self.observer.evaluated(self.progress.step, eval_metrics(results))
        return results

    def _report(self, finished: bool, after: Evaluation | None) -> None:
        if not finished:
            self.console.print(
                f"Stopped after step {self.progress.step} of {self.config.schedule.steps}. "
                f"Go on with: lagzero train --resume {self.folder}",
                highlight=False,
                soft_wrap=True,
            )
            return
        self.console.print(
            final_summary(_accuracy(self.before), _accuracy(after), self.folder, self.progress.step)
        )


class EngineProbe:
    """What the engine did since the last call."""

    def __init__(self, engine: build.Engine):
        self._engine = engine
        self._last = engine.counters

    def __call__(self) -> dict[str, float]:
        """Return the engine's metrics of the step that ends now."""
        now, last = self._engine.counters, self._last
        self._last = now
        out: dict[str, float] = {
            "engine/num_sampled_tokens": now.num_sampled_tokens - last.num_sampled_tokens,
            "engine/num_preemptions": now.num_preemptions - last.num_preemptions,
            "engine/max_used_pages": now.max_used_pages,
        }
        prompts = now.num_prompt_tokens - last.num_prompt_tokens
        if prompts:
            out["engine/prefix_hit_share"] = (
                now.num_cached_tokens - last.num_cached_tokens
            ) / prompts
        return out


async def measure(
    config: Config, prompts: build.Prompts, serving: build.Serving, scorer: build.RewardScorer
) -> dict[str, EvalResult]:
    """Measure the policy that the engine serves, greedy and sampled."""
    num = config.eval.num_prompts
    verdict = scorer.rewards[0].name
    return {
        "greedy": await evaluate(prompts, serving.eval_greedy, scorer, num, verdict),
        "sampled": await evaluate(prompts, serving.eval_sampled, scorer, num, verdict),
    }


def eval_metrics(results: Evaluation) -> dict[str, float]:
    """Turn an evaluation into metrics."""
    out: dict[str, float] = {"eval/num_unscored": sum(r.num_unscored for r in results.values())}
    for kind, result in results.items():
        if result.num_scored:
            out[f"eval/{kind}_accuracy"] = result.num_right / result.num_scored
        if result.mean_reward is not None:
            out[f"eval/{kind}_reward_mean"] = result.mean_reward
        out[f"eval/{kind}_num_scored"] = result.num_scored
        out[f"eval/{kind}_tokens_mean"] = result.mean_tokens
    out["eval/truncated_share"] = sum(r.truncated_share for r in results.values()) / len(results)
    return out


def _accuracy(results: Evaluation | None) -> Accuracy | None:
    if results is None:
        return None
    tallies = {k: Tally(r.num_right, r.num_scored) for k, r in results.items()}
    return Accuracy(**tallies)


def _on_signals(stop: asyncio.Event) -> None:
    """End at the next safe point on the first Ctrl-C or SIGTERM; a second one ends at once."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)


async def _forward(source: asyncio.Event, target: asyncio.Event) -> None:
    await source.wait()
    target.set()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``, or None, cancelling it, once ``stop`` is set."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
        return None
    return task.result()
