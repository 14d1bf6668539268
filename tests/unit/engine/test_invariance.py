"""Sizes of the engine and the order of arrival change nothing that is sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lagzero.engine.request import Request, Sampling, derive_seed

TOLERANCE = 5e-5


def requests(max_new_tokens: int = 14) -> list[Request]:
    """Eight prompts of 2 to 33 tokens; some start alike; groups of 1 to 5."""
    generator = torch.Generator().manual_seed(7)
    pool = torch.randint(3, 300, (200,), generator=generator).tolist()
    cuts = [(0, 2), (0, 20), (0, 33), (5, 12), (40, 57), (40, 60), (100, 101), (60, 76)]
    groups = [1, 5, 2, 1, 4, 1, 2, 1]
    return [
        Request(
            number,
            tuple(pool[begin:end]),
            tuple(derive_seed(0, number, member) for member in range(group)),
            Sampling(max_new_tokens - number % 3),
        )
        for number, ((begin, end), group) in enumerate(zip(cuts, groups, strict=True))
    ]


def assert_same(done, expected):
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        want = expected[key].tokens
        assert completion.tokens["id"].tolist() == want["id"].tolist(), key
        np.testing.assert_allclose(
            completion.tokens["logprob"], want["logprob"], rtol=0, atol=TOLERANCE
        )


@pytest.fixture(scope="module")
def expected(model, engine_of, drain):
    """Each request alone in an ample engine."""
    policy, _ = model("gemma3")
    done = {}
    for request in requests():
        done |= drain(engine_of(policy, prefix_cache=False), [request])
    return done


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    page_size=st.sampled_from([4, 16, 32]),
    max_running=st.sampled_from([1, 3, 128]),
    pool=st.sampled_from([64, 96, 4096]),
    chunk=st.sampled_from([1, 5, 512]),
    prefix_cache=st.booleans(),
    order=st.permutations(range(8)),
    arrivals=st.lists(st.integers(0, 12), min_size=8, max_size=8),
)
def test_nothing_depends_on_sizes_or_arrival(
    page_size, max_running, pool, chunk, prefix_cache, order, arrivals,
    expected, model, engine_of, drain,
):  # fmt: skip
    """EN3, EN4, LP5: ids equal and log-probs within fp32 noise."""
    policy, _ = model("gemma3")
    engine = engine_of(
        policy,
        page_size=page_size,
        max_running=max_running,
        kv_cache_tokens=pool,
        prefill_chunk_tokens=chunk,
        prefix_cache=prefix_cache,
    )
    every = requests()
    late = [(arrivals[i] - min(arrivals), every[i]) for i in order]

    def arrive(step: int) -> None:
        for at, request in late:
            if at == step > 0:
                engine.add(request)

    done = drain(engine, [r for at, r in late if at == 0], arrive)
    for request in every:  # those whose time came after the engine ran dry
        if (request.id, 0) not in done:
            done |= drain(engine, [request])
    assert_same(done, expected)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_loses_and_repeats_nothing(prefix_cache, model, engine_of, drain):
    """EN3: greedy, 8 prompts, 40 new tokens, a pool that holds little more than one sequence."""
    policy, _ = model("llama")
    generator = torch.Generator().manual_seed(3)
    batch = [
        Request(
            n,
            tuple(torch.randint(3, 300, (5 + n,), generator=generator).tolist()),
            (0,),
            Sampling(40, temperature=0),
        )
        for n in range(8)
    ]
    ample = engine_of(policy, page_size=4, prefix_cache=prefix_cache)
    tiny = engine_of(policy, page_size=4, kv_cache_tokens=64, prefix_cache=prefix_cache)
    expected = drain(ample, batch)
    done = drain(tiny, batch)
    assert ample.counters.num_preemptions == 0
    assert tiny.counters.num_preemptions > 0
    # What comes back is not counted again, nor ever what was sampled.
    assert tiny.counters.num_prompt_tokens == sum(len(r.prompt_ids) for r in batch)
    assert tiny.counters.num_cached_tokens == 0
    assert_same(done, expected)
    assert all(len(c.tokens) == 40 for c in done.values())
    assert tiny.counters.num_sampled_tokens == 8 * 40
    assert tiny.counters.max_used_pages <= 16


def test_preempted_sequences_do_not_thrash(model, engine_of, drain):
    """One that lost its pages comes back when all of them are free, not to lose them again."""
    policy, _ = model("llama")
    batch = [Request(n, (5 + n, *range(10, 25)), (n,), Sampling(48)) for n in range(4)]
    engine = engine_of(
        policy, page_size=4, kv_cache_tokens=128, prefill_chunk_tokens=8, prefix_cache=False
    )
    drain(engine, batch)
    assert 0 < engine.counters.num_preemptions <= 4


@pytest.mark.parametrize("num_pages", range(19, 26))
def test_members_preempted_beside_a_long_prefill_lose_nothing(num_pages, model, engine_of, drain):
    """EN3: the group's members run behind the long prompt, whose last chunk leaves room."""
    policy, _ = model("llama")
    batch = [
        Request(0, (5, 6, 7, 8), (1, 2, 3), Sampling(20)),
        Request(1, tuple(range(50, 108)), (4,), Sampling(10)),
    ]
    engine = engine_of(
        policy, page_size=4, kv_cache_tokens=4 * num_pages, prefill_chunk_tokens=8,
        prefix_cache=False,
    )  # fmt: skip
    assert_same(drain(engine, batch), drain(engine_of(policy), batch))
    assert engine.counters.num_sampled_tokens == 3 * 20 + 10
