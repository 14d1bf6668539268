"""An engine that gives its memory to a trainer between two steps loses nothing."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from lagzero.engine.request import Request, Sampling, derive_seed

PROMPT = tuple(range(20, 60))
TOLERANCE = 5e-5


def request(number: int, members: int = 1, new: int = 12, begun=()) -> Request:
    seeds = tuple(derive_seed(number, member) for member in range(members))
    return Request(number, PROMPT[: 9 + 3 * number], seeds, Sampling(new), begun)


def assert_same(done, expected):
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        got, want = completion.tokens, expected[key].tokens
        assert got["id"].tolist() == want["id"].tolist()
        np.testing.assert_allclose(got["logprob"], want["logprob"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama in C"])
def test_sleep_update_wake_generate_five_times(family, versions_of, engine_of, drain):
    """WS1: each time, and before the very first step, as a fresh engine of the same weights."""
    versions = versions_of(family)
    engine = engine_of(versions.policy)
    expected = []
    for version in range(2):
        versions.load(versions.policy.module, version)
        expected.append(drain(engine_of(versions.policy), [request(0, 3), request(1)]))
    assert expected[0][1, 0].tokens["id"].tolist() != expected[1][1, 0].tokens["id"].tolist()
    for version in range(1, 6):
        engine.suspend(release=True)
        assert engine._cache is None
        versions.publish(engine, version)
        done = drain(engine, [request(0, 3), request(1)])
        assert_same(done, expected[version % 2])
        for completion in done.values():
            assert (completion.tokens["version"] == version).all()
    assert engine.counters.num_cached_tokens == 0


@pytest.mark.parametrize("reserve", [True, False])
def test_a_cache_that_is_reserved_takes_its_memory_at_once(reserve, versions_of, engine_of, drain):
    """Else a stretch at a time, as its pages are handed out, and after a release from the first."""
    engine = engine_of(versions_of("llama").policy, kv_reserve=reserve, kv_cache_tokens=1 << 10)
    assert (engine._cache is not None) == reserve
    for _ in range(2):
        drain(engine, [request(0, 3), request(1)])
        pool, taken = engine._scheduler.pool, engine._cache._num_taken
        assert 0 < pool.num_begun < pool.num_pages
        assert taken == pool.num_pages if reserve else pool.num_begun <= taken < pool.num_pages
        engine.suspend(release=True)
        assert (engine._cache, pool.num_begun) == (None, 0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("num", [1, 4, 9])
def test_what_was_in_flight_goes_on_under_the_new_weights(kv, num, versions_of, engine_of, drain):
    """WS1: some are parked then. The keys are gone, so both choices equal a fresh engine."""
    versions = versions_of("qwen3")
    engine = engine_of(versions.policy, round_tokens=4, max_running=3, kv_on_update=kv)
    asked = [request(n, members=2) for n in range(3)]
    for one in asked:
        engine.add(one)
    done = {(c.request_id, c.member): c for _ in range(num) for c in engine.step()}
    places = engine.unfinished
    engine.suspend(release=True)
    engine.check_integrity()
    assert engine._cache is None
    assert engine._scheduler.pool.num_used == 0
    now = engine.unfinished
    assert now.keys() == places.keys()
    for number, at in now.items():
        assert (at.num_running, at.num_parked) == (0, places[number].num_parked)
        assert at.num_waiting == places[number].num_running + places[number].num_waiting
        assert at.num_tokens == places[number].num_tokens
    versions.publish(engine, 1)
    done |= drain(engine)
    assert len(done) == 6
    for one in asked:
        begun = []
        for member in range(2):
            tokens = done[one.id, member].tokens
            begun.append(tokens[tokens["version"] == 0])
            assert (np.diff(tokens["version"]) >= 0).all()
        resumed = request(one.id, members=2, begun=tuple(begun))
        fresh = drain(engine_of(versions.policy, version=1), [resumed])
        assert_same({key: c for key, c in done.items() if key[0] == one.id}, fresh)


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("limits", [{}, {"round_tokens": 3, "max_running": 2}])
def test_a_pause_before_every_step_changes_no_token(
    release, limits, model, engine_of, drain, computed
):
    """Without release nothing is computed twice; with it, the prompts of a group once a pause."""
    policy, _ = model("llama")
    asked = [request(0, members=4), request(1, members=1)]
    whole = drain(engine_of(policy), asked)
    engine = engine_of(policy, prefill_chunk_tokens=256, **limits)
    computed.clear()

    def pause(step: int) -> None:
        engine.suspend(release)
        engine.check_integrity()

    assert_same(drain(engine, asked, before_step=pause), whole)
    if not release and not limits:
        assert len(computed) == 9 + 12 + 5 * 11
    assert engine.counters.num_preemptions == 0


def test_pausing_once_computes_a_groups_prompt_once_more(model, engine_of, drain, computed):
    """9 prompt ids; when 4 members have 5 tokens each, one prompt and 4 * 5 ids are computed."""
    policy, _ = model("llama")
    whole = drain(engine_of(policy), [request(0, members=4)])
    engine = engine_of(policy, prefix_cache=False)
    computed.clear()

    def pause(step: int) -> None:
        if step == 5:
            engine.suspend(release=True)

    assert_same(drain(engine, [request(0, members=4)], before_step=pause), whole)
    assert sorted(p for p in computed if p < 9) == sorted([*range(9)] * 2)
    assert len(computed) == 9 + 4 * 4 + 9 + 4 * 11


def test_the_memory_is_given_back_though_sequences_are_unfinished(model, engine_of):
    """Nothing keeps a tensor of the cache alive: nor a plan, nor a view."""
    policy, _ = model("llama")
    engine = engine_of(policy)
    engine.add(request(0, members=2))
    engine.step()
    tensors = [weakref.ref(tensor) for tensor in engine._cache.keys.values()]
    engine.suspend(release=False)
    assert all(tensor() is not None for tensor in tensors)
    engine.suspend(release=True)
    assert all(tensor() is None for tensor in tensors)


def test_requests_come_and_go_while_the_engine_sleeps(model, engine_of, drain):
    """Taking back works, and memory is taken again by the next step alone."""
    policy, _ = model("llama")
    whole = drain(engine_of(policy), [request(n, members=2) for n in range(3)])
    engine = engine_of(policy)
    engine.add(request(0, members=2))
    engine.add(request(1, members=2))
    for _ in range(4):
        engine.step()
    engine.suspend(release=True)
    engine.add(request(2, members=2))
    stopped = sorted(engine.abort([0]), key=lambda c: c.member)
    assert [len(c.tokens) for c in stopped] == [4, 4]
    engine.suspend(release=True)
    engine.check_integrity()
    assert engine._cache is None
    resumed = request(0, members=2, begun=tuple(c.tokens for c in stopped))
    assert_same(drain(engine, [resumed]), whole)
