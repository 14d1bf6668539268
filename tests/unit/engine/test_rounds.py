"""Partial rollouts: so many tokens a round, then others' turn; nothing is lost, mixed or stuck."""

from __future__ import annotations

import numpy as np
import pytest

from lagzero.engine.engine import EngineLimits
from lagzero.engine.request import Request, Sampling, derive_seed
from lagzero.types import Finish

PROMPT = tuple(range(20, 60))
TOLERANCE = 5e-5


def request(number: int, prompt=PROMPT, new: int = 10, members: int = 1, begun=()) -> Request:
    seeds = tuple(derive_seed(number, member) for member in range(members))
    return Request(number, prompt, seeds, Sampling(new), begun)


def places(engine) -> dict[int, str]:
    """Where each request's only member is."""
    return {
        number: "running" * at.num_running + "waiting" * at.num_waiting + "parked" * at.num_parked
        for number, at in engine.unfinished.items()
    }


def assert_close(tokens, expected):
    np.testing.assert_allclose(tokens["logprob"], expected, rtol=0, atol=TOLERANCE)


def assert_same(done, expected):
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        assert completion.tokens["id"].tolist() == expected[key].tokens["id"].tolist()
        assert_close(completion.tokens, expected[key].tokens["logprob"])


def test_a_round_gives_its_slot_away_and_goes_on_by_itself(model, engine_of, drain, computed):
    """Two slots, four requests of 10 tokens, rounds of 4.

    Steps 1-4: requests 0, 1; 5-8: 2, 3; then all are parked, so a round begins: 9-12 and 13-16
    likewise; 17-18: the last two tokens of 0, 1; 19-20: of 2, 3. No slot is ever idle and no id is
    computed twice.
    """
    policy, _ = model("llama")
    asked = [request(n, PROMPT[10 * n : 10 * n + 10]) for n in range(4)]
    whole = drain(engine_of(policy), asked)
    engine = engine_of(policy, max_running=2, round_tokens=4)
    computed.clear()
    seen = {}

    def look(step: int) -> None:
        seen[step] = places(engine)

    assert_same(drain(engine, asked, before_step=look), whole)
    parked, running, waiting = "parked", "running", "waiting"
    assert seen[0] == dict.fromkeys(range(4), waiting)
    assert seen[3] == {0: running, 1: running, 2: waiting, 3: waiting}
    assert seen[4] == {0: parked, 1: parked, 2: waiting, 3: waiting}
    assert seen[5] == {0: parked, 1: parked, 2: running, 3: running}
    assert seen[8] == dict.fromkeys(range(4), parked)
    assert seen[9] == {0: running, 1: running, 2: waiting, 3: waiting}
    assert seen[18] == {2: waiting, 3: waiting}
    assert (engine.counters.num_steps, engine.counters.num_parked) == (20, 8)
    assert len(computed) == 4 * (10 + 9)


def test_an_update_ends_the_round_of_all_and_the_parked_go_first(model, engine_of, drain):
    """One slot, rounds of 3. The update comes when 0 is parked, 1 has one token, 2 has not begun.

    1 may then write three more; 0 comes before 2, which comes when the other two are parked.
    """
    policy, _ = model("llama")
    engine = engine_of(policy, max_running=1, round_tokens=3)
    for number in range(3):
        engine.add(request(number))
    for _ in range(4):
        engine.step()
    assert places(engine) == {0: "parked", 1: "running", 2: "waiting"}
    engine.weights_changed(1)
    engine.check_integrity()
    assert places(engine) == {0: "waiting", 1: "running", 2: "waiting"}
    for _ in range(4):
        engine.step()
    assert places(engine) == {0: "running", 1: "parked", 2: "waiting"}
    for _ in range(3):
        engine.step()
    assert places(engine) == {0: "parked", 1: "parked", 2: "running"}
    done = drain(engine)
    assert done[0, 0].tokens["version"].tolist() == [0] * 3 + [1] * 7
    assert done[1, 0].tokens["version"].tolist() == [0] + [1] * 9
    assert done[2, 0].tokens["version"].tolist() == [1] * 10


