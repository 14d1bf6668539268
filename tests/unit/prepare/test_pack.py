"""Packing against a slow twin that never packs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.prepare.pack import pack, unpack
from lagzero.types import TOKEN, MicroBatch, Sample


def sample(group: int, member: int, prompt: tuple[int, ...], trained: list[bool], rng) -> Sample:
    tokens = np.zeros(len(trained), TOKEN)
    tokens["id"] = rng.integers(0, 1000, len(trained))
    tokens["trained"] = trained
    tokens["logprob"] = np.where(trained, -rng.random(len(trained)), np.nan)
    tokens["version"] = np.where(trained, rng.integers(0, 5, len(trained)), -1)
    advantages = np.where(trained, rng.normal(size=len(trained)), 0.0)
    return Sample(group, member, prompt, tokens, advantages, rng.normal())


@st.composite
def steps(draw) -> list[Sample]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples: list[Sample] = []
    for group in range(draw(st.integers(0, 4))):
        prompt = tuple(int(i) for i in rng.integers(0, 1000, draw(st.integers(1, 6))))
        for member in range(draw(st.integers(1, 4))):
            trained = draw(st.lists(st.booleans(), min_size=0, max_size=7))
            samples.append(sample(group, member, prompt, trained, rng))
    order = draw(st.permutations(range(len(samples))))
    return [samples[i] for i in order]


def context(row: MicroBatch, place: int) -> list[tuple[int, int]]:
    """(position, token) of all that the token at ``place`` sees, from the rules of MicroBatch."""
    segment = row.segment_ids[place]
    parent = row.parents[segment]
    seen = [
        (int(row.position_ids[i]), int(row.token_ids[i]))
        for i in range(len(row.token_ids))
        if (row.segment_ids[i] == segment and i <= place) or row.segment_ids[i] == parent
    ]
    return sorted(seen)


def slow_twin(samples, weights, references) -> list[tuple]:
    """One record for each trained token, sequence by sequence, with the context it must see."""
    out: list[tuple] = []
    for index, s in enumerate(samples):
        for j, token in enumerate(s.tokens):
            if token["trained"]:
                before = [*s.prompt_ids, *(int(i) for i in s.tokens["id"][:j])]
                out.append(
                    (
                        index,
                        int(token["id"]),
                        token["logprob"],
                        int(token["version"]),
                        np.float32(s.advantages[j]),
                        weights[index],
                        np.float32(references[index][j]),
                        list(enumerate(before)),
                    )
                )
    return out


def records(rows) -> list[tuple]:
    out: list[tuple] = []
    for row in rows:
        for n in range(len(row.targets)):
            out.append(
                (
                    int(row.sequences[n]),
                    int(row.targets[n]),
                    row.behaviour_logprobs[n],
                    int(row.versions[n]),
                    row.advantages[n],
                    row.weights[n],
                    row.reference_logprobs[n],
                    context(row, int(row.predictors[n])),
                )
            )
    return sorted(out, key=lambda r: r[0])  # stable: keeps token order within a sequence


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(1, 40), st.booleans())
def test_every_cut_trains_the_same_tokens_in_the_same_context(samples, budget, share) -> None:
    """LN1, LP13: whatever the budget, order and sharing, each target keeps its own record."""
    rng = np.random.default_rng(1)
    weights = rng.random(len(samples))
    references = [-rng.random(len(s.tokens)) for s in samples]
    rows = pack(samples, budget, share, weights, references)
    assert records(rows) == slow_twin(samples, weights, references)


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(1, 40), st.booleans())
def test_rows_keep_the_budget_waste_nothing_and_tear_nothing(samples, budget, share) -> None:
    rows = pack(samples, budget, share, np.ones(len(samples)))
    homes = [set(row.sequences.tolist()) for row in rows]
    assert sum(len(h) for h in homes) == len(set().union(*homes)) if homes else True
    for row, home in zip(rows, homes, strict=True):
        assert len(row.token_ids) <= budget or len(home) == 1
        assert (np.diff(row.segment_ids) >= 0).all()
        assert sorted(set(row.segment_ids.tolist())) == list(range(len(row.parents)))
        assert all(p == -1 or row.parents[p] == -1 for p in row.parents)
        used = np.zeros(len(row.token_ids), bool)
        for place in row.predictors:
            segment = row.segment_ids[place]
            used |= (row.segment_ids == segment) & (np.arange(len(used)) <= place)
            used |= row.segment_ids == row.parents[segment]
        assert used.all()


@given(steps(), st.integers(1, 40), st.booleans())
@settings(max_examples=50, deadline=None)
def test_packing_is_a_function_of_its_inputs(samples, budget, share) -> None:
    first = pack(samples, budget, share, np.ones(len(samples)))
    second = pack(samples, budget, share, np.ones(len(samples)))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.sequences, b.sequences)


@given(steps(), st.integers(1, 40), st.booleans())
@settings(max_examples=50, deadline=None)
def test_unpack_is_the_way_back(samples, budget, share) -> None:
    rows = pack(samples, budget, share, np.ones(len(samples)))
    back = unpack([row.behaviour_logprobs for row in rows], rows, samples)
    for values, s in zip(back, samples, strict=True):
        np.testing.assert_array_equal(values, s.tokens["logprob"])


def two_members() -> list[Sample]:
    rng = np.random.default_rng(0)
    first = sample(7, 0, (10, 11, 12), [True, True, True], rng)
    second = sample(7, 1, (10, 11, 12), [True, False, True, False], rng)
    first.tokens["id"], second.tokens["id"] = [20, 21, 22], [30, 31, 32, 33]
    return [first, second]


def test_a_shared_prompt_row_by_hand() -> None:
    (row,) = pack(two_members(), 100, True, np.array([0.25, 0.5]))
    assert row.token_ids.tolist() == [10, 11, 12, 20, 21, 30, 31]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert row.segment_ids.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert row.parents.tolist() == [-1, 0, 0]
    assert row.predictors.tolist() == [2, 3, 4, 2, 6]
    assert row.targets.tolist() == [20, 21, 22, 30, 32]
    assert row.sequences.tolist() == [0, 0, 0, 1, 1]
    assert row.weights.tolist() == [0.25, 0.25, 0.25, 0.5, 0.5]


def test_a_stand_alone_row_by_hand() -> None:
    (row,) = pack(two_members(), 100, False, np.array([0.25, 0.5]))
    assert row.token_ids.tolist() == [10, 11, 12, 20, 21, 10, 11, 12, 30, 31]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert row.segment_ids.tolist() == [0] * 5 + [1] * 5
    assert row.parents.tolist() == [-1, -1]
    assert row.predictors.tolist() == [2, 3, 4, 7, 9]


def test_a_group_beyond_the_budget_repeats_its_prompt_in_each_row() -> None:
    rows = pack(two_members(), 5, True, np.ones(2))
    assert [row.token_ids.tolist() for row in rows] == [[10, 11, 12, 20, 21], [10, 11, 12, 30, 31]]


def test_a_one_token_response_adds_no_input() -> None:
    """RF6: the lone token is a target, predicted by the prompt's last token."""
    rng = np.random.default_rng(0)
    for share in (True, False):
        (row,) = pack([sample(0, 0, (4, 5), [True], rng)], 100, share, np.ones(1))
        assert row.token_ids.tolist() == [4, 5]
        assert row.predictors.tolist() == [1]
        assert row.parents.tolist() == [-1]


