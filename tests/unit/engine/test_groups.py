"""Members of a request share the prompt's pages and nothing else; aborting loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from lagzero.engine.request import Request, Sampling, derive_seed
from lagzero.train.model import Policy
from lagzero.types import Finish

PROMPT = tuple(range(10, 21))  # 11 tokens: with pages of 8, the second is partly filled


def group(number: int, size: int, new: int = 12, prompt: tuple[int, ...] = PROMPT) -> Request:
    seeds = tuple(derive_seed(0, number, member) for member in range(size))
    return Request(number, prompt, seeds, Sampling(new))


def alone(request: Request, member: int) -> Request:
    return Request(request.id, request.prompt_ids, (request.seeds[member],), request.sampling)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 11, 16])
@pytest.mark.parametrize("max_running", [2, 128])
def test_members_diverge_in_a_shared_page_without_touching_each_other(
    length, max_running, model, engine_of, drain
):
    """Also with fewer slots than members, and with the prompt ending at a page's edge."""
    policy, _ = model("llama")
    request = group(0, 5, prompt=tuple(range(10, 10 + length)))
    together = drain(engine_of(policy, max_running=max_running), [request])
    for member in range(5):
        single = drain(engine_of(policy, prefix_cache=False), [alone(request, member)])[0, 0]
        got = together[0, member].tokens
        assert got["id"].tolist() == single.tokens["id"].tolist()
        np.testing.assert_allclose(got["logprob"], single.tokens["logprob"], rtol=0, atol=5e-5)
    assert len({tuple(c.tokens["id"]) for c in together.values()}) == 5


def test_a_group_computes_its_prompt_once(model, engine_of, drain):
    """6 members hold one full page together and a second page each, when they have diverged."""
    policy, _ = model("llama")
    engine = engine_of(policy)
    drain(engine, [group(0, 6, new=5)])
    assert engine.counters.num_prompt_tokens == len(PROMPT)
    assert engine.counters.max_used_pages == 1 + 6


def test_members_beyond_the_slots_recompute_one_id_each(model, engine_of, drain, monkeypatch):
    policy, _ = model("llama")
    engine = engine_of(policy, max_running=2, prefix_cache=False)
    hidden, computed = Policy.hidden, []

    def counted(self, ids, position_ids, plan):
        computed.extend(position_ids[position_ids < len(PROMPT)].tolist())
        return hidden(self, ids, position_ids, plan)

    monkeypatch.setattr(Policy, "hidden", counted)
    drain(engine, [group(0, 5)])
    assert len(computed) == len(PROMPT) + 3  # the leader's all, then one for each that waited


@pytest.mark.parametrize("max_running", [2, 128])
def test_a_groups_prompt_counts_once_whether_members_wait_or_not(
    max_running, model, engine_of, drain
):
    """The second group finds the first page of 8 in the cache; its members add nothing."""
    policy, _ = model("llama")
    engine = engine_of(policy, max_running=max_running)
    drain(engine, [group(0, 5)])
    drain(engine, [group(1, 5)])
    counters = engine.counters
    assert (counters.num_prompt_tokens, counters.num_cached_tokens) == (2 * len(PROMPT), 8)


def test_streams_of_a_group_differ_and_repeat_anywhere(model, engine_of, drain):
    """EN4: seed 0, a group of 8: 8 streams, the same twice and on another, busy engine."""
    policy, _ = model("qwen3")

    def ids(done):
        return [done[0, member].tokens["id"].tolist() for member in range(8)]

    first = ids(drain(engine_of(policy), [group(0, 8)]))
    again = ids(drain(engine_of(policy), [group(0, 8)]))
    replica = engine_of(policy, page_size=4, max_running=5)
    busy = ids(drain(replica, [group(3, 4, new=30, prompt=(5, 6)), group(0, 8), group(4, 2)]))
    assert len(set(map(tuple, first))) == 8
    assert first == again == busy


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_abort_returns_what_was_sampled_and_frees_everything(steps, model, engine_of, drain):
    """AS6, LP8: before, during and after a prefill of 3 chunks, with members that wait."""
    policy, _ = model("llama")
    engine = engine_of(policy, version=7, prefill_chunk_tokens=4, max_running=3)
    request, other = group(0, 5), group(1, 1)
    engine.add(request)
    engine.add(other)
    for _ in range(steps):
        engine.step()
    stopped = engine.abort([0])
    engine.check_integrity()
    assert sorted(c.member for c in stopped) == list(range(5))
    expected = drain(engine_of(policy, prefix_cache=False), [request])
    for c in stopped:
        # The third chunk leaves room for the other request, which takes the third slot.
        num = max(0, steps - 2) if c.member < 2 else 0
        assert (c.finish, c.version, len(c.tokens)) == (Finish.ABORT, 7, num)
        assert c.tokens["id"].tolist() == expected[0, c.member].tokens["id"][:num].tolist()
        assert np.isfinite(c.tokens["logprob"]).all()
        assert (c.tokens["version"] == 7).all()
    rest = drain(engine)
    assert set(rest) == {(1, 0)}
    assert len(rest[1, 0].tokens) == 12


def test_a_preempted_request_aborts_with_its_tokens(model, engine_of):
    """AS6: one retracted after some tokens keeps them; one never prefilled has a version."""
    policy, _ = model("llama")
    engine = engine_of(policy, version=3, page_size=4, kv_cache_tokens=48, prefix_cache=False)
    for number in range(3):
        engine.add(group(number, 1, new=28))
    while engine.counters.num_preemptions == 0:
        engine.step()
    engine.add(group(3, 2))
    # Of 12 pages, each has 4: prompt and 5 ids. The seventh step asks for the fifth page.
    stopped = {(c.request_id, c.member): c for c in engine.abort([2, 3])}
    engine.check_integrity()
    retracted = stopped[2, 0]
    assert (retracted.finish, retracted.version) == (Finish.ABORT, 3)
    assert len(retracted.tokens) == 6
    assert (retracted.tokens["logprob"] < 0).all()
    for member in range(2):
        assert (len(stopped[3, member].tokens), stopped[3, member].version) == (0, 3)


def test_aborting_nothing_known_does_nothing(model, engine_of, drain):
    policy, _ = model("llama")
    engine = engine_of(policy)
    engine.add(group(0, 2))
    assert engine.abort([5]) == []
    assert len(drain(engine)) == 2
    assert engine.abort([0]) == []
    assert not engine.has_work


def test_resuming_after_aborts_never_exceeds_the_limit(model, engine_of, drain):
    """EN7: limit 10; abort after 6, resume, abort after 2, resume: the greedy ids are one piece."""
    policy, _ = model("gemma3")
    whole = drain(engine_of(policy), [Request(0, PROMPT, (0,), Sampling(10, temperature=0))])
    expected = whole[0, 0].tokens

    ids: list[int] = []
    logprobs: list[float] = []
    engine = engine_of(policy)
    for number, steps in enumerate((6, 2, None)):
        sampling = Sampling(10 - len(ids), temperature=0)
        engine.add(Request(number, (*PROMPT, *ids), (0,), sampling))
        if steps is None:
            piece = drain(engine)[number, 0]
        else:
            for _ in range(steps):
                assert engine.step() == []
            (piece,) = engine.abort([number])
            assert len(piece.tokens) == steps
        ids += piece.tokens["id"].tolist()
        logprobs += piece.tokens["logprob"].tolist()
    assert piece.finish is Finish.LENGTH
    assert ids == expected["id"].tolist()
    np.testing.assert_allclose(logprobs, expected["logprob"], rtol=0, atol=5e-5)