@pytest.mark.parametrize("round_tokens", [1, 3, 12, 40])
def test_members_of_a_group_are_parked_one_by_one(round_tokens, model, engine_of, drain):
    """Two slots for five members, which share and then leave their prompt's pages."""
    policy, _ = model("gemma3")
    asked = [request(n, PROMPT[: 11 + n], new=12, members=5) for n in range(2)]
    whole = drain(engine_of(policy), asked)
    engine = engine_of(policy, max_running=2, round_tokens=round_tokens)
    assert_same(drain(engine, asked), whole)
    assert engine.counters.num_parked == 10 * ((12 - 1) // round_tokens)


def test_parked_pages_are_the_first_to_be_taken(model, engine_of, drain, computed):
    """A pool of 10 pages of 8, two slots, rounds of 4, prompts of 16, 8 tokens to write.

    Parked, 0 and 1 hold three pages each. 2 and 3 take the other four for their prompts; the third
    page of 2 or 3 must come from the parked, and it is 1, the last of them, that gives its pages.
    So its 19 computed ids are computed again, and nobody that runs is preempted. Next round the
    three that have pages go before it, so that both slots are used: 16 steps in all.
    """
    policy, _ = model("llama")
    asked = [request(n, tuple(range(50 * n, 50 * n + 16)), new=8) for n in range(4)]
    whole = drain(engine_of(policy), asked)
    limits = {"kv_cache_tokens": 80, "prefix_cache": False}
    engine = engine_of(policy, max_running=2, round_tokens=4, **limits)
    computed.clear()
    done = drain(engine, asked)
    assert_same(done, whole)
    assert engine.counters.num_preemptions == 0
    assert len(computed) == 4 * (16 + 7) + 19
    assert engine.counters.num_steps == 16


def test_parked_pages_also_make_room_for_a_prompt(model, engine_of, drain):
    """Before the newcomer would wait for one that runs."""
    policy, _ = model("llama")
    engine = engine_of(policy, max_running=2, round_tokens=2, kv_cache_tokens=120)
    engine.add(request(0))  # 40 + 2 ids: 6 of 15 pages
    for _ in range(2):
        engine.step()
    engine.add(request(1, tuple(range(100, 140))))
    engine.step()
    engine.add(request(2, tuple(range(200, 240))))  # 5 pages; 4 are free
    engine.step()
    assert places(engine)[2] == "running"
    engine.check_integrity()
    assert len(drain(engine)) == 3


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_keys_of_parked_sequences_never_serve_a_new_request(kv, versions_of, engine_of, drain):
    """WS3: parked across an update, or running, or waiting; while it lives and after its end."""
    versions = versions_of("llama")
    engine = engine_of(versions.policy, max_running=2, round_tokens=5, kv_on_update=kv)
    engine.add(request(0, new=30))
    engine.add(request(1, PROMPT[::-1], new=30))
    for _ in range(5):
        engine.step()
    assert places(engine) == {0: "parked", 1: "parked"}
    trunk = (*PROMPT, *engine._scheduler.parked[0].ids[40:])
    versions.publish(engine, 1)
    asked = [request(2), request(3, (*trunk, 7)), request(4, PROMPT[::-1])]
    done = drain(engine, asked)
    again = request(5, (*PROMPT, *done[0, 0].tokens["id"].tolist()))
    done |= drain(engine, [again])
    fresh = engine_of(versions.policy, version=1, prefix_cache=False)
    for one in [*asked, again]:
        assert_same({(one.id, 0): done[one.id, 0]}, drain(fresh, [one]))
    twin = versions.cached_logprobs if kv == "keep" else versions.whole_logprobs
    old = request(0, new=30)
    assert done[0, 0].tokens["version"].tolist() == [0] * 5 + [1] * 25
    assert_close(done[0, 0].tokens, twin(old, done[0, 0].tokens))


def test_a_resumed_member_that_waits_keeps_no_old_prompt(versions_of, engine_of, drain):
    """WS3: one slot; member 0 computes the prompt under W0, member 1 has its pages and one id more.

    It has sampled nothing here, so its later tokens are those of a fresh engine of W1.
    """
    versions = versions_of("llama")
    begun = drain(engine_of(versions.policy), [request(0, PROMPT[:11], members=2)])
    cut = (begun[0, 0].tokens[:0], begun[0, 1].tokens[:1])
    asked = request(0, PROMPT[:11], members=2, begun=cut)
    engine = engine_of(versions.policy, max_running=1)
    engine.add(asked)
    engine.step()
    assert engine._scheduler.waiting[0].num_computed == 11
    versions.publish(engine, 1)
    got = drain(engine)[0, 1]
    alone = Request(0, PROMPT[:11], asked.seeds[1:], asked.sampling, cut[1:])
    fresh = drain(engine_of(versions.policy, version=1), [alone])
    assert got.tokens["version"].tolist() == [0] + [1] * 9
    assert_same({0: got}, {0: fresh[0, 0]})


def test_a_resumed_request_keeps_no_old_prefix_that_it_found(versions_of, engine_of, drain):
    """WS3: 40 of its 41 ids are in the cache, but of 12 pages the running request has the others.

    That one has 47 ids and one more each step; the third step asks for a seventh page.
    """
    versions = versions_of("llama")
    begun = drain(engine_of(versions.policy), [request(0)])[0, 0].tokens[:1]
    engine = engine_of(versions.policy, kv_cache_tokens=96)
    drain(engine, [request(1, new=1)])
    engine.add(request(2, tuple(range(100, 147)), new=5))
    for _ in range(3):
        engine.step()
    asked = request(0, begun=(begun,))
    engine.add(asked)
    engine.step()
    assert engine._scheduler.waiting[0].num_computed == 40
    versions.publish(engine, 1)
    got = drain(engine)[0, 0]
    assert got.tokens["version"].tolist() == [0] + [1] * 9
    fresh = drain(engine_of(versions.policy, version=1), [asked])
    assert_same({0: got}, {0: fresh[0, 0]})


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama in C"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("every", [1, 6])
def test_every_token_is_of_the_version_of_its_tag(kv, every, family, versions_of, engine_of, drain):
    """WS4: weights switch while some run, some are parked and some wait.

    Kept keys: a token's log-prob is that of a cache to which each version added the keys of its own
    tokens. Recomputed keys: it is that of one pass over all ids with that version's weights.
    """
    versions = versions_of(family)
    engine = engine_of(versions.policy, max_running=3, round_tokens=4, kv_on_update=kv)
    asked = [request(n, PROMPT[: 3 + 9 * n], new=16) for n in range(5)]

    def publish(step: int) -> None:
        if step % every == 0:
            versions.publish(engine, step // every)

    done = drain(engine, asked, before_step=publish)
    assert (engine.counters.num_parked > 0) == (every > 4)
    twin = versions.cached_logprobs if kv == "keep" else versions.whole_logprobs
    other = versions.whole_logprobs if kv == "keep" else versions.cached_logprobs
    for one in asked:
        tokens = done[one.id, 0].tokens
        assert len(set(tokens["version"].tolist())) > 2
        assert_close(tokens, twin(one, tokens))
    assert np.abs(np.array(other(asked[4], tokens)) - tokens["logprob"]).max() > 1e-3


@pytest.mark.parametrize("num", [1, 6, 14])
def test_recomputed_sequences_equal_a_fresh_engine_given_the_same_ids(
    num, versions_of, engine_of, drain
):
    """WS4: after an update, later tokens depend on the new weights alone; kept keys differ."""
    asked = request(0, PROMPT[:11], new=20, members=4)
    found = {}
    for kv in ("recompute", "keep"):
        versions = versions_of("qwen3")
        engine = engine_of(versions.policy, round_tokens=5, kv_on_update=kv)
        engine.add(asked)
        for _ in range(num):
            engine.step()
        versions.publish(engine, 1)
        done = drain(engine)
        begun = tuple(done[0, m].tokens[:num] for m in range(4))
        resumed = request(0, PROMPT[:11], new=20, members=4, begun=begun)
        fresh = drain(engine_of(versions.policy, version=1), [resumed])
        found[kv] = done, fresh
    done, fresh = found["recompute"]
    assert_same(done, fresh)
    for key, completion in done.items():
        assert completion.tokens["version"].tolist() == [0] * num + [1] * (20 - num)
        assert completion.tokens["version"].tolist() == fresh[key].tokens["version"].tolist()
    done, fresh = found["keep"]
    gap = done[0, 0].tokens["logprob"][num] - fresh[0, 0].tokens["logprob"][num]
    assert done[0, 0].tokens["id"][num] != fresh[0, 0].tokens["id"][num] or abs(gap) > 1e-3


def test_recomputing_a_group_computes_its_prompt_once(model, engine_of, drain, computed):
    """11 prompt ids; four members with 5 tokens; an update; then all is computed a second time."""
    policy, _ = model("llama")
    asked = request(0, PROMPT[:11], new=9, members=4)
    whole = drain(engine_of(policy), [asked])
    engine = engine_of(policy, prefix_cache=False, kv_on_update="recompute")
    computed.clear()

    def announce(step: int) -> None:
        if step == 5:
            engine.weights_changed(1)

    assert_same(drain(engine, [asked], before_step=announce), whole)
    assert sorted(p for p in computed if p < 11) == sorted([*range(11)] * 2)
    assert len(computed) == 11 + 4 * 4 + 11 + 4 * 8
    assert engine.counters.num_prompt_tokens == 11
    assert engine.counters.num_preemptions == 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("limits", [{}, {"max_running": 5, "round_tokens": 4}])
def test_publishing_a_label_aborts_nothing(kv, limits, model, engine_of, drain):
    """AS3: 16 long generations in flight; each ends by itself with a trail of versions."""
    policy, _ = model("llama")
    asked = [request(n, PROMPT[: 4 + n], new=30) for n in range(16)]
    whole = drain(engine_of(policy), asked)
    engine = engine_of(policy, version=4, kv_on_update=kv, **limits)

    def announce(step: int) -> None:
        if step == 10:
            assert len(engine.unfinished) == 16
            engine.weights_changed(5)

    done = drain(engine, asked, before_step=announce)
    assert_same(done, whole)
    for completion in done.values():
        trail = completion.tokens["version"].tolist()
        assert completion.finish is Finish.LENGTH
        assert trail == sorted(trail)
        assert set(trail) <= {4, 5}
        assert completion.version == 5
        if not limits:
            assert trail == [4] * 10 + [5] * 20
    if limits:  # requests 0-9 had two rounds' worth of slots before the announcement
        num_old = [(done[n, 0].tokens["version"] == 4).sum() for n in range(16)]
        assert num_old == [4] * 10 + [2] * 5 + [0]


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_parked_sequences_can_be_taken_back_and_forgotten(how, model, engine_of, drain):
    """With the tokens of their rounds; every page comes back."""
    policy, _ = model("llama")
    whole = drain(engine_of(policy), [request(0, members=3)])
    engine = engine_of(policy, version=2, max_running=2, round_tokens=4)
    engine.add(request(0, members=3))
    for _ in range(5):
        engine.step()
    assert engine.unfinished[0].num_parked == 2
    if how == "reset":
        engine.reset()
    else:
        stopped = sorted(engine.abort([0]), key=lambda c: c.member)
        assert [(c.finish, len(c.tokens)) for c in stopped] == [
            (Finish.ABORT, 4), (Finish.ABORT, 4), (Finish.ABORT, 1)
        ]  # fmt: skip
        resumed = request(0, members=3, begun=tuple(c.tokens for c in stopped))
        assert_same(drain(engine_of(policy), [resumed]), whole)
    engine.check_integrity()
    assert engine._scheduler.pool.num_used == 0
    assert not engine.has_work
    assert engine.unfinished == {}


@pytest.mark.parametrize(("version", "num_parked"), [(2, 2), (3, 0)])
def test_what_was_taken_back_goes_on_in_its_round(version, num_parked, model, engine_of, drain):
    """Rounds of 4, taken back with 4, 4 and 1 tokens of version 2: at an engine with these weights
    the first two wait, and the third writes 3 more. New weights begin a new round for all."""
    policy, _ = model("llama")
    whole = drain(engine_of(policy), [request(0, members=3)])
    engine = engine_of(policy, version=2, max_running=2, round_tokens=4)
    engine.add(request(0, members=3))
    for _ in range(5):
        engine.step()
    begun = tuple(c.tokens for c in sorted(engine.abort([0]), key=lambda c: c.member))
    assert [len(tokens) for tokens in begun] == [4, 4, 1]
    other = engine_of(policy, version=version, round_tokens=4)
    other.add(request(0, members=3, begun=begun))
    other.check_integrity()
    assert other.unfinished[0].num_parked == num_parked
    if num_parked:
        for _ in range(3):
            other.step()
        assert (other.unfinished[0].num_parked, other.unfinished[0].num_tokens) == (3, 12)
    done = drain(other)
    assert_same(done, whole)
    versions = done[0, 2].tokens["version"].tolist()
    assert versions == [2] + [version] * 9


def test_forgetting_prefixes_ends_no_round_and_recomputes_nothing_that_is_held(
    model, engine_of, drain, computed
):
    """One parked, one running; neither is disturbed, and later requests find nothing of theirs."""
    policy, _ = model("llama")
    asked = [request(n, PROMPT[: 20 + n]) for n in range(4)]
    whole = drain(engine_of(policy), asked)
    engine = engine_of(policy, max_running=1, round_tokens=3, kv_on_update="recompute")
    for one in asked[:2]:
        engine.add(one)
    for _ in range(4):
        engine.step()
    assert places(engine) == {0: "parked", 1: "running"}
    assert engine.counters.num_cached_tokens == 16
    before = len(computed)
    engine.forget_prefixes()
    engine.check_integrity()
    assert places(engine) == {0: "parked", 1: "running"}
    done = drain(engine, [asked[2]])
    assert engine.counters.num_cached_tokens == 16
    assert len(computed) - before == 7 + 9 + 22 + 9
    done |= drain(engine, [asked[3]])
    assert engine.counters.num_cached_tokens == 32
    assert_same(done, whole)


def test_a_round_needs_a_token():
    with pytest.raises(ValueError, match="round_tokens=0 is not >= 1"):
        EngineLimits(round_tokens=0)
