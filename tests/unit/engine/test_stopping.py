"""When a sequence ends, which ids it keeps, and what its text is."""

from __future__ import annotations

import math

import pytest

from lagzero.engine.request import Request, Sampling
from lagzero.errors import LagzeroError
from lagzero.types import Finish

TEXTS = ["?", "A", "EN", "D!", "x", "y", "z"]


def play(make, drain, scripted, decoder, sampling: Sampling, prompt=(0,), context_limit=1 << 20):
    """Sample greedily along 0, 1, 2, ... and return the completion."""
    engine = make(scripted.chain(context_limit=context_limit), decoder)
    return drain(engine, [Request(0, prompt, (0,), sampling)])[0, 0]


@pytest.mark.parametrize(("include", "text"), [(True, "AEND"), (False, "A")])
def test_a_stop_string_ends_ids_and_logprobs_at_the_token_that_completes_it(
    include, text, engine_of, drain, scripted, words
):
    """EN1: the ids keep that token, whatever else it holds; the text follows include_stop."""
    sampling = Sampling(10, 0, stop_strings=("END",), include_stop=include)
    done = play(engine_of, drain, scripted, words(TEXTS), sampling)
    assert done.tokens["id"].tolist() == [1, 2, 3]
    assert len(done.tokens["logprob"]) == 3
    assert done.tokens["logprob"] == pytest.approx([-0.1403] * 3, abs=1e-3)
    assert (done.text, done.finish) == (text, Finish.STOP)


@pytest.mark.parametrize(
    ("texts", "stops", "num", "full", "bare"),
    [
        (["?", "a", "b", "c", "d", "e"], ("bcde",), 5, "abcde", "a"),  # over many tokens
        (["?", "ab##cd", "x"], ("##",), 1, "ab##", "ab"),  # inside one token
        (["?", "a", "\n", "\nb", "x"], ("\n\n",), 3, "a\n\n", "a"),
        (["?", "x", "yz", "w"], ("zw", "yz", "z"), 2, "xyz", "x"),  # several: ends first
        (["?", "1", "2", "3"], ("3", "2"), 2, "12", "1"),
        (["?", "é"[:1], "日", "本", "x"], ("日本",), 3, "é日本", "é"),
        (
            ["?", b"\xf0\x9f", b"\x9a", b"\x80", "x"],
            ("🚀",),
            3,
            "🚀",
            "",
        ),  # one character, 3 tokens
        (["?", "a", b"\xe2", b"\x86", b"\x92!", "x"], ("→",), 4, "a→", "a"),
    ],
)
def test_stop_strings_are_found_wherever_tokens_cut_them(
    texts, stops, num, full, bare, engine_of, drain, scripted, words
):
    """EN1."""
    for include, expected in ((True, full), (False, bare)):
        sampling = Sampling(9, 0, stop_strings=stops, include_stop=include)
        done = play(engine_of, drain, scripted, words(texts), sampling)
        assert len(done.tokens) == num
        assert (done.text, done.finish) == (expected, Finish.STOP)


def test_a_stop_string_of_single_byte_tokens_is_found_after_a_long_text(
    engine_of, drain, scripted, words
):
    """The tail that is searched is long enough when each byte of the stop string is a token."""
    stop = "🚀" * 3
    texts = ["?", *["pad"] * 40, *[bytes([b]) for b in stop.encode()], "x"]
    sampling = Sampling(90, 0, stop_strings=(stop,), include_stop=False)
    engine = engine_of(scripted.chain(size=len(texts)), words(texts))
    done = drain(engine, [Request(0, (0,), (0,), sampling)])[0, 0]
    assert len(done.tokens) == 40 + 12
    assert done.text == "pad" * 40


def test_the_prompt_is_no_part_of_a_stop_string(engine_of, drain, scripted, words):
    sampling = Sampling(4, 0, stop_strings=("AEN",))
    done = play(engine_of, drain, scripted, words(TEXTS), sampling, prompt=(0, 1))
    assert done.tokens["id"].tolist() == [2, 3, 4, 5]
    assert done.finish is Finish.LENGTH


