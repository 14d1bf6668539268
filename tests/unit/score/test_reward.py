"""Composition of rewards, and the three outcomes."""

import asyncio
import functools
import math
import threading
import time

import pytest

from lagzero.config import RewardConfig, ScoreConfig
from lagzero.errors import ConfigError
from lagzero.score.math_answer import MathAnswer
from lagzero.score.number_answer import NumberAnswer
from lagzero.score.reward import RewardScorer, WeightedReward, build_scorer
from lagzero.types import Finish, Group, Outcome, Prompt, Rollout, given_tokens

CHAT = ({"role": "user", "content": "What is 5 + 7?"},)


def group_of(texts, columns=None, content="What is 5 + 7?", index=0) -> Group:
    prompt = Prompt("p0", (1, 2), content, {"answer": "12"} if columns is None else columns)
    rollouts = tuple(
        Rollout(at, given_tokens(range(at + 1)), text, Finish.STOP) for at, text in enumerate(texts)
    )
    return Group(index, prompt, rollouts)


def scores_of(rewards, group, timeout_s=10.0):
    named = [
        each if isinstance(each, WeightedReward) else WeightedReward(f"r{at}", each)
        for at, each in enumerate(rewards)
    ]
    scored = asyncio.run(RewardScorer(named, timeout_s=timeout_s).score(group))
    assert scored.group is group
    return scored.scores


def test_each_sample_gets_its_own_score_in_its_own_place() -> None:
    """SV1: five texts, two without an answer; nothing shifts, and the wrong answer is recorded."""
    texts = [r"\boxed{12}", "", r"so \boxed{137}", "no idea", r"it is \boxed{12}."]
    scores = scores_of([WeightedReward("math", MathAnswer())], group_of(texts))
    assert [score.value for score in scores] == [1, 0, 0, 0, 1]
    assert scores[2].reason == "math: wrong: 137"
    assert [score.parts["math/answered"] for score in scores] == [1, 0, 1, 0, 1]


def test_extraction_that_raises_fails_one_group_and_shifts_nothing() -> None:
    """SV1: an exception inside a reward is one outcome for each sample, never two."""

    def breaks(prompts, completions, **columns):
        return [1.0 / len(text) for text in completions]

    scores = scores_of([breaks], group_of(["a", "", "c"]))
    assert [score.outcome for score in scores] == [Outcome.INFRASTRUCTURE] * 3
    assert "ZeroDivisionError" in scores[0].reason


def test_total_is_the_weighted_sum_and_parts_are_unweighted() -> None:
    """total = sum of weight * value."""
    first = WeightedReward("first", lambda prompts, completions: [1.0, 2.0], 0.5)
    second = WeightedReward("second", lambda prompts, completions: [4.0, 8.0], -0.25)
    scores = scores_of([first, second], group_of(["a", "b"]))
    assert [score.value for score in scores] == [-0.5, -1.0]
    assert dict(scores[1].parts) == {"first": 2.0, "second": 8.0}


def test_none_is_unscorable_and_touches_no_other_sample() -> None:
    """The three outcomes stay apart, sample by sample."""

    def some(prompts, completions, **columns):
        return [1.0, None, float("nan"), float("inf"), "x", True]

    scores = scores_of([some, lambda prompts, completions: [2.0] * 6], group_of(["a"] * 6))
    assert [score.outcome.value for score in scores] == [
        "scored", "unscorable", "infrastructure", "infrastructure", "infrastructure", "scored",
    ]  # fmt: skip
    assert [score.value for score in scores] == [3.0, None, None, None, None, 3.0]
    assert dict(scores[1].parts) == {"r1": 2.0}
    assert "nan" in scores[2].reason


def test_infrastructure_wins_over_unscorable() -> None:
    """A sample that one reward could not judge and another refused is the machinery's."""
    scores = scores_of(
        [lambda prompts, completions: [None], lambda prompts, completions: [math.nan]],
        group_of(["a"]),
    )
    assert scores[0].outcome is Outcome.INFRASTRUCTURE


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], 1.0, None, "ab", {"a": 1, "b": 2}])
def test_result_that_is_no_list_of_the_right_length_is_infrastructure(values) -> None:
    """No broadcasting, no cutting, no reward 0."""
    scores = scores_of([lambda prompts, completions: values], group_of(["a", "b"]))
    assert [score.outcome for score in scores] == [Outcome.INFRASTRUCTURE] * 2
    assert all(score.value is None and score.reason for score in scores)


