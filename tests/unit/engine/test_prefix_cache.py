"""Prompts that start alike are computed once, and never served another's content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.engine.request import Request, Sampling

PROMPT = tuple(range(20, 60))  # 40 tokens: five pages of 8


def request(number: int, prompt=PROMPT, new: int = 4, seed: int = 1) -> Request:
    return Request(number, prompt, (seed,), Sampling(new))


def hits(engine) -> int:
    return engine.counters.num_cached_tokens


def test_a_second_request_reuses_all_full_pages_but_the_last_id(model, engine_of, drain):
    """The last id is always computed: its logits give the first token."""
    policy, _ = model("llama")
    engine = engine_of(policy)
    first = drain(engine, [request(0)])[0, 0].tokens
    assert hits(engine) == 0
    second = drain(engine, [request(1)])[1, 0].tokens
    assert hits(engine) == 32
    assert engine.counters.num_prompt_tokens == 80
    assert second["id"].tolist() == first["id"].tolist()
    np.testing.assert_allclose(second["logprob"], first["logprob"], rtol=0, atol=5e-5)
    drain(engine, [request(2, prompt=(*PROMPT, 7))])
    assert hits(engine) == 32 + 40


def test_sampled_tokens_are_reused_too(model, engine_of, drain):
    """A following turn starts with what was sampled; the newest id had no keys yet."""
    policy, _ = model("llama")
    engine = engine_of(policy)
    ids = drain(engine, [request(0, new=9)])[0, 0].tokens["id"].tolist()
    drain(engine, [request(1, prompt=(*PROMPT, *ids, 5))])
    assert hits(engine) == 48


def test_switched_off_it_finds_nothing(model, engine_of, drain):
    policy, _ = model("llama")
    engine = engine_of(policy, prefix_cache=False)
    drain(engine, [request(0)])
    drain(engine, [request(1)])
    assert hits(engine) == 0


def test_running_requests_share_and_waiting_ones_count_once(model, engine_of, drain):
    """A sequence that waits many steps for pages is counted when it is admitted."""
    policy, _ = model("llama")
    engine = engine_of(policy, kv_cache_tokens=64)
    drain(engine, [request(0), request(1, prompt=tuple(range(100, 141)), new=15), request(2)])
    assert engine.counters.num_preemptions == 0
    assert engine.counters.num_prompt_tokens == 40 + 41 + 40


def test_old_content_is_evicted_under_pressure_from_its_end(model, engine_of, drain):
    """8 pages: P leaves 5, Q needs 4 and takes the 3 free ones and the last page of P."""
    policy, _ = model("llama")
    engine = engine_of(policy, kv_cache_tokens=64)
    drain(engine, [request(0, prompt=(*PROMPT, 7), new=1)])
    before = hits(engine)
    drain(engine, [request(1, prompt=tuple(range(100, 131)), new=1)])
    drain(engine, [request(2, prompt=(*PROMPT, 7), new=1)])
    assert hits(engine) - before == 32


def test_least_recently_used_prompts_go_first(model, engine_of, drain):
    policy, _ = model("llama")
    engine = engine_of(policy, kv_cache_tokens=64)  # 8 pages

    def play(number: int, start: int) -> int:
        before = hits(engine)
        drain(engine, [request(number, prompt=tuple(range(start, start + 17)), new=1)])
        return hits(engine) - before

    assert [play(n, start) for n, start in enumerate((20, 60, 100))] == [0, 0, 0]
    assert play(3, 20) == 16  # used again, so the next to go is the prompt from 60
    assert play(4, 140) == 0
    assert play(5, 20) == 16
    assert play(6, 60) < 16


@pytest.fixture(scope="module")
def plain(model, engine_of, drain):
    """Return tokens of a prompt from an engine without a cache, computed once each."""
    policy, _ = model("gemma3")
    engine = engine_of(policy, prefix_cache=False)
    known = {}

    def run(prompt):
        if prompt not in known:
            known[prompt] = drain(engine, [request(0, prompt, new=3)])[0, 0].tokens
        return known[prompt]

    return run


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([3, 4]), st.integers(1, 9)),
        min_size=4,
        max_size=14,
    ),
    together=st.integers(1, 4),
)
def test_content_is_never_mixed_up(prompts, together, plain, model, engine_of, drain):
    """Prompts that share beginnings of every length, in a pool that must evict."""
    policy, _ = model("gemma3")
    engine = engine_of(policy, page_size=4, kv_cache_tokens=52)
    trunk = tuple(range(30, 60))
    rows = [(*trunk[:shared], *[branch] * num) for shared, branch, num in prompts]
    for begin in range(0, len(rows), together):
        batch = [request(n, rows[n], new=3) for n in range(begin, min(begin + together, len(rows)))]
        done = drain(engine, batch)
        for one in batch:
            got, want = done[one.id, 0].tokens, plain(one.prompt_ids)
            assert got["id"].tolist() == want["id"].tolist()
            np.testing.assert_allclose(got["logprob"], want["logprob"], rtol=0, atol=5e-5)
