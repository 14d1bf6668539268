"""Generated number problems."""

import itertools
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.config import SourceConfig
from lagzero.data.arithmetic import (
    Task,
    arithmetic_records,
    draw_problem,
    in_eval,
    parse_options,
)
from lagzero.errors import ConfigError

MIX = [
    {"kind": "add", "digits": 2},
    {"kind": "sub", "digits": 3},
    {"kind": "mul", "digits": 2, "count": 3},
    {"kind": "max"},
    {"kind": "min", "count": 4},
    {"kind": "compare", "digits": 3},
    {"kind": "count"},
]


def generate(tasks=None, **settings):
    options = {} if tasks is None else {"tasks": tasks}
    source = SourceConfig(kind="arithmetic", options=options, **settings)
    return [record.fields for record in arithmetic_records(source).records]


def numbers_of(row):
    return [int(text) for text in re.findall(r"\d+", row["prompt"])]


def question(row):
    """What is asked, worked out from the text alone: the kind and its operands, sorted."""
    kind = row["task"].split("-")[0]
    numbers = numbers_of(row)
    head = numbers[:1] if kind == "count" else []
    rest = numbers[1:] if kind == "count" else numbers
    return ("max" if kind == "compare" else kind, tuple(head), tuple(sorted(rest)))


ANSWER = {
    "add": sum,
    "sub": lambda n: n[0] - n[1],
    "mul": lambda n: n[0] * n[1] * n[2],
    "max": max,
    "min": min,
    "compare": max,
    "count": lambda n: n[1:].count(n[0]),
}


def test_answers_are_right_by_their_own_text():
    rows = generate(MIX, size=350, seed=4)
    for row in rows:
        kind = row["task"].split("-")[0]
        assert row["answer"] == str(ANSWER[kind](numbers_of(row))), row
    assert Counter(row["task"].split("-")[0] for row in rows) == dict.fromkeys(ANSWER, 50)


def test_the_default_is_two_digit_sums():
    row = generate(size=1)[0]
    assert re.fullmatch(r"What is \d\d \+ \d\d\? Reply with just the number\.", row["prompt"])
    assert row["task"] == "add-2x2"
    assert len(generate()) == 1000


@given(st.integers(-5, 5), st.integers(-5, 5))
@settings(max_examples=15, deadline=None)
def test_no_seed_lets_a_held_out_problem_into_training(one, other):
    train = generate(MIX, size=210, seed=one)
    held_out = generate(MIX, size=210, seed=other, split="eval")
    assert not {question(row) for row in train} & {question(row) for row in held_out}


def test_the_splits_part_the_whole_space_of_one_digit_sums():
    """Every problem is in exactly one split, and both orders of its operands in the same one."""
    held_out = {
        (a, b)
        for a, b in itertools.product(range(10), repeat=2)
        if in_eval(f"add {sorted([a, b])}")
    }
    drawn = {"train": set(), "eval": set()}
    for split, size in (("eval", len(held_out)), ("train", 100 - len(held_out))):
        rows = generate([{"kind": "add", "digits": 1}], size=size, split=split)
        drawn[split] = {tuple(numbers_of(row)) for row in rows}
    assert drawn["eval"] == held_out
    assert drawn["train"] == set(itertools.product(range(10), repeat=2)) - held_out
    assert {(b, a) for a, b in held_out} == held_out


def test_one_in_five_problems_is_held_out():
    task = Task("add", digits=6, count=2)
    rng = random.Random(0)
    share = sum(in_eval(draw_problem(task, rng).key) for _ in range(4000)) / 4000
    assert abs(share - 0.2) < 0.025  # four standard deviations of a share of 4000


def test_which_problems_are_held_out_never_changes():
    assert [n for n in range(40) if in_eval(f"add [1, {n}]")] == [0, 4, 5, 10, 12, 18, 27, 29]


def test_prompts_are_never_repeated():
    rows = generate([{"kind": "add", "digits": 1}, {"kind": "max"}], size=140)
    assert len({row["prompt"] for row in rows}) == 140


def test_too_small_a_space_is_reported_and_not_repeated():
    with pytest.raises(ConfigError, match=r"found only \d+ different 'add-2x1' problems"):
        generate([{"kind": "add", "digits": 1}], size=101)


def test_a_seed_gives_the_same_rows_and_another_seed_others():
    assert generate(MIX, size=50, seed=-1) == generate(MIX, size=50, seed=-1)
    assert generate(MIX, size=50, seed=-1) != generate(MIX, size=50, seed=1)


def test_a_shorter_source_is_a_prefix_of_a_longer_one():
    assert generate(MIX, size=80)[:50] == generate(MIX, size=50)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_the_mix_follows_the_weights_at_every_length(weights, size):
    tasks = [{"kind": "add", "digits": 3 + n, "weight": w} for n, w in enumerate(weights)]
    counts = Counter(row["task"] for row in generate(tasks, size=size))
    for n, weight in enumerate(weights):
        assert abs(counts[f"add-2x{3 + n}"] - size * weight / sum(weights)) < len(weights)


@given(st.integers(1, 18), st.sampled_from(["add", "max", "sub"]), st.integers())
def test_operands_have_the_digits_asked_for(digits, kind, seed):
    task = Task(kind, digits=digits, count=2, wording="{problem}")
    problem = draw_problem(task, random.Random(seed))
    assert {len(text) for text in re.findall(r"\d+", problem.parts["problem"])} == {digits}


def test_a_wording_of_ones_own_is_used():
    row = generate([{"kind": "add", "wording": "{problem} = {{?}}"}], size=1)[0]
    assert re.fullmatch(r"\d\d \+ \d\d = \{\?\}", row["prompt"])


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"kind": "ad"}, ".kind: 'ad' is unknown; did you mean 'add'"),
        ({"kind": "add", "digit": 2}, ".digit: 'digit' is unknown; did you mean 'digits'"),
        ({}, ".kind: missing"),
        ("add", "must be a mapping"),
        ({"kind": "add", "digits": 0}, ".digits: must be"),
        ({"kind": "add", "digits": 2.0}, ".digits: must be"),
        ({"kind": "add", "weight": 0}, ".weight: must be"),
        ({"kind": "add", "weight": True}, ".weight: must be"),
        ({"kind": "add", "weight": float("nan")}, ".weight: must be"),
        ({"kind": "max", "digits": 1, "count": 11}, "from 2 to 10"),
        ({"kind": "sub", "count": 3}, ".count: is always 2"),
        ({"kind": "add", "wording": "no field"}, ".wording: must use {problem}"),
        ({"kind": "add", "wording": "{problem} {x}"}, ".wording: must use {problem}"),
        ({"kind": "add", "wording": "{problem"}, ".wording: is not a valid format"),
        ({"kind": "add", "wording": "{problem.real}"}, ".wording: must use"),
        ({"kind": "count", "wording": "{problem}"}, "{problem} and {target}"),
    ],
)
def test_a_wrong_task_is_named_with_its_remedy(task, reason):
    with pytest.raises(ConfigError) as error:
        generate([{"kind": "add"}, task])
    (problem,) = error.value.problems
    assert problem.startswith("options.tasks.1")
    assert reason in problem


def test_all_faults_of_the_options_are_reported_together():
    tasks = [{"kind": "ad"}, {"kind": "add"}, {"kind": "max", "digits": 0, "cuont": 1}]
    _, problems = parse_options({"task": 1, "tasks": tasks})
    assert [problem.split(": ")[0] for problem in problems] == [
        "options.task",
        "options.tasks.0.kind",
        "options.tasks.2.cuont",
        "options.tasks.2.digits",
    ]
