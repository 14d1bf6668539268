"""The order of visits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.data.prompts import Prompts, epoch_order
from lagzero.data.rows import Row


def make(num, texts=None, **options):
    """Row n asks ``n`` with gold ``n`` and tokens [n, n], unless ``texts`` says otherwise."""
    texts = texts or [f"say {n}" for n in range(num)]
    rows = [Row(f"s/{n}", texts[n], {"answer": str(n)}) for n in range(num)]
    return Prompts(rows, [np.array([n, n], np.int32) for n in range(num)], **options)


def visits(prompts, start, stop):
    return [prompts.at(index) for index in range(start, stop)]


sizes, seeds, epochs = st.integers(1, 40), st.integers(-(2**40), 2**40), st.integers(0, 50)


@given(sizes, seeds, epochs)
def test_an_epoch_visits_each_prompt_exactly_once(num, seed, epoch):
    """DI7."""
    prompts = make(num, seed=seed)
    seen = [prompt.id for prompt in visits(prompts, epoch * num, (epoch + 1) * num)]
    assert sorted(seen) == sorted(prompts.ids)


@given(sizes, seeds, st.lists(st.integers(0, 200), max_size=20))
def test_a_visit_depends_on_its_index_alone(num, seed, indices):
    """RS1."""
    walked, jumped = make(num, seed=seed), make(num, seed=seed)
    in_order = visits(walked, 0, 201)
    assert [jumped.at(index) for index in indices] == [in_order[index] for index in indices]


def test_going_on_at_any_index_gives_the_rest_of_the_same_order():
    """RS1."""
    whole = visits(make(40, seed=3), 0, 100)
    for start in (0, 1, 31, 40, 79):
        assert visits(make(40, seed=3), start, 100) == whole[start:]


@given(sizes, seeds, epochs)
def test_gold_and_tokens_stay_with_their_prompt(num, seed, epoch):
    """DI5."""
    for prompt in visits(make(num, seed=seed), epoch * num, (epoch + 1) * num):
        number = int(prompt.content.removeprefix("say "))
        assert prompt.columns["answer"] == str(number)
        assert prompt.token_ids == (number, number)
        assert prompt.id == f"s/{number}"


def test_excluded_prompts_stay_excluded_after_shuffle_and_restart():
    """DI5."""
    for _ in range(2):
        left = make(10, seed=1).without({"s/3", "s/7"})
        seen = [prompt.id for prompt in visits(left, 0, 24)]
        assert len(left) == 8
        assert {i: seen.count(i) for i in seen} == dict.fromkeys(left.ids, 3)
        assert not {"s/3", "s/7"} & set(seen)


def test_an_unknown_excluded_id_is_an_error():
    with pytest.raises(ValueError, match="s/99"):
        make(3).without({"s/99"})


def test_equal_texts_with_different_golds_are_two_prompts():
    """DI8."""
    prompts = make(2, texts=["same", "same"], seed=5)
    first, second = visits(prompts, 0, 2)
    assert first.content == second.content == "same"
    assert {first.id: first.columns["answer"], second.id: second.columns["answer"]} == {
        "s/0": "0",
        "s/1": "1",
    }


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(epoch_order(30, seed, epoch)) for seed in (-1, 0, 1) for epoch in range(5)]
    assert len(set(orders)) == 15


def test_the_order_of_a_seed_never_changes():
    """A resumed run goes on with the order it began, also under another version of this code."""
    assert epoch_order(8, 0, 0).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]


def test_without_shuffle_the_source_order_repeats():
    prompts = make(3, shuffle=False)
    assert [p.id for p in visits(prompts, 0, 7)] == [f"s/{n % 3}" for n in range(7)]


def test_finite_epochs_end_and_others_do_not():
    prompts = make(3, epochs=2)
    assert prompts.at(5) is not None
    assert prompts.at(6) is None
    assert make(3).at(10**9) is not None


def test_no_prompts_means_no_visits():
    assert Prompts([], []).at(0) is None


def test_a_negative_visit_is_an_error():
    with pytest.raises(ValueError, match="-1"):
        make(3).at(-1)


def test_rows_sharing_an_id_are_an_error():
    """DI4."""
    row = Row("s/1", "p", {})
    with pytest.raises(ValueError, match="share an id"):
        Prompts([row, row], [np.array([1]), np.array([2])])