def test_nothing_to_train_gives_no_rows() -> None:
    """RF6"""
    rng = np.random.default_rng(0)
    assert pack([], 10, True, np.zeros(0)) == ()
    assert pack([sample(0, 0, (1,), [False, False], rng)], 10, True, np.zeros(1)) == ()


def test_a_sequence_over_the_budget_has_its_row_to_itself() -> None:
    rng = np.random.default_rng(0)
    samples = [sample(g, 0, (1,), [True] * n, rng) for g, n in enumerate([9, 2, 2])]
    rows = pack(samples, 5, True, np.ones(3))
    assert [sorted(set(row.sequences.tolist())) for row in rows] == [[0], [1, 2]]


def test_groups_with_equal_prompt_text_are_not_merged() -> None:
    """DI8: two visits to one prompt are two groups, each with its own prompt segment."""
    rng = np.random.default_rng(0)
    samples = [sample(g, 0, (1, 2), [True, True], rng) for g in (0, 1)]
    (row,) = pack(samples, 100, True, np.ones(2))
    assert row.parents.tolist() == [-1, 0, -1, 2]


def test_broken_samples_are_refused_by_name() -> None:
    rng = np.random.default_rng(0)
    good = sample(3, 1, (1, 2), [True, True], rng)
    with pytest.raises(ValueError, match="3/1 has an empty prompt"):
        pack([sample(3, 1, (), [True], rng)], 10, True, np.ones(1))
    with pytest.raises(ValueError, match="another prompt"):
        pack([good, sample(3, 2, (9,), [True], rng)], 10, True, np.ones(2))
    with pytest.raises(ValueError, match="reference log-probs of another length"):
        pack([good], 10, True, np.ones(1), [np.zeros(3)])
    with pytest.raises(ValueError, match="weight is not finite"):
        pack([good], 10, True, np.array([np.nan]))
    with pytest.raises(ValueError, match="2 weights"):
        pack([good], 10, True, np.ones(2))
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        pack([good], 0, True, np.ones(1))
    good.tokens["logprob"][1] = np.nan
    with pytest.raises(ValueError, match="behaviour log-prob is not finite"):
        pack([good], 10, True, np.ones(1))


