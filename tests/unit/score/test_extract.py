"""Where in a reply its answer stands."""

import time

import pytest

from lagzero.score.extract import NoAnswer, extract_answer, unwrap
from lagzero.score.number_answer import last_number

FOUND = [
    (r"So \boxed{615}. Once more. **Final Answer** \boxed{615}", "615"),
    (r"\boxed{1}, no, \boxed{2}", "2"),
    (r"\boxed{3 and \boxed{4}", "4"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed 5", "5"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\fbox{7}", "7"),
    ("#### -6", "-6"),
    ("3 * 5\n#### 15\n", "15"),
    ("#### **5**", "5"),
    ("Final Answer: **61**", "61"),
    ("**Final Answer:** 61", "61"),
    ("**Final Answer**: 61", "61"),
    ("**Final answer: 61**", "61"),
    ("### Final Answer\n\n61", "61"),
    ("Final Answer:\n**12**", "12"),
    (r"The final answer is $\frac12$.", r"\frac12"),
    ("the answer is 5.", "5"),
    ("The answer is 5 because 3+2=5.", "5"),
    ("The answer is 3.14", "3.14"),
    ("The answer is 5. It was once 6.", "5"),
    ("The correct answer is (C).", "(C)"),
    ("Answer: 5\nAnswer: 6", "6"),
    ("ANSWER: Don't know", "Don't know"),
    (r"Hence the answer is \(x=5\).", "x=5"),
    ("<think>9</think> 11", "11"),
    (r"so 9, \boxed{9}</think>\boxed{3}", "3"),
    (r"<think>a</think>\boxed{1}<think>\boxed{2}</think>", "1"),
    (r"\boxed{4}<think>\boxed{2}</think>done", "4"),
    ("<answer>5</answer> then <answer>6</answer>", "6"),
    ("12", "12"),
    (" 12. ", "12"),
    ("$12$", "12"),
    ("**12**", "12"),
    ("-3/4", "-3/4"),
    ("x+1", "x+1"),
    ("B", "B"),
]

MISSING = [
    r"\boxed{8} ... \boxed{}",
    r"\boxed{8} ... \boxed{ \text{ } }",
    r"First \boxed{8} ... no wait, \boxed{",
    r"\boxed{8} then \boxed{9",
    r"\boxed{9} and #### 8 then \boxed",
    "####",
    "#### 5\n####",
    "<answer>5</answer> <answer>",
    "<answer></answer>",
    "Final answer:",
    "<think> perhaps 4, perhaps 9",
    r"<think>a</think>\boxed{1}<think>\boxed{2}",
    "<think>the answer is 9</think>\nno idea",
    r"<think>9, \boxed{9}</think> I think 11",
    "<THINK>5",
    "",
    "no idea",
    "I think 11",
    "The sum is 12",
    "I don't have the final answer",
]


@pytest.mark.parametrize(("reply", "answer"), FOUND)
def test_answer_is_found(reply, answer) -> None:
    """SV6: the last well-formed box; then the other marks; then a bare answer."""
    assert extract_answer(reply) == answer


@pytest.mark.parametrize("reply", MISSING)
def test_no_answer_is_found(reply) -> None:
    """SV4, SV6: nothing stands in for a last mark that is cut off, or for open reasoning."""
    assert isinstance(extract_answer(reply), NoAnswer)


@pytest.mark.parametrize(
    "reply",
    [
        r"\boxed{" * 15_000,
        r"\boxed{" * 15_000 + "}" * 15_000,
        "**" * 40_000 + "5",
        "<think></think>" * 8_000,
        "the answer is" + " " * 100_000 + "5",
        "answer " * 15_000,
        "####" + " *" * 50_000,
        "$" * 100_000,
        r"\boxed{" + "1 234 " * 3_000 + "}",
        "Answer: " + ", " * 50_000,
    ],
    ids=range(10),
)
def test_long_replies_are_searched_in_a_bounded_time(reply) -> None:
    """RF1: no pattern takes time that grows with the square of a reply."""
    started = time.monotonic()
    extract_answer(reply)
    assert time.monotonic() - started < 20


def test_unwrapping_twice_changes_nothing() -> None:
    """SV3: a layer that unwraps again finds the same answer."""
    for text in (r"... so \boxed{12}", "#### 12", "12", r"\boxed{\frac12}"):
        assert unwrap(unwrap(text)) == unwrap(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("7-3", "3"),
        ("it is -3", "-3"),
        ("x = 1,234.5 m", "1,234.5"),
        ("about 2/7", "2/7"),
        ("v2", None),
        ("none", None),
        ("12.", "12"),
    ],
)
def test_last_number(text, number) -> None:
    """A sign belongs to the number only where nothing is before it to subtract from."""
    assert last_number(text) == number
