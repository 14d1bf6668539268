"""What was taken back goes on, on any engine, as if nothing had happened."""

from __future__ import annotations

import numpy as np
import pytest

from lagzero.engine.request import Request, Sampling, derive_seed
from lagzero.errors import LagzeroError
from lagzero.types import Finish, given_tokens, sampled_tokens

PROMPT = tuple(range(10, 21))  # 11 tokens: with pages of 8, the second is partly filled
TOLERANCE = 5e-5


def group(size: int, new: int = 20, number: int = 0, begun=(), **sampling) -> Request:
    seeds = tuple(derive_seed(0, 0, member) for member in range(size))
    return Request(number, PROMPT, seeds, Sampling(new, **sampling), tuple(begun))


def assert_same(done, expected):
    """Ids and log-probs of all members; versions are the caller's business."""
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        got, want = completion.tokens, expected[key].tokens
        assert got["id"].tolist() == want["id"].tolist()
        np.testing.assert_allclose(got["logprob"], want["logprob"], rtol=0, atol=TOLERANCE)
        assert (completion.finish, completion.text) == (expected[key].finish, expected[key].text)


def cut(done, lengths):
    """What the members had sampled when they had so many tokens."""
    return tuple(done[0, member].tokens[:num] for member, num in enumerate(lengths))


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama in C"])
@pytest.mark.parametrize("lengths", [(7, 0, 1, 5, 19), (3, 9, 3, 4, 20), (0, 0, 12, 0, 0)])
@pytest.mark.parametrize("limits", [{}, {"max_running": 2, "prefix_cache": False}])
def test_resumed_members_of_any_length_equal_an_uninterrupted_run(
    family, lengths, limits, model, engine_of, drain
):
    """Also a member that never began, one that has ended, and fewer slots than members."""
    policy, _ = model(family)
    whole = drain(engine_of(policy, version=3), [group(5)])
    engine = engine_of(policy, version=4, **limits)
    done = drain(engine, [group(5, begun=cut(whole, lengths))])
    assert_same(done, whole)
    for member, num in enumerate(lengths):
        tokens = done[0, member].tokens
        assert tokens["version"].tolist() == [3] * num + [4] * (20 - num)
        assert (
            tokens["logprob"][:num].tobytes() == whole[0, member].tokens["logprob"][:num].tobytes()
        )
        assert tokens["trained"].all()


@pytest.mark.parametrize("steps", [0, 1, 4, 13, 30])
def test_abort_and_resume_on_a_fresh_engine_equals_one_run(steps, model, engine_of, drain):
    """Two slots and a prefill of three chunks: some have ended, some run, some never began."""
    policy, _ = model("qwen3")
    whole = drain(engine_of(policy), [group(5)])
    engine = engine_of(policy, max_running=2, prefill_chunk_tokens=4)
    engine.add(group(5))
    ended = [c for _ in range(steps) for c in engine.step()]
    stopped = engine.abort([0])
    engine.check_integrity()
    assert not engine.has_work
    parts = sorted([*ended, *stopped], key=lambda c: c.member)
    assert [c.member for c in parts] == list(range(5))
    begun = [c.tokens for c in parts]
    assert min(map(len, begun)) == 0
    assert_same(drain(engine_of(policy), [group(5, begun=begun)]), whole)


def test_resuming_may_be_repeated_under_memory_pressure(model, engine_of, drain):
    """Taken back every 11 steps: each time another engine, with preemption and small chunks."""
    policy, _ = model("llama")
    whole = drain(engine_of(policy), [group(4)])
    limits = {"kv_cache_tokens": 44, "page_size": 4, "prefill_chunk_tokens": 6}
    begun, num_preemptions, rounds = (), 0, 0
    while not begun or min(map(len, begun)) < 20:
        engine = engine_of(policy, version=rounds, **limits)
        engine.add(group(4, begun=begun))
        parts = [c for _ in range(11) for c in engine.step()]
        parts = sorted([*parts, *engine.abort([0])], key=lambda c: c.member)
        engine.check_integrity()
        begun, rounds = tuple(c.tokens for c in parts), rounds + 1
        num_preemptions += engine.counters.num_preemptions
    assert num_preemptions > 0
    assert rounds > 2
    for member, tokens in enumerate(begun):
        want = whole[0, member].tokens
        assert tokens["id"].tolist() == want["id"].tolist()
        np.testing.assert_allclose(tokens["logprob"], want["logprob"], rtol=0, atol=TOLERANCE)
        assert (np.diff(tokens["version"]) >= 0).all()


