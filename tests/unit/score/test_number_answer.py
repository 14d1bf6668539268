"""The rewards that need no worker: numbers, exact text, form."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from lagzero.score.gold import gold_text
from lagzero.score.math_answer import MathAnswer
from lagzero.score.number_answer import NumberAnswer, plain_number
from lagzero.score.text_rewards import ExactMatch, Format


@pytest.mark.parametrize("reward", [NumberAnswer(), NumberAnswer(strict=False), MathAnswer()])
@pytest.mark.parametrize("gold", [3, 3.0, np.int64(3), np.float32(3), np.array(3), "3", " 3 "])
def test_gold_of_any_number_type_accepts_the_reply(reward, gold) -> None:
    """DI2: the type of the answer column does not matter."""
    assert reward(["p", "p"], ["3", "4"], answer=[gold, gold]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (3.0, "3"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (10**30, str(10**30)),
        (np.float64(2.5), "2.5"),
        (Fraction(2, 7), "2/7"),
        (Decimal("4.50"), "4.50"),
        (True, "True"),
        (None, None),
        ("", None),
        (float("nan"), None),
    ],
)
def test_gold_as_text(value, text) -> None:
    """Text and numbers, exactly."""
    assert gold_text(value) == text


def test_gold_of_another_type_is_refused() -> None:
    """A list is not silently one answer."""
    with pytest.raises(TypeError, match="list"):
        gold_text([1, 2])


@pytest.mark.parametrize(
    ("reply", "strict", "last"),
    [
        ("12", 1.0, 1.0),
        (" 12.\n", 1.0, 1.0),
        ("**12**", 1.0, 1.0),
        ("$12$", 1.0, 1.0),
        ("+12", 1.0, 1.0),
        ("12.0", 1.0, 1.0),
        (r"so \boxed{12}", 1.0, 1.0),
        ("The answer is 12", 0.0, 1.0),
        ("5 + 7 = 12", 0.0, 1.0),
        ("12 = 5 + 7", 0.0, 0.0),
        ("112", 0.0, 0.0),
        ("-12", 0.0, 0.0),
        ("12 13", 0.0, 0.0),
        ("1,2", 0.0, 0.0),
        ("twelve", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("<think>12", 0.0, 0.0),
        ("<think>12</think>", 0.0, 0.0),
        ("<think>11</think>12", 1.0, 1.0),
        (r"12 \boxed{", 0.0, 0.0),
        (r"\boxed{12} or \boxed{}", 0.0, 0.0),
    ],
)
def test_number_in_a_reply(reply, strict, last) -> None:
    """SV4, SV6: the whole reply, or its last number where that is asked for."""
    assert NumberAnswer()(["p"], [reply], answer=[12]) == [strict]
    assert NumberAnswer(strict=False)(["p"], [reply], answer=[12]) == [last]


def test_answered_is_counted_apart_from_right() -> None:
    """SV4: no answer and a wrong answer are two things."""
    for reward in (NumberAnswer(strict=False), MathAnswer()):
        judged = reward.judge([r"\boxed{9}", r"\boxed{8}", "no idea"], {"answer": [9, 9, 9]})
        assert [judgement.value for judgement in judged] == [1.0, 0.0, 0.0]
        assert [judgement.parts["answered"] for judgement in judged] == [1.0, 1.0, 0.0]


def test_reasoning_is_not_searched_for_the_answer() -> None:
    """SV4: cut-off reasoning has no answer; closed reasoning is not what counts."""
    replies = ["<think> maybe 4, maybe 9", "<think>9? yes, 9.</think>\nI think 11"]
    judged = MathAnswer(last_number=True).judge(replies, {"answer": [9, 9]})
    assert [judgement.value for judgement in judged] == [0.0, 0.0]
    assert [judgement.parts["answered"] for judgement in judged] == [0.0, 1.0]
    assert judged[1].note == "wrong: 11"
    strict = MathAnswer().judge(replies, {"answer": [9, 9]})
    assert [judgement.parts["answered"] for judgement in strict] == [0.0, 0.0]


def test_last_number_must_be_asked_for() -> None:
    """Prose with a number in it is no answer by itself."""
    assert MathAnswer()(["p"], ["so we get 9"], answer=["9"]) == [0.0]
    assert MathAnswer(last_number=True)(["p"], ["so we get 9"], answer=["9"]) == [1.0]


def test_gold_that_is_no_number_is_an_error() -> None:
    """A row that this reward cannot judge is not a wrong reply."""
    with pytest.raises(ValueError, match="needs a number"):
        NumberAnswer()(["p"], ["3"], answer=["three"])


def test_gold_may_carry_its_working() -> None:
    """A gold column may end in #### 72, or box it."""
    for reward in (NumberAnswer(), MathAnswer(), ExactMatch()):
        for gold in ("48 + 24 = 72\n#### 72", r"so \boxed{72}"):
            assert reward(["p"], ["72"], answer=[gold]) == [1.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234", Fraction(1234)), ("-2/4", Fraction(-1, 2)), (".5", Fraction(1, 2)), ("1/0", None)],
)
def test_plain_number(text, value) -> None:
    """Exact, or none."""
    assert plain_number(text) == value


def test_exact_match_compares_text() -> None:
    """Space at the ends and runs of it do not count; case does."""
    reward = ExactMatch()
    replies = ["Paris", " Paris \n", "paris", r"It is \boxed{Paris}", "Paris, France"]
    assert reward(["p"] * 5, replies, answer=["Paris"] * 5) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert ExactMatch(ignore_case=True)(["p"], ["paris"], answer=["Paris"]) == [1.0]


def test_format_looks_for_a_marked_answer() -> None:
    """Right or wrong; or for the user's own pattern."""
    replies = [r"\boxed{1}", "no idea", r"\boxed{"]
    assert Format()(["p"] * 3, replies) == [1.0, 0.0, 0.0]
    pattern = Format(pattern=r"<think>.*</think>\d+")
    assert pattern(["p"] * 2, ["<think>a\nb</think>3", "3"]) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [NumberAnswer(), NumberAnswer(strict=False), MathAnswer()])
def test_simple_answers_are_scored_in_process(reward) -> None:
    """128 integer answers take a few milliseconds, because no worker is started for them."""
    golds = list(range(128))
    replies = [str(gold) for gold in golds]
    assert sum(reward(["p"] * 128, replies, answer=golds)) == 128
    if isinstance(reward, MathAnswer):
        assert reward.pool.num_alive == 0