@pytest.mark.parametrize("one_group", [True, False])
def test_longest_first_fills_rows_that_arrival_order_would_not(one_group: bool) -> None:
    """Response inputs of 2, 2, 3 and 3 tokens fit two rows; taken in that order they need three."""
    rng = np.random.default_rng(0)
    samples = [
        sample(0 if one_group else m, m, (1,), [True] * (n + 1), rng)
        for m, n in enumerate([2, 2, 3, 3])
    ]
    budget = 6 if one_group else 7  # a prompt token for each group in the row
    rows = pack(samples, budget, True, np.ones(4))
    assert sorted(sorted(set(row.sequences.tolist())) for row in rows) == [[0, 2], [1, 3]]


@settings(max_examples=100, deadline=None)
@given(steps(), st.integers(1, 40), st.booleans())
def test_groups_that_are_kept_together_are_in_one_row(samples, budget, share) -> None:
    """The tokens and what they see are the same; only the cut is another."""
    rng = np.random.default_rng(1)
    weights = rng.random(len(samples))
    references = [-rng.random(len(s.tokens)) for s in samples]
    rows = pack(samples, budget, share, weights, references, keep_groups=True)
    assert records(rows) == slow_twin(samples, weights, references)
    homes = [set(row.groups.tolist()) for row in rows]
    assert sum(len(home) for home in homes) == len(set().union(*homes))
    for row, home in zip(rows, homes, strict=True):
        assert len(row.token_ids) <= budget or len(home) == 1


@settings(max_examples=50, deadline=None)
@given(steps(), st.integers(1, 40), st.booleans())
def test_a_token_knows_its_group(samples, budget, share) -> None:
    numbers = {g: n for n, g in enumerate(dict.fromkeys(s.group_index for s in samples))}
    for row in pack(samples, budget, share, np.ones(len(samples))):
        expected = [numbers[samples[i].group_index] for i in row.sequences]
        assert row.groups.tolist() == expected


def test_a_critics_columns_are_of_all_samples_or_of_none() -> None:
    rng = np.random.default_rng(0)
    plain = sample(0, 0, (1, 2), [True, False, True], rng)
    judged = replace(plain, values=np.array([1, np.nan, 2]), returns=np.array([3, np.nan, 4]))
    (row,) = pack([judged], 100, True, np.ones(1))
    assert row.old_values.tolist() == [1, 2] and row.returns.tolist() == [3, 4]
    assert row.old_values.dtype == row.returns.dtype == np.float32
    (row,) = pack([plain], 100, True, np.ones(1))
    assert row.old_values is None and row.returns is None
    with pytest.raises(ValueError, match="others have none"):
        pack([judged, replace(plain, member=1)], 100, True, np.ones(2))
    broken = replace(judged, returns=np.array([3, 0, np.inf]))
    with pytest.raises(ValueError, match="return is not finite"):
        pack([broken], 100, True, np.ones(1))
    with pytest.raises(ValueError, match="values and returns, or neither"):
        replace(plain, values=np.zeros(3))
    with pytest.raises(ValueError, match="3 tokens and 2 returns"):
        replace(judged, returns=np.zeros(2))