def test_arrays_are_accepted() -> None:
    """Numbers of other libraries too."""
    import numpy as np

    scores = scores_of([lambda prompts, completions: np.array([0.5, 1])], group_of(["a", "b"]))
    assert [score.value for score in scores] == [0.5, 1.0]


def test_late_sync_reward_is_infrastructure_and_blocks_nothing() -> None:
    """RF7: lateness is not reward 0; the loop runs on meanwhile."""
    release = threading.Event()

    def stuck(prompts, completions, **columns):
        release.wait(30)
        return [1.0]

    async def main():
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.005)

        heart = asyncio.create_task(beat())
        scorer = RewardScorer([WeightedReward("stuck", stuck)], timeout_s=0.2)
        scored = await scorer.score(group_of(["a"]))
        heart.cancel()
        return scored.scores[0], beats

    started = time.monotonic()
    score, beats = asyncio.run(main())
    release.set()
    assert score.outcome is Outcome.INFRASTRUCTURE
    assert "0.2 s" in score.reason
    assert beats > 5
    assert time.monotonic() - started < 40


def test_late_async_reward_is_infrastructure() -> None:
    """And a prompt one is scored."""

    async def slow(prompts, completions, **columns):
        await asyncio.sleep(30)

    async def quick(prompts, completions, **columns):
        await asyncio.sleep(0)
        return [2.0]

    assert scores_of([slow], group_of(["a"]), 0.1)[0].outcome is Outcome.INFRASTRUCTURE
    assert scores_of([quick], group_of(["a"]), 5.0)[0].value == 2.0


def test_async_objects_and_bound_options_are_awaited() -> None:
    """An object with an async __call__, and a partial of an async function."""

    class Reward:
        async def __call__(self, prompts, completions, **columns):
            return [1.0]

    async def scaled(prompts, completions, scale, **columns):
        return [scale]

    rewards = [Reward(), functools.partial(scaled, scale=3.0)]
    assert scores_of(rewards, group_of(["a"]))[0].value == 4.0


def test_sync_rewards_run_outside_the_loops_thread() -> None:
    """So that they cannot block it."""
    seen = []

    def where(prompts, completions, **columns):
        seen.append(threading.current_thread())
        return [1.0]

    scores_of([where], group_of(["a"]))
    assert seen[0] is not threading.main_thread()


def test_text_prompts_and_columns_are_given_as_lists() -> None:
    """f(prompts, completions, **columns), one entry a rollout."""
    seen = {}

    def look(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0, 0.0]

    scores_of([look], group_of(["a", "b"], {"answer": "12", "level": 3}))
    assert seen == {
        "prompts": ["What is 5 + 7?"] * 2,
        "completions": ["a", "b"],
        "answer": ["12", "12"],
        "level": [3, 3],
        "completion_ids": [[0], [0, 1]],
        "sampled_tokens": [0, 0],  # a tool wrote them
    }


def test_chat_prompts_come_with_chat_completions() -> None:
    """The conversational form, which the built-ins read as well."""
    seen = {}

    def look(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0.0]

    scores = scores_of([look, NumberAnswer(), MathAnswer()], group_of(["12"], content=CHAT))
    assert seen["prompts"] == [[dict(CHAT[0])]]
    assert seen["completions"] == [[{"role": "assistant", "content": "12"}]]
    assert scores[0].value == 2.0


def test_function_gets_only_what_it_accepts() -> None:
    """Columns and extras that a strict signature does not name are left out."""

    def strict(prompts, completions, completion_ids, answer):
        return [float(len(completion_ids[0])) if answer == ["12"] else 0.0]

    scores = scores_of([strict], group_of(["a"], {"answer": "12", "other": 1}))
    assert scores[0].value == 1.0


