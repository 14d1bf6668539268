"""Whatever is proposed, what is sampled is what would have been; only the passes are fewer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.engine.request import Request, Sampling, derive_seed
from lagzero.engine.speculation import DraftProposer, NgramProposer, Speculation
from lagzero.native.decoder import make_native
from lagzero.train.exactness import make_exact
from lagzero.train.verify import tiny_policy
from lagzero.types import Finish

TOLERANCE = 5e-5
PROMPT = tuple(range(20, 60))


def requests(temperature: float = 1.0) -> list[Request]:
    """Prompts that start alike and repeat themselves, in groups of 1 to 3."""
    prompts = [PROMPT[:1], PROMPT[:5] * 3, PROMPT[:17], PROMPT[:17] + PROMPT[30:]]
    return [
        Request(
            number,
            prompt,
            tuple(derive_seed(number, member) for member in range(1 + number % 3)),
            Sampling(24 - number, temperature=temperature),
        )
        for number, prompt in enumerate(prompts)
    ]


def draft_of(policy, tokens: int = 4096) -> DraftProposer:
    return DraftProposer(policy, tokens // 8, 8, 300)


def assert_same(done, expected):
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        want = expected[key]
        assert completion.tokens["id"].tolist() == want.tokens["id"].tolist(), key
        assert completion.tokens["version"].tolist() == want.tokens["version"].tolist()
        assert (completion.text, completion.finish) == (want.text, want.finish)
        np.testing.assert_allclose(
            completion.tokens["logprob"], want.tokens["logprob"], rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama in C"])
@pytest.mark.parametrize("kind", ["ngram", "draft", "other draft", "some wrong", "all wrong"])
def test_nothing_that_is_sampled_changes(
    kind, family, temperature, model, engine_of, drain, guesses
):
    """Groups, a shared prefix, chunks and small pages; the window of gemma3 slides past guesses."""
    policy, _ = model(family)
    asked = requests(temperature)
    expected = drain(engine_of(policy), asked)
    proposer = {
        "ngram": lambda: NgramProposer(1),
        "draft": lambda: draft_of(policy),
        "other draft": lambda: draft_of(model("qwen3")[0]),
        "some wrong": lambda: guesses(expected, wrong=3),
        "all wrong": lambda: guesses(expected, wrong=1),
    }[kind]()
    engine = engine_of(
        policy,
        speculation=Speculation(proposer, 5, 100),
        page_size=4,
        prefill_chunk_tokens=7,
    )
    assert_same(drain(engine, asked), expected)
    counters = engine.counters
    assert counters.num_sampled_tokens == sum(len(c.tokens) for c in expected.values())
    assert counters.num_proposed > 0
    if kind != "ngram" or temperature == 0:  # random text of 300 words repeats nothing
        assert (counters.num_accepted == 0) == (kind == "all wrong")


@pytest.mark.parametrize("k", [1, 3, 4, 30])
def test_right_guesses_save_their_passes(k, scripted, engine_of, drain, guesses):
    """21 tokens: one with the prompt, then k + 1 a pass. No more is guessed than may be sampled."""
    asked = [Request(0, (1, 2), (7,), Sampling(21))]
    policy = scripted.chain(40)
    known = drain(engine_of(policy), asked)
    proposer = guesses(known)
    engine = engine_of(policy, speculation=Speculation(proposer, k, 1))
    assert_same(drain(engine, asked), known)
    passes = -(-20 // (k + 1))
    assert engine.counters.num_steps == 1 + passes
    assert engine.counters.num_proposed == engine.counters.num_accepted == 20 - passes
    assert [asked[0, 0] for asked in proposer.asked if asked][-1] == (20 % (k + 1) or k + 1) - 1


def test_guesses_that_fail_become_few_and_good_ones_many(scripted, engine_of, drain, guesses):
    """One more than twice as many as held; 8 at most."""
    asked = [Request(0, (1, 2), (7,), Sampling(40))]
    policy = scripted.chain(60)
    known = drain(engine_of(policy), asked)
    proposer = guesses(known)
    proposer.known[0, 0][6] = 0
    engine = engine_of(policy, speculation=Speculation(proposer, 8, 1))
    assert_same(drain(engine, asked), known)
    # Places 1-8, of which 5 hold; 7-14 and so on to 33; then 5 are left before the last.
    assert [asked[0, 0] for asked in proposer.asked if asked] == [8, 8, 8, 8, 5]
    proposer.asked.clear()
    proposer.wrong = 1
    drain(engine_of(policy, speculation=Speculation(proposer, 8, 1)), asked)
    assert [asked[0, 0] for asked in proposer.asked if asked] == [8] + [1] * 37


def test_only_while_few_sequences_run(model, engine_of, drain, guesses):
    policy, _ = model("llama")
    asked = [Request(n, PROMPT[: 4 + n], (n,), Sampling(4 + 6 * n)) for n in range(4)]
    known = drain(engine_of(policy), asked)
    proposer = guesses(known)
    engine = engine_of(policy, speculation=Speculation(proposer, 3, 2))
    assert_same(drain(engine, asked), known)
    # Four run for 4 tokens and three for 6 more; then two need 6 and 12: 4 + 4, 2 + 4, 4.
    assert engine.counters.num_steps == 4 + 6 + 3
    assert [len(each) for each in proposer.asked if each] == [2, 2, 1]


@pytest.mark.parametrize("wrong", [0, 3])
def test_an_end_within_a_run_of_right_guesses_is_the_end(
    wrong, scripted, words, engine_of, drain, guesses
):
    """By a stop id, by a stop string, at the limit and at the context's: nothing is sampled after.

    The guesses would go on: the known sequence is the one without any stop.
    """
    decoder = words([f"w{i} " for i in range(40)])
    policy = scripted.chain(40, context_limit=14)
    whole = drain(engine_of(scripted.chain(40), decoder), [Request(0, (1, 2), (7,), Sampling(30))])
    *_, last, newest = whole[0, 0].tokens["id"][:7].tolist()
    stops = {"stop_ids": frozenset([newest])}, {"stop_strings": (f"w{last} w{newest}",)}
    ends = {
        Finish.STOP: [Sampling(30, **stop) for stop in stops],
        Finish.LENGTH: [Sampling(n) for n in range(1, 9)],
        Finish.CONTEXT: [Sampling(30)],
    }
    for finish, samplings in ends.items():
        for sampling in samplings:
            asked = [Request(0, (1, 2), (7,), sampling)]
            expected = drain(engine_of(policy, decoder), asked)
            assert expected[0, 0].finish is finish
            proposer = guesses(whole, wrong)
            engine = engine_of(policy, decoder, speculation=Speculation(proposer, 5, 1))
            assert_same(drain(engine, asked), expected)


@pytest.mark.parametrize("round_tokens", [1, 2, 5, 7])
def test_rounds_end_where_they_did(round_tokens, model, engine_of, drain, guesses):
    policy, _ = model("llama")
    asked = requests()
    known = drain(engine_of(policy), asked)
    limits = {"max_running": 3, "round_tokens": round_tokens, "page_size": 4}
    plain = engine_of(policy, **limits)
    drain(plain, asked)
    engine = engine_of(policy, speculation=Speculation(guesses(known, 4), 5, 3), **limits)
    assert_same(drain(engine, asked), known)
    assert engine.counters.num_parked == plain.counters.num_parked
    assert engine.counters.num_steps <= plain.counters.num_steps


def test_tokens_of_one_pass_are_all_of_its_version(versions_of, engine_of, drain, guesses):
    """Each has the log-prob that its version gives it; greedy texts loop, so that guesses hold."""
    versions = versions_of("llama")
    engine = engine_of(versions.policy, speculation=Speculation(NgramProposer(1), 4, 8))
    greedy = Sampling(40, temperature=0)
    asked = [Request(n, PROMPT[:5] * (n + 1), (n,), greedy) for n in range(3)]
    done = drain(engine, asked, before_step=lambda step: versions.publish(engine, step // 3))
    assert engine.counters.num_accepted > 0
    for one in asked:
        tokens = done[one.id, 0].tokens
        assert (np.diff(tokens["version"]) >= 0).all() and tokens["version"][-1] > 1
        np.testing.assert_allclose(
            tokens["logprob"], versions.cached_logprobs(one, tokens), rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("num_pages", [10, 11, 12, 15])
def test_guesses_take_no_pages_from_others(num_pages, model, engine_of, drain, guesses):
    """In a pool that is full, as many are preempted as without guesses, or fewer."""
    policy, _ = model("llama")
    asked = [Request(n, (5 + n, *range(10, 17)), (n,), Sampling(12)) for n in range(3)]
    limits = {"page_size": 2, "kv_cache_tokens": 2 * num_pages, "prefix_cache": False}
    known = drain(engine_of(policy), asked)
    plain = engine_of(policy, **limits)
    drain(plain, asked)
    engine = engine_of(policy, speculation=Speculation(guesses(known), 6, 3), **limits)
    assert_same(drain(engine, asked), known)
    assert engine.counters.num_preemptions <= plain.counters.num_preemptions
    assert engine.counters.max_used_pages <= num_pages


@pytest.mark.parametrize("wrong", [1, 2, 5])
def test_keys_of_rejected_tokens_are_found_by_nobody(wrong, model, engine_of, drain, guesses):
    """A later prompt shares what was sampled, in whole pages, and nothing that was guessed."""
    policy, _ = model("llama")
    first = Request(0, PROMPT[:9], (3,), Sampling(20))
    known = drain(engine_of(policy), [first])
    engine = engine_of(policy, speculation=Speculation(guesses(known, wrong), 7, 9), page_size=4)
    drain(engine, [first])
    sampled = known[0, 0].tokens["id"].tolist()
    for number, tail in enumerate((sampled, [*sampled[:10], *range(70, 80)])):
        again = Request(1 + number, (*first.prompt_ids, *tail), (5,), Sampling(6))
        expected = drain(engine_of(policy), [again])
        before = engine.counters.num_cached_tokens
        proposer = guesses(expected)
        engine._speculation = Speculation(proposer, 7, 9)
        assert_same(drain(engine, [again]), expected)
        # 29 ids, of which the last was never computed; or 19 and a page's end at 16.
        assert engine.counters.num_cached_tokens - before == (28, 16)[number]


def test_exact_numerics_stay_exact(engine_of, drain, guesses):
    """Bit for bit: a row of a verified chunk is the row of a decoded token."""
    policy = make_exact(tiny_policy("qwen3", torch.float32))
    asked = [
        Request(n, tuple(range(5, 12 + 9 * n)), (n, 9), Sampling(30, temperature=0.8))
        for n in range(3)
    ]
    expected = drain(engine_of(policy), asked)
    for wrong in (0, 4):
        engine = engine_of(policy, speculation=Speculation(guesses(expected, wrong), 6, 9))
        done = drain(engine, asked)
        assert engine.counters.num_accepted > 50
        for key, completion in done.items():
            assert completion.tokens.tolist() == expected[key].tokens.tolist()


@pytest.mark.parametrize("wrong", [0, 3])
def test_decoding_in_c_stays_the_same_bit_for_bit(wrong, engine_of, drain, guesses):
    """There, too, a row does not depend on the number of rows."""
    policy = tiny_policy("llama", torch.float32)
    assert make_native(policy) is None
    asked = [Request(n, tuple(range(5, 12 + 9 * n)), (n, 9), Sampling(30)) for n in range(3)]
    expected = drain(engine_of(policy), asked)
    engine = engine_of(policy, speculation=Speculation(guesses(expected, wrong), 6, 9))
    done = drain(engine, asked)
    assert engine.counters.num_accepted > 50
    for key, completion in done.items():
        assert completion.tokens.tolist() == expected[key].tokens.tolist()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    known=st.lists(st.integers(0, 15), min_size=0, max_size=25),
    k=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 1 << 32),
)
def test_any_guess_at_all(known, k, temperature, seed, scripted, engine_of, drain, guesses):
    policy = scripted(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) * 2)
    asked = [Request(0, (1,), (seed,), Sampling(25, temperature=temperature))]
    expected = drain(engine_of(policy), asked)
    proposer = guesses({})
    proposer.known[0, 0] = known
    engine = engine_of(policy, speculation=Speculation(proposer, k, 1))
    assert_same(drain(engine, asked), expected)


def test_the_distribution_at_a_place_is_the_policys(scripted, engine_of, drain, guesses):
    """1500 members; place 1 always has token 3 proposed, which holds with its probability."""
    table = torch.tensor([0.3, 1.0, -0.5, 0.8, 0.0, -1.0]).repeat(6, 1)
    probs = table[0].double().softmax(-1).numpy()
    num = 1500
    seeds = tuple(derive_seed("chi", member) for member in range(num))
    proposer = guesses({})
    proposer.known = {(0, member): [3] * 4 for member in range(num)}
    engine = engine_of(
        scripted(table),
        speculation=Speculation(proposer, 1, num),
        max_running=num,
        kv_cache_tokens=8 * num,
    )
    done = drain(engine, [Request(0, (1,), seeds, Sampling(3))])
    tokens = np.stack([done[0, member].tokens["id"] for member in range(num)])
    for place in range(3):
        counts = np.bincount(tokens[:, place], minlength=6)
        chi_square = ((counts - probs * num) ** 2 / (probs * num)).sum()
        assert chi_square < 20.5  # 5 degrees of freedom; probability 0.001
    logprobs = np.concatenate([c.tokens["logprob"] for c in done.values()])
    expected = np.concatenate([np.log(probs)[c.tokens["id"]] for c in done.values()])
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-6)
    assert engine.counters.num_proposed == num
    share = engine.counters.num_accepted / num
    assert abs(share - probs[3]) < 4 * (probs[3] * (1 - probs[3]) / num) ** 0.5


def test_memory_of_guesses_is_released_with_the_rest(model, engine_of, drain, guesses):
    policy, _ = model("llama")
    proposer = guesses({})
    engine = engine_of(policy, speculation=Speculation(proposer, 2, 4))
    engine.suspend(release=False)
    assert proposer.releases == 0
    engine.suspend(release=True)
    engine.reset()
    assert proposer.releases == 2
