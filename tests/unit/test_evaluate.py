from __future__ import annotations

import asyncio

import pytest

from lagzero.evaluate import EvalResult, evaluate, summarise
from lagzero.types import (
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Score,
    ScoredGroup,
    sampled_tokens,
)


def rollout(member: int, num_tokens: int, finish: Finish = Finish.STOP) -> Rollout:
    tokens = sampled_tokens([1] * num_tokens, [-1.0] * num_tokens, [0] * num_tokens)
    return Rollout(member, tokens, "text", finish)


def scored(value: float, verdict: float) -> Score:
    return Score(Outcome.SCORED, value, {"right": verdict, "style": 1.0})


BROKEN = Score(Outcome.INFRASTRUCTURE, None, {"style": 1.0}, "no result")


def group(*pairs: tuple[Rollout, Score], index: int = 0) -> ScoredGroup:
    prompt = Prompt(f"p{index}", (1,), "text")
    return ScoredGroup(Group(index, prompt, tuple(r for r, _ in pairs)), tuple(s for _, s in pairs))


def test_figures_by_hand():
    groups = [
        group((rollout(0, 2), scored(1.5, 1.0)), (rollout(1, 4, Finish.LENGTH), scored(0.5, 0.0))),
        group((rollout(0, 0, Finish.CONTEXT), BROKEN), (rollout(1, 6), scored(1.0, 0.5)), index=1),
    ]
    assert summarise(groups, "right") == EvalResult(
        num_right=1,  # half right is not right, and the style is not the verdict
        num_scored=3,
        mean_reward=1.0,
        num_prompts=2,
        num_unscored=1,
        mean_tokens=3.0,
        truncated_share=0.5,
    )


def test_nothing_scored_has_no_mean():
    result = summarise([group((rollout(0, 1), BROKEN))], "right")
    assert result.mean_reward is None
    assert (result.num_right, result.num_scored, result.num_unscored) == (0, 0, 1)


def test_no_prompts_give_no_division_by_zero():
    assert summarise([], "right") == EvalResult(0, 0, None, 0, 0, 0.0, 0.0)


class Stages:
    """A source of ``size`` prompts, a generator and a scorer."""

    def __init__(self, size: int, broken: int | None = None, wrong: str = "play"):
        self.size = size
        self.broken = broken
        self.wrong = wrong
        self.played: list[int] = []
        self.cancelled: list[int] = []

    def at(self, index: int) -> Prompt | None:
        return Prompt(f"p{index}", (1,), "text") if index < self.size else None

    async def play(self, index: int, prompt: Prompt) -> Group:
        self.played.append(index)
        assert prompt.id == f"p{index}"
        return await self._work("play", Group(index, prompt, (rollout(0, 1 + index),)), index)

    async def score(self, group: Group) -> ScoredGroup:
        value = float(group.index % 2)
        out = ScoredGroup(group, (scored(value, value),))
        return await self._work("score", out, group.index)

    async def _work(self, what: str, out, index: int):
        try:
            await asyncio.sleep(0 if index == self.broken else 0.001)
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        if index == self.broken and what == self.wrong:
            raise RuntimeError(f"{what} {index}")
        return out


def test_the_first_prompts_are_played_once_each():
    stages = Stages(10)
    result = asyncio.run(evaluate(stages, stages, stages, 5, "right"))
    assert sorted(stages.played) == [0, 1, 2, 3, 4]
    assert (result.num_right, result.num_scored, result.mean_tokens) == (2, 5, 3.0)


def test_fewer_prompts_than_asked_for_are_all_played():
    stages = Stages(3)
    assert asyncio.run(evaluate(stages, stages, stages, 100, "right")).num_prompts == 3


@pytest.mark.parametrize("wrong", ["play", "score"])
def test_a_failure_is_raised_and_leaves_nothing_running(wrong: str):
    async def failing() -> set[asyncio.Task]:
        with pytest.raises(RuntimeError, match=f"{wrong} 1"):
            await evaluate(stages, stages, stages, 4, "right")
        return asyncio.all_tasks() - {asyncio.current_task()}

    stages = Stages(4, broken=1, wrong=wrong)
    assert asyncio.run(failing()) == set()
    assert stages.cancelled == [0, 2, 3]


def test_cancelling_cancels_what_is_played():
    async def cancelled() -> set[asyncio.Task]:
        task = asyncio.create_task(evaluate(stages, stages, stages, 4, "right"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    stages = Stages(4)
    assert asyncio.run(cancelled()) == set()
    assert stages.cancelled == [0, 1, 2, 3]