def test_missing_column_is_named() -> None:
    """With the columns there are."""
    scores = scores_of([NumberAnswer()], group_of(["12"], {"gold": "12"}))
    assert scores[0].outcome is Outcome.INFRASTRUCTURE
    assert "'answer'" in scores[0].reason
    assert "gold" in scores[0].reason


def test_row_without_a_gold_answer_is_unscorable() -> None:
    """Not wrong."""
    scores = scores_of([MathAnswer()], group_of(["12"], {"answer": None}))
    assert scores[0].outcome is Outcome.UNSCORABLE


def test_checker_failure_is_infrastructure_for_its_sample_only() -> None:
    """A dead worker is nobody's wrong answer."""
    reward = MathAnswer()
    reward.close()
    texts = ["12", r"\boxed{12+x-x}", "13"]
    scores = scores_of([reward], group_of(texts))
    assert [score.outcome.value for score in scores] == ["scored", "infrastructure", "scored"]


def test_same_reward_twice_has_two_names() -> None:
    """No part hides another."""
    config = ScoreConfig(
        rewards=[RewardConfig(use="format"), RewardConfig(use="format", weight=0.5)]
    )
    scores = asyncio.run(build_scorer(config).score(group_of([r"\boxed{1}"]))).scores
    assert dict(scores[0].parts) == {"format": 1.0, "format#2": 1.0}
    assert scores[0].value == 1.5


def test_group_without_rollouts_has_no_scores() -> None:
    """RF6: nothing to judge is not an error."""
    assert scores_of([NumberAnswer()], group_of([])) == ()


def test_weighted_sum_that_overflows_is_infrastructure() -> None:
    """A total must be finite."""
    big = WeightedReward("big", lambda prompts, completions: [1e308], 1e10)
    assert scores_of([big], group_of(["a"]))[0].outcome is Outcome.INFRASTRUCTURE


def test_many_groups_are_scored_at_once_with_their_own_gold() -> None:
    """DI8: each group is judged by its own prompt's columns."""
    scorer = RewardScorer([WeightedReward("n", NumberAnswer()), WeightedReward("m", MathAnswer())])

    async def main():
        groups = [group_of(["4", "5"], {"answer": 4 + at % 2}, index=at) for at in range(16)]
        return await asyncio.gather(*map(scorer.score, groups))

    for at, scored in enumerate(asyncio.run(main())):
        assert [score.value for score in scored.scores] == ([2, 0] if at % 2 == 0 else [0, 2])


def test_no_rewards_is_a_configuration_error() -> None:
    """A scorer of nothing would pay everything 0."""
    with pytest.raises(ConfigError):
        RewardScorer([])


def test_a_reward_that_asks_to_exit_is_infrastructure_and_ends_nothing() -> None:
    """SystemExit in a thread or a coroutine would end the whole run, with code 0."""

    def leaves(prompts, completions):
        raise SystemExit(0)

    async def leaves_later(prompts, completions):
        raise SystemExit(0)

    def interrupts(prompts, completions):
        raise KeyboardInterrupt

    for reward, name in ((leaves, "SystemExit(0)"), (leaves_later, "SystemExit(0)"),
                         (interrupts, "KeyboardInterrupt()")):  # fmt: skip
        scores = scores_of([reward], group_of(["a", "b"]))
        assert [score.outcome for score in scores] == [Outcome.INFRASTRUCTURE] * 2
        assert f"the reward raised {name}" in scores[0].reason


def test_each_different_failure_is_told_once_and_no_more_than_ten() -> None:
    """A few rollouts that fail are not hidden in a count."""

    def some(prompts, completions):
        return [1.0, "x", None, "x", "y"]

    told: list[str] = []
    scorer = RewardScorer([WeightedReward("some", some)], on_failure=told.append)

    async def twice() -> None:
        await scorer.score(group_of(["a"] * 5))
        await scorer.score(group_of(["a"] * 5))

    asyncio.run(twice())
    assert told == [f"some: the reward gave {text!r}, which is not a number" for text in "xy"]

    told.clear()
    many = WeightedReward("many", lambda prompts, completions: list(completions))
    scorer = RewardScorer([many], on_failure=told.append)
    asyncio.run(scorer.score(group_of([f"reply {n}" for n in range(30)])))
    assert len(told) == 10