def test_a_sampled_end_token_is_kept_with_its_logprob(engine_of, drain, scripted, words):
    """LP4: it is the last token, trained, with what the policy said; the text is without it."""
    policy = scripted.chain()
    sampling = Sampling(9, 0, stop_ids=frozenset({3, 9}))
    done = play(engine_of, drain, scripted, words(TEXTS, special={3}), sampling)
    assert done.tokens["id"].tolist() == [1, 2, 3]
    expected = float(policy.table[2].log_softmax(-1)[3])
    assert done.tokens["logprob"][-1] == pytest.approx(expected, abs=1e-6)
    assert done.tokens["trained"].all()
    assert (done.text, done.finish) == ("AEN", Finish.STOP)


def test_an_improbable_end_token_keeps_its_low_logprob(engine_of, drain, scripted, words):
    """LP4: -4.6 is reported as -4.6, not as the 0 of an end token added afterwards."""
    table = scripted.chain().table
    table[2] = math.log(0.99 / 15)
    table[2, 9] = math.log(0.01)
    engine = engine_of(scripted(table), words(TEXTS))
    sampling = Sampling(3, stop_ids=frozenset({9}))
    requests = [Request(n, (2,), (n,), sampling) for n in range(600)]
    ended = [c for c in drain(engine, requests).values() if c.tokens["id"][0] == 9]
    assert ended
    for done in ended:
        assert done.finish is Finish.STOP
        assert done.tokens["logprob"].tolist() == pytest.approx([math.log(0.01)], abs=1e-5)


def test_without_an_end_the_length_is_the_limit(engine_of, drain, scripted, words):
    """LP8: nothing is found by searching for an end token."""
    done = play(engine_of, drain, scripted, words(TEXTS), Sampling(3, 0))
    assert (len(done.tokens), done.finish, done.text) == (3, Finish.LENGTH, "AEND!")


@pytest.mark.parametrize(("length", "num"), [(62, 2), (63, 1), (64, 0), (65, 0)])
def test_prompts_at_the_context_limit_are_cut_and_not_dropped(
    length, num, engine_of, drain, scripted, words
):
    """EN6: context 64."""
    engine = engine_of(scripted.chain(context_limit=64), words(TEXTS), version=2)
    done = drain(engine, [Request(0, (1,) * length, (0, 1), Sampling(10))])
    for member in range(2):
        assert len(done[0, member].tokens) == num
        assert (done[0, member].finish, done[0, member].version) == (Finish.CONTEXT, 2)


def test_a_prompt_over_the_limits_needs_no_cache(engine_of, drain, scripted, words):
    """EN6: what ends before it starts is no error, however small the KV cache."""
    engine = engine_of(scripted.chain(context_limit=64), words(TEXTS), kv_cache_tokens=16)
    long = Request(0, (1,) * 65, (0,), Sampling(10))
    none = Request(1, (1,) * 30, (0,), Sampling(0))
    done = drain(engine, [long, none])
    assert [done[n, 0].finish for n in range(2)] == [Finish.CONTEXT, Finish.LENGTH]


@pytest.mark.parametrize(("limit", "num"), [(0, 0), (1, 1)])
def test_completions_of_no_and_of_one_token(limit, num, engine_of, drain, scripted, words):
    """RF6."""
    done = play(engine_of, drain, scripted, words(TEXTS), Sampling(limit, 0))
    assert (len(done.tokens), done.finish) == (num, Finish.LENGTH)
    assert done.text == "A"[:num]


def test_a_completion_of_an_end_token_alone(engine_of, drain, scripted, words):
    """RF6."""
    sampling = Sampling(5, 0, stop_ids=frozenset({1}))
    done = play(engine_of, drain, scripted, words(TEXTS, special={1}), sampling)
    assert done.tokens["id"].tolist() == [1]
    assert (done.text, done.finish) == ("", Finish.STOP)


def test_an_end_token_goes_before_the_limit(engine_of, drain, scripted, words):
    sampling = Sampling(1, 0, stop_ids=frozenset({1}))
    assert play(engine_of, drain, scripted, words(TEXTS), sampling).finish is Finish.STOP


def test_what_cannot_fit_is_refused_with_a_remedy(engine_of, scripted, words):
    engine = engine_of(scripted.chain(), words(TEXTS), kv_cache_tokens=64)
    with pytest.raises(LagzeroError, match=r"may grow to 65 tokens.*raise engine.kv_cache_tokens"):
        engine.add(Request(5, (1,) * 40, (0,), Sampling(25)))
    with pytest.raises(LagzeroError, match="request 6: the prompt has no tokens"):
        engine.add(Request(6, (), (0,), Sampling(25)))
    assert not engine.has_work
    engine.add(Request(7, (1,) * 40, (0,), Sampling(24)))