def test_an_aborted_request_is_resumable_however_far_it_was(model, engine_of, drain):
    """AS6: one never prefilled has 0 tokens and a version; one retracted after 12 keeps them.

    A page holds 11 tokens, the pool 8 pages. Three prompts of 11 and 11 ids more fill two pages
    each; computing the 12th sampled token's id asks for a third, and the last comer must go.
    """
    policy, _ = model("llama")
    engine = engine_of(policy, version=6, page_size=11, kv_cache_tokens=88, prefix_cache=False)
    asked = [Request(n, PROMPT, (derive_seed(n),), Sampling(28)) for n in range(4)]
    for request in asked[:3]:
        engine.add(request)
    while engine.counters.num_preemptions == 0:
        engine.step()
    engine.add(asked[3])
    stopped = {c.request_id: c for c in engine.abort([2, 3])}
    engine.check_integrity()
    assert {n: (c.finish, c.version, len(c.tokens)) for n, c in stopped.items()} == {
        2: (Finish.ABORT, 6, 12),
        3: (Finish.ABORT, 6, 0),
    }
    assert (stopped[2].tokens["logprob"] < 0).all()
    assert (stopped[2].tokens["version"] == 6).all()
    resumed = [
        Request(n, PROMPT, asked[n].seeds, Sampling(28), (stopped[n].tokens,)) for n in (2, 3)
    ]
    whole = drain(engine_of(policy), asked[2:])
    assert_same(drain(engine_of(policy), resumed), whole)


