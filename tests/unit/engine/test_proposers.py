"""What the proposers propose."""

from __future__ import annotations

import pytest
import torch

from lagzero.engine.request import Request, Sampling, Sequence, derive_seed
from lagzero.engine.speculation import DraftProposer, NgramProposer, Speculation
from lagzero.errors import LagzeroError


def group(prompt: tuple[int, ...], *responses: tuple[int, ...]) -> tuple[Sequence, ...]:
    seeds = tuple(range(len(responses)))
    members = Sequence.all_of(Request(0, prompt, seeds, Sampling(100)))
    for seq, response in zip(members, responses, strict=True):
        seq.ids += response
    return members


@pytest.mark.parametrize(
    ("ids", "match", "expected"),
    [
        ((1, 2, 3, 4, 5, 1, 2), 2, [3, 4, 5, 1]),  # what followed
        ((1, 2, 8, 1, 2, 9, 1, 2), 2, [9, 1, 2, 9]),  # the latest time; then into itself
        ((7, 7, 7), 2, [7, 7, 7, 7]),  # a loop goes on
        ((5, 1, 2, 6, 3, 2), 1, [6, 3, 2, 6]),
        ((5, 1, 2, 6, 3, 2), 2, []),  # 3, 2 stood nowhere before
        ((1, 2), 2, []),  # nothing follows it
        ((1,), 3, []),  # shorter than what must match
    ],
)
def test_ngrams_by_hand(ids, match, expected):
    (seq,) = group(ids[:1], ids[1:])
    assert NgramProposer(match).propose({seq: 4}) == {seq: expected}
    assert NgramProposer(match).propose({seq: 2}) == {seq: expected[:2]}


def test_ngrams_of_a_text_that_grows_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 4, (80,), generator=generator).tolist()
    (seq,) = group((0,), ())
    growing = NgramProposer(2)
    for token in text:
        seq.ids.append(token)
        assert growing.propose({seq: 5}) == NgramProposer(2).propose({seq: 5})


def test_ngrams_are_also_found_in_the_other_members_ended_or_not():
    """Its own text comes first; a copy of another's ends where that ends."""
    one, other, ended = group((1, 2), (3, 4), (3, 4, 5, 6), (9, 9, 8, 3, 2, 7))
    proposer = NgramProposer(2)
    assert proposer.propose({one: 3, other: 3}) == {one: [5, 6], other: []}
    one.ids += [8, 3, 4, 8, 3]
    assert proposer.propose({one: 3}) == {one: [4, 8, 3]}
    other.ids += [8, 3]
    assert proposer.propose({other: 3}) == {other: [4, 8, 3]}  # of the first that has it
    one.ids += [9, 9]
    assert proposer.propose({one: 4}) == {one: [8, 3, 2, 7]}
    ended.ids += [1, 1]
    assert proposer.propose({one: 6}) == {one: [8, 3, 2, 7, 1, 1]}


def draft_of(policy, pages: int = 64, num_ids: int = 300) -> DraftProposer:
    return DraftProposer(policy, pages, 8, num_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_policy_is_always_right(temperature, model, engine_of, drain, computed):
    """One random number a place: 1 + 5 x 4 tokens. The draft computes no id twice either."""
    policy, _ = model("llama")
    asked = [Request(0, tuple(range(20, 30)), (5, 6), Sampling(21, temperature=temperature))]
    engine = engine_of(policy, speculation=Speculation(draft_of(policy), 3, 2))
    computed.clear()
    drain(engine, asked)
    counters = engine.counters
    assert counters.num_accepted == counters.num_proposed == 2 * 15
    assert counters.num_steps == 1 + 5
    # Each judges 30 ids (the prompt once for both); a draft writes up to one id before them.
    judged, written = 10 + 2 * 20, 2 * 29
    assert len(computed) == judged + written


def test_a_draft_computes_anew_what_turned_out_otherwise(model, engine_of):
    """Its mirror holds the first ids that are still the same."""
    policy, _ = model("llama")
    (seq,) = group((20, 21, 22), (23, 24))
    draft = draft_of(policy)
    first = draft.propose({seq: 4})[seq]
    again = draft_of(policy)
    seq.ids += [*first[:2], 77]
    assert draft.propose({seq: 4}) == again.propose({seq: 4})
    assert draft._mirrors[seq].num_computed == len(seq.ids) + 3
    seq.ids[4] = 99  # another text altogether
    assert draft.propose({seq: 2}) == draft_of(policy).propose({seq: 2})


def test_a_draft_keeps_within_its_context_pages_and_the_policys_ids(model):
    policy, _ = model("llama")  # 128 positions
    one, other = group(tuple(range(20, 60)), tuple(range(100, 185)), (1,))
    assert len(draft_of(policy).propose({one: 9})[one]) == 128 - 125 + 1
    one.ids += range(3)
    assert len(draft_of(policy).propose({one: 9})[one]) == 1
    one.ids.append(5)
    assert draft_of(policy).propose({one: 9, other: 2}).keys() == {other}
    small = draft_of(policy, pages=6)  # 48 ids
    assert small.propose({one: 9}) == {}
    assert len(small.propose({other: 7})[other]) == 7
    assert small.propose({other: 8}) == {}
    assert len(draft_of(policy, num_ids=50).propose({other: 20})[other]) == 20
    assert max(draft_of(policy, num_ids=50).propose({other: 20})[other]) < 50


def test_pages_of_a_draft_come_back(model):
    policy, _ = model("llama")
    one, other = group(tuple(range(20, 40)), (1,), (2,))
    draft = draft_of(policy, pages=8)
    draft.propose({one: 3, other: 3})
    assert draft._pool.num_used == 6
    draft.propose({other: 3})
    assert draft._pool.num_used == 3
    draft._pool.check_integrity([mirror.pages for mirror in draft._mirrors.values()])
    expected = draft.propose({other: 5})
    draft.release()
    assert (draft._pool.num_used, draft._cache) == (0, None)
    assert draft.propose({other: 5}) == expected


def test_a_broken_draft_is_named(versions_of):
    versions = versions_of("llama")
    with torch.no_grad():
        versions.policy.module.lm_head.weight.fill_(torch.nan)
    (seq,) = group((20, 21), (22,))
    with pytest.raises(LagzeroError, match=r"engine\.speculate\.path: the draft model"):
        draft_of(versions.policy).propose({seq: 2})


def test_a_draft_is_kept_where_the_intervals_of_both_distributions_meet(scripted, engine_of, drain):
    """With p = .3 .6 .1 and q = .4 .6 0: .3 + .5 + 0 = .8; drawn apart it would be .48.

    No scheme keeps more than the sum of the smaller ones, .3 + .6 + 0 = .9.
    """
    p, q = (torch.tensor(each).log().repeat(3, 1) for each in ([0.3, 0.6, 0.1], [0.4, 0.6, 0.0]))
    num = 1500
    draft = DraftProposer(scripted(q), num, 8, 3)
    engine = engine_of(
        scripted(p),
        speculation=Speculation(draft, 1, num),
        max_running=num,
        kv_cache_tokens=8 * num,
    )
    seeds = tuple(derive_seed("meet", member) for member in range(num))
    drain(engine, [Request(0, (1,), seeds, Sampling(3))])
    assert engine.counters.num_proposed == num
    assert abs(engine.counters.num_accepted / num - 0.8) < 4 * (0.8 * 0.2 / num) ** 0.5
