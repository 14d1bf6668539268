"""What a row may hold, and how a bad one is named."""

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.data.rows import Columns, Record, Records, canonical_text, check_records

COLUMNS = Columns("prompt", "answer")


def records(*fields):
    return Records([Record(n, f"line {n}", f) for n, f in enumerate(fields, 1)])


def check(*fields, columns=COLUMNS, chat=True):
    return check_records(records(*fields), columns, "s", chat)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (3, "3"),
        (3.0, "3"),
        (np.int64(3), "3"),
        (np.float32(3), "3"),
        (Decimal("3.00"), "3"),
        ("3", "3"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (np.float32(0.1), "0.1"),
        (1e-7, "0.0000001"),
        (1e20, "100000000000000000000"),
        (10**30, "1" + "0" * 30),
        (100, "100"),
        (" x ", " x "),
        (np.str_("y"), "y"),
    ],
)
def test_equal_numbers_of_any_type_become_one_text(answer, text):
    """DI2."""
    rows, problems = check({"prompt": "p", "answer": answer})
    assert problems == []
    assert rows[0].columns["answer"] == text
    assert type(rows[0].columns["answer"]) in (str, np.str_)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "is missing"),
        ("", "is empty"),
        ("  ", "is empty"),
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
        (True, "neither text nor a number"),
        (np.bool_(False), "neither text nor a number"),
        ([3], "of type list"),
        ({"a": 1}, "of type dict"),
    ],
)
def test_an_unusable_answer_is_refused_with_its_row(answer, reason):
    """DI2."""
    _, problems = check({"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": answer})
    assert len(problems) == 1
    assert problems[0].startswith("line 2: column 'answer' ")
    assert reason in problems[0]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, "is missing"),
        ("", "is empty"),
        (" \n", "is empty"),
        (7, "of type int"),
        ([], "is empty"),
        ([{"role": "user", "content": " "}], "is empty"),
        ([{"role": "user"}], "[0] without 'content'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "[1] without 'role'"),
        ([{"role": "user", "content": ["a"]}], "[0] whose 'content' is not text"),
        (["hello"], "[0] that is not a mapping"),
    ],
)
def test_an_unusable_prompt_is_refused_with_its_row(prompt, reason):
    _, problems = check({"prompt": prompt, "answer": "1"})
    assert len(problems) == 1
    assert problems[0].startswith("line 1: column 'prompt' ")
    assert reason in problems[0]


def test_messages_are_kept_and_null_fields_of_arrow_are_not():
    rows, problems = check(
        {"prompt": [{"role": "user", "content": "hi", "name": None}], "answer": "1"}
    )
    assert problems == []
    assert rows[0].content == ({"role": "user", "content": "hi"},)


def test_messages_need_a_template():
    _, problems = check({"prompt": [{"role": "user", "content": "a"}], "answer": 1}, chat=False)
    assert "data.chat=true" in problems[0]


def test_every_bad_row_is_listed():
    fields = [{"prompt": "p", "answer": None if n % 2 else n} for n in range(50)]
    _, problems = check(*fields)
    assert [p.split(":")[0] for p in problems] == [f"line {n + 1}" for n in range(50) if n % 2]


def test_a_column_that_no_row_has_is_named_once_with_its_nearest():
    """DI2."""
    _, problems = check({"promt": "p", "answer": 1}, {"promt": "q", "answer": None})
    assert len(problems) == 2
    assert "no column 'prompt'; did you mean 'promt'? (columns: answer, promt)" in problems[0]
    assert problems[0].startswith("every row")
    assert problems[1].startswith("line 2: column 'answer'")


def test_a_column_that_one_row_lacks_is_named_with_that_row():
    """DI2."""
    _, problems = check({"prompt": "p", "answer": 1}, {"prompt": "q", "anser": 1})
    assert problems == [
        "line 2: no column 'answer'; did you mean 'anser'? (columns: anser, prompt); "
        "set data.answer_column"
    ]


def test_a_far_name_is_not_suggested_and_the_remedy_is_named():
    _, problems = check({"question": "p", "gold": 1})
    assert problems == [
        "every row: no column 'prompt' (columns: gold, question); set data.prompt_column",
        "every row: no column 'answer' (columns: gold, question); set data.answer_column",
    ]


def test_bad_rows_are_in_order_whatever_is_wrong_with_them():
    records = Records(
        [Record(n, f"line {n}", {"prompt": "", "answer": 1}) for n in (1, 3, 5)],
        {2: "line 2: not JSON", 4: "line 4: not JSON"},
    )
    _, problems = check_records(records, Columns("prompt", "answer"), "s", True)
    assert [p.split(":")[0] for p in problems] == [f"line {n}" for n in range(1, 6)]


def test_a_repeated_id_names_both_rows():
    """DI4."""
    columns = Columns("prompt", "answer", "id")
    _, problems = check(
        {"id": 1, "prompt": "p", "answer": 4},
        {"id": 2, "prompt": "p", "answer": 5},
        {"id": "1", "prompt": "p", "answer": 6},
        columns=columns,
    )
    assert problems == ["line 3: id '1' repeats that of line 1"]


def test_a_repeated_id_is_seen_even_when_the_first_row_is_bad():
    columns = Columns("prompt", "answer", "id")
    _, problems = check(
        {"id": 1, "prompt": "", "answer": 4}, {"id": 1, "prompt": "p", "answer": 5}, columns=columns
    )
    assert len(problems) == 2


def test_without_an_id_column_the_row_number_is_the_id():
    rows, _ = check({"prompt": "p", "answer": 4}, {"prompt": "p", "answer": 4})
    assert [row.id for row in rows] == ["s/1", "s/2"]


def test_the_mapped_answer_reaches_rewards_as_answer():
    columns = Columns("q", "solution")
    rows, _ = check({"q": "p", "solution": 3.0, "level": 2}, columns=columns)
    assert rows[0].columns == {"solution": 3.0, "answer": "3", "level": 2}


def test_a_reward_without_answers_leaves_the_columns_alone():
    rows, problems = check({"prompt": "p", "answer": None}, columns=Columns("prompt", None))
    assert problems == []
    assert rows[0].columns == {"answer": None}


def test_a_column_named_like_a_reward_argument_is_refused():
    _, problems = check({"prompt": "p", "answer": 1, "completions": "x"})
    assert "column 'completions' has a name that rewards are called with" in problems[0]


@given(st.integers())
def test_an_integer_keeps_every_digit(value):
    assert int(canonical_text(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_keeps_its_value_and_is_written_without_exponent(value):
    text = canonical_text(value)
    assert float(text) == value
    assert "e" not in text.lower()