@pytest.mark.parametrize("lengths", [(3, 5, 0), (3, 5, 8), (6, 6, 1)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_of_resumed_members_is_computed_once(
    lengths, prefix_cache, model, engine_of, drain, computed
):
    """Each computes what it had sampled before; none computes the prompt that another did."""
    policy, _ = model("llama")
    whole = drain(engine_of(policy), [group(3)])
    engine = engine_of(policy, prefix_cache=prefix_cache)
    computed.clear()
    assert_same(drain(engine, [group(3, begun=cut(whole, lengths))]), whole)
    assert sorted(p for p in computed if p < len(PROMPT)) == list(range(len(PROMPT)))
    assert len(computed) == len(PROMPT) + 3 * 19  # the 20th token is never computed
    assert engine.counters.num_prompt_tokens == len(PROMPT)


def test_resumed_tokens_are_found_in_the_prefix_cache_but_not_counted_as_prompt(
    model, engine_of, drain
):
    """11 + 20 tokens leave three full pages of 8; a resumed member shares them."""
    policy, _ = model("llama")
    engine = engine_of(policy)
    whole = drain(engine, [group(1)])
    before = engine.counters
    assert_same(drain(engine, [group(1, begun=cut(whole, [19]))]), whole)
    assert engine.counters.num_prompt_tokens - before.num_prompt_tokens == 11
    assert engine.counters.num_cached_tokens - before.num_cached_tokens == 11


def test_a_page_that_a_member_writes_on_is_not_found_as_anothers(model, engine_of, drain):
    """9 prompt ids and 8 begun ones: the first member's fill its second page, which gets a name.

    It ends and leaves that page to the second member, which overwrites all but the prompt's id.
    """
    policy, _ = model("llama")
    prompt, seeds = PROMPT[:9], (3, 4)
    whole = drain(engine_of(policy), [Request(0, prompt, seeds, Sampling(9))])
    engine = engine_of(policy, max_running=1)
    begun = cut(whole, (8, 8))
    assert_same(drain(engine, [Request(0, prompt, seeds, Sampling(9), begun)]), whole)
    for member in range(2):
        longer = Request(1, (*prompt, *begun[member]["id"].tolist(), 7), (5,), Sampling(4))
        fresh = drain(engine_of(policy), [longer])
        assert_same(drain(engine, [longer]), fresh)


def tokens_of(ids) -> np.ndarray:
    return sampled_tokens(ids, [-0.5] * len(ids), [2] * len(ids))


@pytest.mark.parametrize(
    ("ids", "sampling", "context", "finish", "text"),
    [
        ([1, 2, 3], Sampling(9, stop_ids=frozenset({3})), 99, Finish.STOP, "abc"),
        ([1, 2, 3], Sampling(9, stop_strings=("bc",), include_stop=False), 99, Finish.STOP, "a"),
        ([1, 2, 3], Sampling(3), 99, Finish.LENGTH, "abc"),
        ([1, 2, 3], Sampling(9), 4, Finish.CONTEXT, "abc"),
    ],
)
def test_a_member_whose_tokens_already_end_it_needs_no_forward_pass(
    ids, sampling, context, finish, text, engine_of, scripted, words
):
    engine = engine_of(scripted.chain(context_limit=context), words("?abcdefgh"), version=5)
    engine.add(Request(0, (0,), (0,), sampling, (tokens_of(ids),)))
    assert engine.has_work
    (done,) = engine.step()
    assert (done.finish, done.text, done.version) == (finish, text, 5)
    assert done.tokens.tolist() == tokens_of(ids).tolist()
    assert engine.counters.num_steps == 0
    assert not engine.has_work


def test_limits_and_stop_strings_count_begun_tokens_in(engine_of, drain, scripted, words):
    """Tokens follow each other 0, 1, 2, ...; "cd" begins in an old token and ends in a new one."""
    decoder = words("?abcdefgh")
    begun = (tokens_of([1, 2, 3]),)
    stop = Request(0, (0,), (0,), Sampling(9, 0, stop_strings=("cd",)), begun)
    limit = Request(1, (0,), (0,), Sampling(5, 0), begun)
    done = drain(engine_of(scripted.chain(), decoder), [stop, limit])
    assert (done[0, 0].text, done[0, 0].finish) == ("abcd", Finish.STOP)
    assert done[0, 0].tokens["id"].tolist() == [1, 2, 3, 4]
    assert (done[1, 0].text, done[1, 0].finish) == ("abcde", Finish.LENGTH)
    assert done[1, 0].tokens["version"].tolist() == [2, 2, 2, 0, 0]


def test_abort_also_returns_members_that_ended_but_were_not_returned(engine_of, scripted):
    """Whoever takes a request back has all of its members then."""
    engine = engine_of(scripted.chain())
    begun = (tokens_of([1, 2, 3]), tokens_of([1]))
    engine.add(Request(0, (0,), (0, 1), Sampling(3), begun))
    engine.add(Request(1, (0,), (0,), Sampling(0)))
    stopped = sorted(engine.abort([0]), key=lambda c: c.member)
    assert [(c.finish, len(c.tokens)) for c in stopped] == [(Finish.LENGTH, 3), (Finish.ABORT, 1)]
    assert [c.request_id for c in engine.step()] == [1]
    assert not engine.has_work


def test_unfinished_tells_where_members_are(model, engine_of, drain):
    """The begun member waits behind the prompt, then for a slot; the ended one is no more."""
    policy, _ = model("llama")
    engine = engine_of(policy, max_running=2, prefill_chunk_tokens=6)
    assert engine.unfinished == {}
    whole = drain(engine_of(policy), [group(4)])
    engine.add(group(4, begun=cut(whole, (0, 0, 3, 20))))

    def counts():
        place = engine.unfinished[0]
        return place.num_running, place.num_waiting, place.num_parked, place.num_tokens

    assert counts() == (0, 3, 0, 3)
    engine.step()
    assert counts() == (1, 2, 0, 3)
    engine.step()
    assert counts() == (2, 1, 0, 5)
    drain(engine)
    assert engine.unfinished == {}


def bad(**columns) -> np.ndarray:
    tokens = tokens_of([1, 2, 3])
    for name, value in columns.items():
        tokens[name][1] = value
    return tokens


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        ((tokens_of([1]),), "for 1 members, but 2 seeds"),
        ((tokens_of([1]),) * 3, "for 3 members, but 2 seeds"),
        ((tokens_of([1]), np.array([1, 2])), "member 1 are not a TOKEN array"),
        ((tokens_of([1]).reshape(1, 1), tokens_of([])), "member 0 are not a TOKEN array"),
        ((tokens_of([1]), tokens_of([1] * 5)), "member 1 are 5, more than max_new_tokens=4"),
        ((bad(trained=False), tokens_of([])), "token 1 was not sampled by the policy"),
        ((given_tokens([1, 2]), tokens_of([])), "token 0 was not sampled by the policy"),
        ((bad(logprob=np.nan), tokens_of([])), "token 1 has no log-prob that is finite"),
        ((bad(logprob=-np.inf), tokens_of([])), "token 1 has no log-prob that is finite"),
        ((bad(logprob=0.1), tokens_of([])), "token 1 has no log-prob that is finite and <= 0"),
        ((bad(version=-1), tokens_of([])), "token 1 has no policy version"),
        ((bad(id=-3), tokens_of([])), "token 1 has a negative id"),
    ],
)
def test_tokens_that_cannot_be_resumed_are_refused(begun, message):
    with pytest.raises(ValueError, match="request 7: .*" + message):
        Request(7, (1,), (0, 1), Sampling(4), begun)


def test_a_resumed_request_that_cannot_fit_is_refused_whole(engine_of, scripted):
    engine = engine_of(scripted.chain(), kv_cache_tokens=16)
    with pytest.raises(LagzeroError, match="may grow to 24 tokens"):
        engine.add(Request(0, (0,) * 4, (0, 1), Sampling(20), (tokens_of([1] * 20), tokens_of([]))))
    assert not engine.has_work
