"""Problems of reasoning-gym and the rule that judges them."""

import itertools
import time

import pytest
import sympy.parsing.sympy_parser

from lagzero.config import SourceConfig
from lagzero.data.reasoning_gym_source import (
    extract_answer,
    is_arithmetic,
    reasoning_gym_records,
    reasoning_gym_score,
)
from lagzero.errors import ConfigError

SMALL = {"min_numbers": 3, "max_numbers": 3, "max_value": 20, "min_target": 10, "max_target": 99}


def generate(name="countdown", options=SMALL, **settings):
    source = SourceConfig(kind="reasoning_gym", name=name, options=options, **settings)
    return reasoning_gym_records(source)


@pytest.fixture(scope="module")
def countdown():
    return [record.fields for record in generate(size=5).records]


def test_rows_hold_what_the_datasets_own_rule_needs(countdown):
    score = reasoning_gym_score("countdown")
    entries = [row["entry"] for row in countdown]
    answers = [row["answer"] for row in countdown]
    prompts = [row["prompt"] for row in countdown]
    assert score(prompts, answers, entry=entries, answer=answers) == [1.0] * 5
    assert prompts[0] == entries[0]["question"]
    # another row's solution uses other numbers, so scores follow their own rows
    shifted = score(prompts, answers[1:] + answers[:1], entry=entries)
    assert max(shifted) < 1.0


def test_neighbouring_seeds_and_splits_have_problems_of_their_own():
    """The package numbers seeds so that seed 1 would repeat all of seed 0's problems but one."""
    kinds = [{"seed": 0}, {"seed": 1}, {"seed": 0, "split": "eval"}]
    texts = [
        {r.fields["prompt"] for r in generate("chain_sum", {}, size=200, **k).records}
        for k in kinds
    ]
    assert min(len(found) for found in texts) > 190
    for one, other in itertools.combinations(texts, 2):
        assert len(one & other) < 5  # by chance, where all but one would repeat


def test_the_same_seed_gives_the_same_rows():
    assert generate("chain_sum", {}, size=5).records == generate("chain_sum", {}, size=5).records


def test_a_seed_that_yields_no_problem_is_counted():
    options = SMALL | {"min_target": 1, "max_target": 2, "min_value": 19}
    records = generate(size=40, options=options)
    assert records.left_out == {"not generated": 40 - len(records.records)}
    assert len(records.records) < 40
    assert all(record.place == f"row {record.number}" for record in records.records)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 2", "1 + 2"),
        ("so\n 1 + 2 \n\n", "1 + 2"),
        ("<answer>3</answer> no <answer> 1 + 2 </answer> done\n4", "1 + 2"),
        ("<answer>1 + 2", "1 + 2"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_the_answer_is_the_last_tag_or_else_the_last_line(text, answer):
    assert extract_answer(text) == answer


def test_messages_are_judged_by_the_last_ones_content(countdown):
    row = countdown[0]
    chat = [{"role": "assistant", "content": row["answer"]}]
    assert reasoning_gym_score("countdown")([""], [chat], entry=[row["entry"]]) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "9**9**9**9",
        "9* *9",
        "7//2",
        "1e9",
        "factorial(9)",
        "9!",
        "2(3)",
        "(2)(3)",
        "(2)3",
        "1 2",
        "1\n+ 2",
        "\u0661 + 1",
        "x + 1",
        "1 + 2 = 3",
        "1" + "+1" * 100,
        "",
    ],
)
def test_anything_but_short_arithmetic_scores_zero_and_is_never_evaluated(
    text, countdown, monkeypatch
):
    def forbidden(*args, **kwargs):
        raise AssertionError("evaluated")

    score = reasoning_gym_score("countdown")
    monkeypatch.setattr(sympy.parsing.sympy_parser, "eval_expr", forbidden)
    monkeypatch.setattr("reasoning_gym.games.countdown.parse_expr", forbidden)
    assert not is_arithmetic(text)
    assert score([""], [f"<answer>{text}</answer>"], entry=[countdown[0]["entry"]]) == [0.0]


@pytest.mark.parametrize("text", ["(94*4) - 61 - 6", "-3 + 4/2", "((1))", "1+2", "2*(3)"])
def test_arithmetic_is_let_through(text):
    assert is_arithmetic(text)


@pytest.mark.parametrize("text", ["1/0", "()", "+", ")(", "(" * 150, "9" * 200, "012 + 1"])
def test_arithmetic_nonsense_gets_a_low_score_at_once(text, countdown):
    start = time.monotonic()
    (value,) = reasoning_gym_score("countdown")([""], [text], entry=[countdown[0]["entry"]])
    assert value <= 0.05
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "name", ["binary_matrix", "n_queens", "polynomial_multiplication", "spiral_matrix"]
)
def test_a_dataset_that_evaluates_the_models_text_is_refused(name):
    with pytest.raises(ConfigError, match="^name: .*evaluate the model's text"):
        reasoning_gym_score(name)


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "number_sorting", "propositional_logic"])
def test_other_datasets_judge_their_own_answers_right(name):
    row = generate(name, {}, size=1).records[0].fields
    answer = row["answer"] or row["entry"]["metadata"]["example_answer"]
    assert reasoning_gym_score(name)([""], [answer], entry=[row["entry"]]) == [1.0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "countdwn"}, "did you mean 'countdown'"),
        ({"options": {"min_number": 3}}, "did you mean 'min_numbers'"),
        ({"options": {"seed": 3}}, "'seed' is unknown"),
        ({"options": {"min_numbers": 1}}, "min_numbers must be greater than 1"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        generate(**settings)
