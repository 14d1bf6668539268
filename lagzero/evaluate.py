"""Measure a policy on held-out prompts. Sees protocols, and no backend."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from lagzero.protocols import Generator, PromptSource, Scorer
from lagzero.types import Finish, Outcome, ScoredGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What a policy got on held-out prompts.

    A scored rollout counts as right when the reward that is the verdict gave at least 1.
    """

    num_right: int
    num_scored: int
    mean_reward: float | None  # None when no rollout could be scored
    num_prompts: int
    num_unscored: int
    mean_tokens: float
    truncated_share: float  # rollouts cut by a limit


async def evaluate(
    source: PromptSource, generator: Generator, scorer: Scorer, num_prompts: int, verdict: str
) -> EvalResult:
    """Play the first ``num_prompts`` prompts once and judge them; ``verdict`` names the reward that
    says whether an answer is right."""
    prompts = [(i, p) for i in range(num_prompts) if (p := source.at(i)) is not None]
    groups = await _all(generator.play(i, prompt) for i, prompt in prompts)
    scored = await _all(scorer.score(group) for group in groups)
    return summarise(scored, verdict)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return every result in order. A failure or cancellation ends the others before it leaves."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def summarise(groups: list[ScoredGroup], verdict: str) -> EvalResult:
    """Reduce scored groups to the figures of an evaluation."""
    rollouts = [r for g in groups for r in g.group.rollouts]
    scores = [s for g in groups for s in g.scores if s.outcome is Outcome.SCORED]
    values = [s.value for s in scores if s.value is not None]
    cut = sum(r.finish in (Finish.LENGTH, Finish.CONTEXT) for r in rollouts)
    return EvalResult(
        num_right=sum(s.parts[verdict] >= 1 for s in scores),
        num_scored=len(scores),
        mean_reward=sum(values) / len(values) if values else None,
        num_prompts=len(groups),
        num_unscored=len(rollouts) - len(scores),
        mean_tokens=sum(len(r.tokens) for r in rollouts) / max(1, len(rollouts)),
        truncated_share=cut / max(1, len(rollouts)),
    )
