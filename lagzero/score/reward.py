"""Several weighted rewards as one scorer, with three outcomes that are never confused."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from lagzero.config import ScoreConfig
from lagzero.errors import ConfigError
from lagzero.score.judgement import Judge, Judgement
from lagzero.score.load import Reward, load_reward, reward_name
from lagzero.types import Group, Outcome, Score, ScoredGroup

__all__ = ["RewardScorer", "WeightedReward", "build_scorer", "load_reward"]

MAX_REASONS = 10  # that a user is told of; a reason may quote the reply and so never repeat

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward function with its name in the figures and its weight in the total."""

    name: str
    reward: Reward
    weight: float = 1.0


def build_scorer(
    config: ScoreConfig,
    folder: Path | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> RewardScorer:
    """Return the scorer that a configuration describes. Raises one ConfigError for all rewards.

    A reward with a ``load_model`` loads it now: before anything is played, and before an engine
    takes its share of the free memory.

    ``on_failure``: see ``RewardScorer``.
    """
    rewards: list[WeightedReward] = []
    problems: list[str] = []
    for number, entry in enumerate(config.rewards):
        try:
            reward = load_reward(
                entry,
                timeout_s=config.timeout_s,
                workers=config.workers,
                folder=folder,
                at=f"score.rewards.{number}",
            )
            _load_model(reward, f"score.rewards.{number}.options")
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        rewards.append(WeightedReward(reward_name(entry), reward, entry.weight))
    if problems:
        raise ConfigError(problems)
    return RewardScorer(rewards, timeout_s=config.timeout_s, on_failure=on_failure)


def _load_model(reward: Reward, at: str) -> None:
    load = getattr(reward, "load_model", None)
    if not callable(load):
        return
    try:
        load()
    except ConfigError as error:
        raise ConfigError([f"{at}.{problem}" for problem in error.problems]) from error


class RewardScorer:
    """Judges a group by every reward: total = sum of weight * value.

    A reward is ``f(prompts, completions, **columns) -> list[float | None]``, sync or async. A
    number is a score; None says that the sample has none (UNSCORABLE); NaN, infinity, an exception,
    a list of another length or a call past ``timeout_s`` seconds a rollout is INFRASTRUCTURE, with
    the reason. A rollout has a total only where every reward gave a number. ``parts`` hold each
    reward's own value under its name, and its further figures under ``name/figure``.

    ``on_failure`` hears each different reason of an INFRASTRUCTURE outcome once, up to
    ``MAX_REASONS`` of them: failures of a few rollouts would otherwise show as a count alone.
    """

    def __init__(
        self,
        rewards: Sequence[WeightedReward],
        *,
        timeout_s: float = 10.0,
        on_failure: Callable[[str], None] | None = None,
    ):
        if not rewards:
            raise ConfigError(["score.rewards: at least one reward is needed"])
        self.rewards = _with_own_names(rewards)
        self.timeout_s = timeout_s
        self._on_failure = on_failure
        self._told: set[str] = set()

    async def score(self, group: Group) -> ScoredGroup:
        """Return one score for each rollout, in order."""
        columns = await asyncio.gather(*(self._judged(each, group) for each in self.rewards))
        rows = zip(*columns, strict=True) if group.rollouts else ()
        scored = ScoredGroup(group, tuple(self._total(row) for row in rows))
        self._tell(scored)
        return scored

    def close(self) -> None:
        """End what the rewards hold, such as worker processes."""
        for each in self.rewards:
            close = getattr(each.reward, "close", None)
            if callable(close):
                close()

    def _tell(self, scored: ScoredGroup) -> None:
        for score in scored.scores:
            is_new = score.outcome is Outcome.INFRASTRUCTURE and score.reason not in self._told
            if is_new and self._on_failure is not None and len(self._told) < MAX_REASONS:
                self._told.add(score.reason)
                self._on_failure(score.reason)

    async def _judged(self, each: WeightedReward, group: Group) -> list[Judgement]:
        num_rows = len(group.rollouts)
        try:
            if isinstance(each.reward, Judge):
                judge, texts = each.reward, _completions(group)
                rows = await _in_thread(lambda: judge.judge(texts, _columns(group)))
            else:
                limit_s = self.timeout_s * max(num_rows, 1)
                values = await asyncio.wait_for(_called(each.reward, group), limit_s)
                rows = [_judgement(value) for value in _as_list(values)]
            if len(rows) != num_rows:
                raise ValueError(f"{len(rows)} values for {num_rows} completions")
        except asyncio.TimeoutError:
            reason = f"no result within {self.timeout_s * max(num_rows, 1):g} s"
            return [Judgement(None, failure=reason)] * num_rows
        except Exception as error:  # a reward is the user's code, and a run outlives its faults
            reason = f"{type(error).__name__}: {error}"
            return [Judgement(None, failure=reason)] * num_rows
        return rows

    def _total(self, row: Sequence[Judgement]) -> Score:
        parts: dict[str, float] = {}
        failures: list[str] = []
        missing: list[str] = []
        notes: list[str] = []
        total = 0.0
        for each, judged in zip(self.rewards, row, strict=True):
            parts.update({f"{each.name}/{key}": value for key, value in judged.parts.items()})
            if judged.failure:
                failures.append(f"{each.name}: {judged.failure}")
            elif judged.value is None:
                missing.append(f"{each.name}: {judged.note or 'the reward gave None'}")
            else:
                parts[each.name] = judged.value
                total += each.weight * judged.value
                notes += [f"{each.name}: {judged.note}"] if judged.note else []
        if failures or not math.isfinite(total):
            failures = failures or [f"the weighted sum is {total}"]
            return Score(Outcome.INFRASTRUCTURE, None, parts, "; ".join(failures))
        if missing:
            return Score(Outcome.UNSCORABLE, None, parts, "; ".join(missing))
        return Score(Outcome.SCORED, total, parts, "; ".join(notes))


def _with_own_names(rewards: Sequence[WeightedReward]) -> tuple[WeightedReward, ...]:
    seen: dict[str, int] = {}
    named: list[WeightedReward] = []
    for each in rewards:
        seen[each.name] = seen.get(each.name, 0) + 1
        count = seen[each.name]
        name = each.name if count == 1 else f"{each.name}#{count}"
        named.append(WeightedReward(name, each.reward, each.weight))
    return tuple(named)


def _completions(group: Group) -> list[Any]:
    if isinstance(group.prompt.content, str):
        return [rollout.text for rollout in group.rollouts]
    return [[{"role": "assistant", "content": rollout.text}] for rollout in group.rollouts]


def _columns(group: Group) -> dict[str, Any]:
    return {name: [value] * len(group.rollouts) for name, value in group.prompt.columns.items()}


def _arguments(reward: Reward, group: Group) -> dict[str, Any]:
    """Return what a reward is called with: of what it may take, all that it accepts."""
    content = group.prompt.content
    prompts = [
        content if isinstance(content, str) else [dict(message) for message in content]
        for _ in group.rollouts
    ]
    given = {
        **_columns(group),
        "completion_ids": [rollout.tokens["id"].tolist() for rollout in group.rollouts],
        "sampled_tokens": [int(rollout.tokens["trained"].sum()) for rollout in group.rollouts],
        "prompts": prompts,
        "completions": _completions(group),
    }
    parameters = inspect.signature(reward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given}
    # An option that the configuration set is not overwritten by a column of the same name.
    preset = cast(Mapping[str, Any], getattr(reward, "keywords", {}))
    return {name: value for name, value in given.items() if name not in preset}


async def _called(reward: Reward, group: Group) -> Any:
    arguments = _arguments(reward, group)
    plain = getattr(reward, "func", reward)
    call = getattr(plain, "__call__", None)  # noqa: B004 - an object may have an async __call__
    if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(call):
        try:
            return await reward(**arguments)
        except SystemExit as error:  # would end the event loop, and the run with code 0
            raise RuntimeError(f"the reward raised {error!r}") from error
    result = await _in_thread(lambda: reward(**arguments))
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[[], T]) -> T:
    """Return what a blocking function returns, run in a thread of its own.

    The loop's shared threads would be used up by functions that never end, and would keep the
    program from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result: T | None = None
        failed: BaseException | None = None
        try:
            result = context.run(function)
        except BaseException as error:
            failed = error
            # A future refuses to hold a StopIteration; a SystemExit in it would end the run.
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                failed = RuntimeError(f"the reward raised {error!r}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, daemon=True, name="reward").start()
    return await future


def _as_list(values: Any) -> list[Any]:
    kind = type(values).__name__
    if kind in ("str", "bytes", "dict") or not hasattr(values, "__len__"):
        raise TypeError(f"a reward returns a list of numbers or None, not a {kind}")
    return list(values)


def _judgement(value: Any) -> Judgement:
    if isinstance(value, Judgement):
        return value
    if value is None:
        return Judgement(None)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return Judgement(None, failure=f"the reward gave {value!r}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        return Judgement(None, failure=f"the reward gave {number}")
    return Judgement(number)
