"""Weights that change between steps: nothing of the old ones is reused, every token is tagged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lagzero.engine.request import Request, Sampling
from lagzero.types import Finish

PROMPT = tuple(range(20, 60))
TOLERANCE = 5e-5


def assert_equal(done, expected):
    assert done["id"].tolist() == expected["id"].tolist()
    np.testing.assert_allclose(done["logprob"], expected["logprob"], rtol=0, atol=TOLERANCE)


def request(number: int, prompt=PROMPT, new: int = 8, seed: int = 5) -> Request:
    return Request(number, prompt, (seed,), Sampling(new))


@pytest.fixture
def fresh(versions_of, engine_of, drain):
    """Return the tokens of a request under version 1, from an engine that knew no other."""

    def run(family: str, asked: Request):
        versions = versions_of(family)
        versions.load(versions.policy.module, 1)
        return drain(engine_of(versions.policy, version=1), [asked])[asked.id, 0].tokens

    return run


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama in C"])
def test_cached_prefixes_do_not_survive_an_update(family, versions_of, engine_of, drain, fresh):
    """WS3, LO3: P under W0, W1, P again equals a fresh engine; so does W0 when it comes back."""
    versions = versions_of(family)
    engine = engine_of(versions.policy)
    first = drain(engine, [request(0)])[0, 0].tokens
    versions.publish(engine, 1)
    second = drain(engine, [request(1)])[1, 0].tokens
    assert engine.counters.num_cached_tokens == 0
    assert_equal(second, fresh(family, request(1)))
    assert second["id"].tolist() != first["id"].tolist()
    versions.publish(engine, 2)
    assert_equal(drain(engine, [request(2)])[2, 0].tokens, first)


def test_a_shared_prompt_stays_right_over_20_updates(versions_of, engine_of, drain, fresh):
    """WS3: the gap does not grow; within one version the prefix is found."""
    versions = versions_of("llama")
    engine = engine_of(versions.policy)
    expected = fresh("llama", request(0))
    for version in range(1, 21):
        versions.publish(engine, version)
        before = engine.counters.num_cached_tokens
        for _ in range(2):
            tokens = drain(engine, [request(0)])[0, 0].tokens
        assert engine.counters.num_cached_tokens - before == 32
        if version % 2:
            assert_equal(tokens, expected)


def test_waiting_sequences_keep_nothing_of_the_old_weights(versions_of, engine_of, drain, fresh):
    """WS3: not even a prefix that was found for one that then had to wait for pages."""
    versions = versions_of("llama")
    engine = engine_of(versions.policy, kv_cache_tokens=96, page_size=8)
    drain(engine, [request(0, new=1)])  # P is in the cache: 5 pages of 12
    engine.add(request(1, prompt=tuple(range(100, 147)), new=20))  # takes 6, then 7 and more
    engine.add(request(2, prompt=(*PROMPT, *range(200, 230))))
    engine.step()
    engine.step()
    versions.publish(engine, 1)
    late = request(2, prompt=(*PROMPT, *range(200, 230)))
    done = drain(engine)
    assert engine.counters.num_cached_tokens == 0
    assert_equal(done[2, 0].tokens, fresh("llama", late))


def test_members_that_wait_compute_the_prompt_anew(versions_of, engine_of, drain, fresh):
    """WS3: they have sampled nothing, so nothing binds them to the old weights."""
    versions = versions_of("llama")
    engine = engine_of(versions.policy, max_running=1)
    engine.add(Request(0, PROMPT, (1, 5), Sampling(8)))
    engine.step()
    versions.publish(engine, 1)
    done = drain(engine)
    assert done[0, 0].tokens["version"].tolist() == [0] + [1] * 7
    assert_equal(done[0, 1].tokens, fresh("llama", request(0)))


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama in C"])
def test_weights_may_switch_at_every_step(family, versions_of, engine_of, drain):
    """WS4: 50 switches while three stream; each token is of exactly the version of its tag."""
    versions = versions_of(family)
    engine = engine_of(versions.policy)
    asked = [request(n, PROMPT[: 3 + 9 * n], new=50, seed=n) for n in range(3)]
    done = drain(engine, asked, before_step=lambda step: versions.publish(engine, step))
    for one in asked:
        tokens = done[one.id, 0].tokens
        assert tokens["version"].tolist() == list(range(50))
        expected = versions.cached_logprobs(one, tokens)
        np.testing.assert_allclose(tokens["logprob"], expected, rtol=0, atol=TOLERANCE)
    wrong = versions.cached_logprobs(asked[0], one_version(done[0, 0].tokens))
    assert np.abs(np.array(wrong) - done[0, 0].tokens["logprob"]).max() > 0.1


def one_version(tokens):
    tokens = tokens.copy()
    tokens["version"] = 0
    return tokens


def test_updates_with_equal_weights_change_nothing(versions_of, engine_of, drain):
    """WS4, MO1: also with preemption, a chunked prefill and members that wait."""
    versions = versions_of("qwen3", same=True)
    asked = [
        Request(n, PROMPT[: 5 + 8 * n], tuple(range(10 * n, 10 * n + 3)), Sampling(20))
        for n in range(4)
    ]
    expected = drain(engine_of(versions.policy), asked)
    limits = {"max_running": 5, "kv_cache_tokens": 72, "prefill_chunk_tokens": 6, "page_size": 4}
    engine = engine_of(versions.policy, **limits)
    done = drain(engine, asked, before_step=lambda step: versions.publish(engine, step // 2))
    assert engine.counters.num_preemptions > 0
    for key, completion in done.items():
        assert_equal(completion.tokens, expected[key].tokens)
        assert (np.diff(completion.tokens["version"]) >= 0).all()


def test_an_announcement_aborts_nothing_and_leaves_a_trail(model, engine_of, drain):
    """AS3: 16 long generations in flight, a label published with no pause."""
    policy, _ = model("llama")
    engine = engine_of(policy, version=4)
    asked = [request(n, PROMPT[: 4 + n], new=30, seed=n) for n in range(16)]

    def announce(step: int) -> None:
        if step == 10:
            engine.weights_changed(5)

    done = drain(engine, asked, before_step=announce)
    assert len(done) == 16
    for completion in done.values():
        assert completion.finish is Finish.LENGTH
        assert completion.tokens["version"].tolist() == [4] * 10 + [5] * 20
        assert completion.version == 5


@pytest.mark.parametrize(
    ("length", "steps", "round_tokens"), [(40, 5, None), (4, 2, None), (4, 2, 2)]
)
def test_pages_of_mixed_versions_are_not_offered_to_others(
    length, steps, round_tokens, versions_of, engine_of, drain, fresh
):
    """WS3: one that ran, or was parked, across an update leaves nothing in the cache.

    Also when the update came before its first page was full, so that the page had no name yet.
    """
    versions = versions_of("llama")
    engine = engine_of(versions.policy, round_tokens=round_tokens)
    engine.add(request(0, PROMPT[:length], new=30))
    for _ in range(steps):
        engine.step()
    versions.publish(engine, 1)
    done = drain(engine)[0, 0]
    prompt = (*PROMPT[:length], *done.tokens["id"].tolist())
    again = drain(engine, [request(1, prompt=prompt)])[1, 0].tokens
    assert engine.counters.num_cached_tokens == 0
    assert_equal(again, fresh("llama", request(1, prompt=prompt)))


def test_memory_is_released_only_when_nothing_needs_it(model, engine_of, drain):
    """WS1: what comes after is as before."""
    policy, _ = model("llama")
    engine = engine_of(policy)
    engine.add(request(0))
    engine.step()
    with pytest.raises(Exception, match="cannot be released"):
        engine.release_memory()
    first = drain(engine)[0, 0].tokens
    engine.release_memory()
    assert engine._cache is None
    again = drain(engine, [request(1)])[1, 0].tokens
    assert engine.counters.num_cached_tokens == 0
    assert_equal(again, first)


@pytest.mark.parametrize("when", [0, 1, 4])
def test_an_engine_recovers_from_broken_weights(when, versions_of, engine_of, drain):
    """NaN weights raise; after a reset and good weights, no NaN is left in any page."""
    versions = versions_of("llama")
    engine = engine_of(versions.policy, page_size=32, kv_cache_tokens=256)
    expected = drain(engine, [request(0)])[0, 0].tokens
    engine.add(Request(1, PROMPT, (1, 2, 3), Sampling(8)))
    for _ in range(when):
        engine.step()
    with torch.no_grad():
        versions.policy.module.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="non-finite"):
        for _ in range(9):
            engine.weights_changed(1)
            engine.step()
    engine.reset()
    engine.check_integrity()
    assert not engine.has_work
    versions.publish(engine, 2)
    for number in range(2, 6):
        done = drain(engine, [request(number, PROMPT[: 40 - number]), request(9)])
        assert_equal(done[9, 0].tokens, expected)
