"""One run from start to end: measure, train, checkpoint, measure again, save."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from safetensors import SafetensorError

from lagzero import build
from lagzero.build_serving import Backend, Serving, build_serving
from lagzero.config import Config
from lagzero.config_load import differences, load_config, to_yaml
from lagzero.errors import ConfigError, LagzeroError
from lagzero.evaluate import EvalResult, evaluate
from lagzero.loop import Loop, Progress, Stages
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
INTERRUPTED = 130  # exit code of a run that a signal ended


class Run:
    """A training run in its folder.

    ``config.yaml``, ``metrics.jsonl``, ``checkpoints/step-*/`` and, at the end, ``policy/``.
    """

    def __init__(self, config: Config, folder: Path, console: Console, resume: bool):
        self.config = config = build.prepare_process(config)
        self.folder = folder
        self.console = console
        # First, because the user's code is the likeliest to fail.
        self.scorer = build.build_scorer(config, reward_failure(console))
        self.data = build.build_data(config)
        for note in (*build.machine_notes(config), *self.data.notes):
            self._say(note)
        self.compute = ComputeThread()
        self.policy = build.build_policy(config)
        self.serving = build_serving(config, self.policy, self.compute, self._say)
        self.training = build.build_training(config, self.policy, self.compute)
        self.progress = Progress()
        self.before: Evaluation | None = None
        self._saved: Progress | None = None
        self._evaluated_step = 0  # the last one that has its periodic evaluation
        if resume:
            _check_changes(load_config(folder / "config.yaml"), config, console)
            self._restore()
        _write_config(config, folder)
        self._probe = EngineProbe(self.serving.backend)
        self.observer = RunObserver(
            MetricsLog(folder / "metrics.jsonl", self._last_logged() if resume else None),
            make_view(console, config.schedule.steps),
            probes=(self._probe,),
        )
        self._stop = asyncio.Event()
        self._end_training: Callable[[], None] | None = None
        self._alarms: Callable[[], Sequence[str]] = tuple

    async def train(self) -> bool:
        """Run to the end. Returns False when a signal ended it early, with a checkpoint."""
        _on_signals(self._stop, self.console)
        async with contextlib.AsyncExitStack() as closing:
            for part in (self.compute, self.scorer, self.observer):
                closing.callback(part.close)
            await closing.enter_async_context(self.serving.running())
            # A resumed engine must not start from the model's own weights.
            await self.serving.link.publish(self.progress.step)
            if self.before is None and self.config.eval.before:
                self.before = await self._evaluate()
            finished = not self._stop.is_set() and await self._train()
            after = None
            if finished:
                await self.compute.call(_write_policy, self.policy, self.folder)
                after = await self._evaluate() if self.config.eval.after else None
        self._report(finished, after)
        return finished

    async def _train(self) -> bool:
        await self._evaluate_if_due()  # an interrupted run may have ended before it was made
        loop = self._loop()
        self._end_training = loop.stop
        self._alarms = loop.flow.audit.alarms
        watcher = asyncio.create_task(_forward(self._stop, loop.stop))
        self._began = time.monotonic()
        try:
            self.progress = await loop.run()
        except Exception as failure:
            self.progress = loop.progress
            await self._save_despite(failure)
            raise
        finally:
            watcher.cancel()
        await self._save()
        return not self._stop.is_set()

    def _loop(self) -> Loop:
        return Loop(
            Stages(
                source=self.data.train,
                generator=self.serving.train,
                scorer=self.scorer,
                preparer=self.training.preparer,
                trainer=self.training.on_thread,
                link=self.serving.link,
                gate=self.serving.gate,
                observer=self.observer,
            ),
            build.loop_schedule(self.config),
            self.progress,
            self._after_step,
        )

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    async def _after_step(self, progress: Progress, stats: StepStats) -> None:
        self.progress = progress
        for alarm in self._alarms():
            self._say(f"alarm: {alarm}")
        limit = self.config.schedule.time_limit_s
        if limit is not None and time.monotonic() - self._began >= limit and self._end_training:
            self._end_training()
        paused = time.monotonic()
        await self._evaluate_if_due()
        self._began += time.monotonic() - paused  # measuring is not training
        # A step without an update is not worth a checkpoint; the end of the run saves it as well.
        is_new = self._saved is None or self._saved.step < progress.step
        if is_new and progress.step % self.config.checkpoint.every == 0:
            await self._save()

    async def _save(self) -> None:
        if self.progress == self._saved:
            return
        async with self.observer.stage("checkpoint"):
            await self.compute.call(self._save_now)
        self._saved = self.progress

    async def _save_despite(self, failure: Exception) -> None:
        """Keep what was learnt before a failure, which stays the one that the user is told of."""
        if self.training.trainer.version != self.progress.step:  # a step is half done
            return
        try:
            await self._save()
        except LagzeroError as error:
            if str(error) != str(failure):
                self._say(str(error))

    def _save_now(self) -> None:
        tensors, values = self.training.trainer.state_dict()
        parts: dict[str, Any] = {
            "cursor": dataclasses.asdict(self.progress),
            "evaluated": self._evaluated_step,
        }
        if self.before is not None:
            parts["before"] = {k: dataclasses.asdict(v) for k, v in self.before.items()}
        save_checkpoint(
            self.folder,
            Checkpoint(self.progress.step, tensors, values, parts),
            lambda folder: save_policy(self.policy, folder),
            self.config.checkpoint.keep,
        )

    def _restore(self) -> None:
        newest = latest(self.folder)
        if newest is None:
            where = f"{self.folder} has no complete checkpoint: starting again from step 0"
            self._say(where)
            return
        checkpoint = load_checkpoint(newest, parts=("cursor", "evaluated"))
        self.training.trainer.load_state_dict(checkpoint.tensors, checkpoint.values)
        cursor: dict[str, Any] = {**checkpoint.parts["cursor"]}
        cursor["ahead"] = tuple(cursor["ahead"])  # JSON knows lists only
        self.progress = Progress(**cursor)
        self._saved = self.progress
        self._evaluated_step = checkpoint.parts["evaluated"]
        before = checkpoint.parts.get("before")
        self.before = None if before is None else {k: EvalResult(**v) for k, v in before.items()}
        self._say(
            f"resuming from {newest}: step {self.progress.step}, prompt {self.progress.next_index}"
        )

    def _last_logged(self) -> int:
        """Return the last step whose metrics a resumed run keeps: none without a checkpoint."""
        return -1 if self._saved is None else self._saved.step

    async def _evaluate(self) -> Evaluation | None:
        """Measure the policy as it is. Returns None without held-out prompts or when stopped."""
        if self.data.eval is None:
            return None
        async with self.observer.stage("evaluate"):
            work = measure(self.config, self.data.eval, self.serving, self.scorer)
            results = await _unless(self._stop, work)
        # The next step must be the same whether or not an evaluation came before it.
        await self.serving.backend.forget_prefixes()
        self._probe()
        if results is not None:
            self.observer.evaluated(self.progress.step, eval_metrics(results))
        return results

    async def _evaluate_if_due(self) -> None:
        step, every = self.progress.step, self.config.eval.every
        is_due = every and step % every == 0 and step > self._evaluated_step
        if is_due and await self._evaluate() is not None:
            self._evaluated_step = step

    def _report(self, finished: bool, after: Evaluation | None) -> None:
        if not finished:
            self.console.print(
                f"Stopped after step {self.progress.step} of {self.config.schedule.steps}. "
                f"Go on with: lagzero train --resume {self.folder}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            return
        self.console.print(
            final_summary(_accuracy(self.before), _accuracy(after), self.folder, self.progress.step)
        )


# What decides which prompts a visit index means, and how they are played: a run that changed one of
# these half way would be neither the old run nor a new one.
_FIXED = (
    "seed",
    "data.train",
    "data.shuffle",
    "data.epochs",
    "model.path",
    "model.lora",
    "rollout.group_size",
    "schedule.groups_per_step",
)


def _check_changes(old: Config, new: Config, console: Console) -> None:
    """Say what a resumed run changes. Raises ConfigError for what cannot change on the way."""
    changes = differences(old, new)
    refused = [
        f"{key}: {was} cannot become {now} when a run is resumed; start a new run"
        for key, (was, now) in changes.items()
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED)
    ]
    if refused:
        raise ConfigError(refused)
    for key, (was, now) in changes.items():
        console.print(f"changed: {key} from {was} to {now}", highlight=False, markup=False)


def _write_config(config: Config, folder: Path) -> None:
    """Write the configuration; a full disk leaves the old file."""
    fresh = folder / ".config.yaml.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh.write_text(to_yaml(config), encoding="utf-8")
        os.replace(fresh, folder / "config.yaml")
    except OSError as error:
        raise LagzeroError(f"run_dir: {folder} cannot be written: {error}") from error


def _write_policy(policy: build.Policy, run: Path) -> None:
    """Put the policy into ``<run>/policy``, whole or not at all."""
    fresh, final = run / ".policy.partial", run / "policy"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        save_policy(policy, fresh)
        shutil.rmtree(final, ignore_errors=True)
        fresh.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise LagzeroError(
            f"the policy could not be written to {final}: {error}. The last checkpoint in "
            f"{run / 'checkpoints'} holds it; free some space and resume"
        ) from error


class EngineProbe:
    """What the engine did since the last call."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._last, self._last_moved = backend.counters, backend.num_moved

    def __call__(self) -> dict[str, float]:
        """Return the engine's metrics of the step that ends now."""
        now, last = self._backend.counters, self._last
        self._last = now
        out: dict[str, float] = {
            "engine/num_sampled_tokens": now.num_sampled_tokens - last.num_sampled_tokens,
            "engine/num_preemptions": now.num_preemptions - last.num_preemptions,
            "engine/max_used_pages": now.max_used_pages,
        }
        moved = self._backend.num_moved - self._last_moved
        self._last_moved += moved
        if moved:
            out["engine/num_moved"] = moved
        proposed = now.num_proposed - last.num_proposed
        if proposed:
            out["engine/num_proposed"] = proposed
            out["engine/num_accepted"] = now.num_accepted - last.num_accepted
        prompts = now.num_prompt_tokens - last.num_prompt_tokens
        if prompts:
            out["engine/prefix_hit_share"] = (
                now.num_cached_tokens - last.num_cached_tokens
            ) / prompts
        return out


def reward_failure(console: Console) -> Callable[[str], None]:
    """Return what tells the user that a reward failed, and why."""
    return lambda why: console.print(f"a reward failed: {why}", highlight=False, markup=False)


async def measure(
    config: Config, prompts: build.Prompts, serving: Serving, scorer: build.RewardScorer
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


def _on_signals(stop: asyncio.Event, console: Console) -> None:
    """End at the next safe point on the first Ctrl-C or SIGTERM; a second one ends at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def second(number: int, frame: object) -> None:
        console.show_cursor()
        os._exit(INTERRUPTED)  # threads in the middle of a step cannot be asked to end

    def first() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, second)
        console.print("stopping after the last finished step; once more to end at once")

    for number in numbers:
        loop.add_signal_handler(number, first)


async def _forward(source: asyncio.Event, end: Callable[[], None]) -> None:
    await source.wait()
    end()


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
