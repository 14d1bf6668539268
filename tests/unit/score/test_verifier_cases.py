"""The answer checker against verdicts that people argued about in public, and more of each kind."""

import json
import sys
from pathlib import Path

import pytest

from lagzero.score.checker_pool import CheckerPool
from lagzero.score.decide import decide_at_once, decide_slowly
from lagzero.score.extract import NoAnswer, extract_answer
from lagzero.score.math_answer import MathAnswer, check

HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "verifier_cases.jsonl").open(encoding="utf-8")]
OWN = [json.loads(line) for line in (HERE / "own_cases.jsonl").open(encoding="utf-8")]

# The rules of docs/rewards.md for what the cases leave to policy.
POLICY = {"V21": True, "V29": True, "V45": False, "V72": True}


@pytest.fixture(scope="module")
def reward():
    """A reward whose workers all of this module's cases share."""
    made = MathAnswer(timeout_s=10.0)
    yield made
    made.close()


def verdict(gold: str, answer: str) -> bool:
    """The verdict, the slow part in this process."""
    at_once = decide_at_once(gold, answer)
    return decide_slowly(gold, answer, False) if at_once is None else at_once


def test_all_cases_are_there() -> None:
    """59 cases, and a rule for each that is left to policy."""
    assert len(CASES) == 59
    assert {case["id"] for case in CASES if case["expected"] == "policy"} == set(POLICY)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_checker_gives_the_right_verdict(case, reward) -> None:
    """The 59 verdicts, through extraction and the worker processes."""
    expected = POLICY[case["id"]] if case["expected"] == "policy" else case["expected"]
    answer = extract_answer(case["answer"]) if case["mode"] == "response" else case["answer"]
    right = not isinstance(answer, NoAnswer) and check(case["gold"], answer, reward.pool)
    assert right is expected


@pytest.mark.parametrize("case", [case for case in CASES if case["mode"] == "response"], ids=str)
def test_reward_agrees_with_the_verdict_on_responses(case, reward) -> None:
    """The reward function pays what the checker says."""
    values = reward(["p"], [case["answer"]], answer=[case["gold"]])
    assert values == [float(case["expected"])]


@pytest.mark.parametrize("case", [case for case in CASES if case["mode"] == "answer"], ids=str)
def test_boxing_an_answer_changes_no_verdict(case, reward) -> None:
    """An answer in a box is the same answer."""
    expected = POLICY[case["id"]] if case["expected"] == "policy" else case["expected"]
    boxed = f"so it is \\boxed{{{case['answer']}}}."
    assert check(case["gold"], boxed, reward.pool) is expected


@pytest.mark.parametrize("case", OWN, ids=lambda case: f"{case['gold']} | {case['answer']}"[:80])
def test_more_of_each_kind(case) -> None:
    """Own cases of the same kinds, the slow part in this process."""
    assert verdict(case["gold"], case["answer"]) is case["expected"]


@pytest.mark.parametrize(
    "gold",
    [case["gold"] for case in CASES if case["gold"]],
    ids=[case["id"] for case in CASES if case["gold"]],
)
def test_every_gold_answer_equals_itself(gold) -> None:
    """Written with more space around it."""
    assert verdict(gold, f"  {gold} ")


def test_numbers_over_the_digit_limit_are_compared_exactly() -> None:
    """5000 digits written out; the process's own limit stays as it was."""
    limit = sys.get_int_max_str_digits()
    assert verdict("1" + "0" * 5000, "10^{5000}")
    assert not verdict("1" + "0" * 4999 + "1", "10^{5000}")
    assert sys.get_int_max_str_digits() == limit


def test_rounding_to_the_gold_answer_is_an_option() -> None:
    """33.3 for 100/3 only where asked for; the answer is what is rounded."""
    with CheckerPool() as pool:

        def rounded(gold: str, answer: str) -> bool:
            return check(gold, answer, pool, round_to_gold=True)

        assert rounded("33.3", r"\frac{100}{3}")
        assert rounded("3.14", r"\pi")
        assert not rounded("33.3", "33.4")
        assert not rounded("3.15", r"\pi")
        assert not rounded(r"\frac{100}{3}", "33.3")
        assert not rounded("33", r"\frac{100}{3}")
        assert rounded("33.3", "33.3")


@pytest.mark.parametrize("gold", [None, "", "  ", float("nan")])
def test_missing_gold_answer_is_never_a_win(gold) -> None:
    """Nor does it count as wrong: the sample has no score."""
    assert check(gold, "3") is False
    reward = MathAnswer()
    assert reward(["p"], ["3"], answer=[gold]) == [None]
