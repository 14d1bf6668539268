"""Draws follow the distribution, and the log-prob is of the distribution that was drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.engine.request import Sampling
from lagzero.engine.sampler import inverse_cdf, sample, truncate, uniforms
from lagzero.errors import LagzeroError

U64 = np.uint64
LOG_HALVES = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draw(logits, uniform, **sampling):
    """Sample one row at one uniform number."""
    row = torch.as_tensor(logits, dtype=torch.float32).unsqueeze(0)
    ids, logprobs = sample(row, [Sampling(1, **sampling)], np.array([uniform]))
    return ids[0], logprobs[0]


def kept(probs, **sampling) -> list[int]:
    """Ids that truncation leaves."""
    logits = torch.as_tensor(probs, dtype=torch.float32).log().unsqueeze(0)
    return torch.isfinite(truncate(logits, [Sampling(1, **sampling)])[0]).nonzero()[:, 0].tolist()


def test_logprob_is_after_temperature():
    """LP1: softmax of [2, 1, 0] / 0.5; raw would be -0.4076, raw / T -0.8152."""
    assert draw([2, 1, 0], 0.3, temperature=0.5) == (0, pytest.approx(-0.1429, abs=5e-5))


def test_truncation_renormalises():
    """LP2: 0.3 / 0.8; what the full vocabulary would say is log 0.3 = -1.204."""
    assert draw(LOG_HALVES, 0.9, top_p=0.8) == (1, pytest.approx(math.log(0.375), abs=1e-5))
    assert math.log(0.375) == pytest.approx(-0.9808, abs=5e-5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(-12, 4), min_size=2, max_size=40),
    uniform=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([1e-9, 0.25, 0.5, 0.8, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_every_draw_is_of_a_kept_token_and_finite(
    values, uniform, temperature, top_p, top_k, min_p
):
    """LP2: integer logits put many tokens right at the boundaries; never -inf, never NaN."""
    truncation = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    token, logprob = draw(values, uniform, temperature=temperature, **truncation)
    probs = (torch.tensor(values, dtype=torch.float32) / temperature).softmax(-1)
    allowed = kept(probs, **truncation)
    assert token in allowed
    expected = math.log(float(probs[token].double() / probs[allowed].double().sum()))
    assert logprob == pytest.approx(expected, abs=2e-4)
    assert math.isfinite(logprob)
    assert logprob <= 0


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),  # already reached by the first
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.8}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.29}, [0, 1, 2]),  # 0.15 >= 0.29 * 0.5 > 0.05
        ({"min_p": 0.59}, [0, 1]),
        ({"top_k": 3, "top_p": 0.84}, [0, 1]),  # 0.8 / 0.95 >= 0.84
        ({"top_k": 2, "min_p": 0.7}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # 0.5 / 0.8 >= 0.6: the mass is of what top_k left
    ],
)
def test_truncation_by_hand(sampling, expected):
    assert kept([0.5, 0.3, 0.15, 0.05], **sampling) == expected


def test_truncation_is_by_rank_and_rows_do_not_mix():
    logits = torch.stack([LOG_HALVES.flip(0), LOG_HALVES, LOG_HALVES])
    settings_ = [Sampling(1, top_k=1), Sampling(1, top_p=0.8), Sampling(1)]
    finite = torch.isfinite(truncate(logits, settings_))
    assert finite.tolist() == [[False] * 3 + [True], [True, True, False, False], [True] * 4]


def test_rows_of_a_batch_keep_their_own_settings():
    """Truncated, greedy, cold and plain rows beside each other."""
    row = LOG_HALVES
    ids, logprobs = sample(
        row.repeat(4, 1),
        [Sampling(1, top_k=1), Sampling(1, 0.0), Sampling(1, 0.5), Sampling(1)],
        np.array([0.99, 0.99, 0.99, 0.99]),
    )
    assert ids == [0, 0, 2, 3]
    cold = 0.15**2 / (0.25 + 0.09 + 0.0225 + 0.0025)
    expected = [0.0, math.log(0.5), math.log(cold), math.log(0.05)]
    assert logprobs == pytest.approx(expected, abs=1e-5)


def test_the_caller_keeps_its_logits():
    logits = LOG_HALVES.repeat(2, 1)
    before = logits.clone()
    sample(logits, [Sampling(1, top_k=1), Sampling(1, 0.7)], np.array([0.1, 0.2]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [3, 255, 256, 257, 300, 1000])
def test_frequencies_follow_the_distribution(size):
    """Chi-square over 20000 draws; a third of the tokens are impossible and never drawn."""
    generator = torch.Generator().manual_seed(size)
    probs = torch.rand(size, generator=generator) ** 3
    probs[torch.rand(size, generator=generator) < 0.3] = 0
    probs[[0, size // 2]] += 0.1
    probs = (probs / probs.sum()).unsqueeze(0)
    num = 20000
    at = torch.as_tensor(uniforms(np.full(num, 5, U64), np.arange(num, dtype=U64)))
    counts = torch.bincount(inverse_cdf(probs.expand(num, -1), at), minlength=size).numpy()
    expected = num * probs[0].double().numpy()
    assert len(counts) == size
    assert counts[expected == 0].sum() == 0
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    ideal = np.append(expected[large], expected[~large].sum())
    observed, ideal = observed[ideal > 0], ideal[ideal > 0]
    freedom = len(ideal) - 1
    # Of mean `freedom` and variance twice that; the bound is passed by chance in about 1 of 1000.
    assert ((observed - ideal) ** 2 / ideal).sum() < freedom + 3.3 * (2 * freedom) ** 0.5 + 5


def slow_inverse_cdf(probs: torch.Tensor, uniform: float) -> int:
    cumulative = np.cumsum(probs.double().numpy())
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([1, 2, 255, 256, 257, 511, 700]),
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.2, 1.0]), min_size=1, max_size=30),
    where=st.integers(0, 10**6),
    uniform=st.one_of(
        st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2.0**-53, 2.0**-53])
    ),
)
def test_impossible_tokens_are_never_drawn(size, weights, where, uniform):
    probs = torch.zeros(size)
    for n, weight in enumerate(weights):
        probs[(where + 37 * n * n) % size] = weight
    if not probs.any():
        probs[where % size] = 1.0
    probs /= probs.sum()
    token = int(inverse_cdf(probs.unsqueeze(0), torch.tensor([uniform], dtype=torch.float64))[0])
    assert 0 <= token < size
    assert probs[token] > 0
    slow = slow_inverse_cdf(probs, uniform)
    if slow != token:  # at a token's edge, an fp32 sum over a block may round the other way
        cumulative = probs.double().cumsum(0)
        edge = float(cumulative[min(slow, token)])
        assert abs(edge - uniform * float(cumulative[-1])) < 1e-6


def splitmix64(seed: int, counter: int) -> float:
    """The same in Python's own integers."""
    mask = (1 << 64) - 1
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return (z >> 11) / (1 << 53)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**64 - 1), counter=st.integers(0, 2**40))
def test_uniforms_are_splitmix64(seed, counter):
    (number,) = uniforms(np.array([seed], U64), np.array([counter], U64))
    assert number == splitmix64(seed, counter)
    assert 0 <= number < 1


def test_splitmix64_by_its_published_first_outputs():
    """Seed 1234567: 6457827717110365317, 3203168211198807973, as other implementations give."""
    numbers = uniforms(np.full(2, 1234567, U64), np.arange(2, dtype=U64))
    published = [6457827717110365317, 3203168211198807973]
    assert numbers.tolist() == [(x >> 11) / (1 << 53) for x in published]


@pytest.mark.parametrize("along", ["seeds", "counters"])
def test_uniforms_are_uniform(along):
    """Along one stream, and across the streams of neighbouring seeds."""
    walk = np.arange(20000, dtype=U64)
    fixed = np.full(20000, 3, U64)
    numbers = uniforms(walk, fixed) if along == "seeds" else uniforms(fixed, walk)
    ranks = np.arange(20000) / 20000
    # Kolmogorov and Smirnov's statistic passes 1.95 / sqrt(n) by chance in 1 of 1000.
    assert np.abs(np.sort(numbers) - ranks).max() < 1.95 / 20000**0.5
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    assert len(set(numbers.tolist())) == 20000


def test_greedy_takes_the_first_of_equals_and_reports_the_untempered_logprob():
    assert draw([1.0, 3.0, 3.0, 2.0], 0.99, temperature=0) == (1, pytest.approx(-0.9176, abs=1e-4))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"top_p": 0.9}, {"temperature": 2.0}])
def test_non_finite_logits_raise_and_name_the_row(value, size, sampling):
    logits = torch.zeros(3, size)
    logits[1, size - 1] = value
    with pytest.raises(FloatingPointError, match="row 1 of 3"):
        sample(logits, [Sampling(1, **sampling)] * 3, np.array([0.1, 0.2, 0.3]))


def test_a_row_of_minus_infinity_raises():
    with pytest.raises(FloatingPointError, match="row 0 of 1"):
        draw([-math.inf] * 3, 0.5)


def test_non_finite_logits_are_an_error_that_says_what_to_change():
    with pytest.raises(LagzeroError, match=r"model\.dtype .* lower train\.optimizer\.lr"):
        draw([math.nan] * 3, 0.5)


def test_forbidden_tokens_are_allowed_in_logits():
    assert draw([-math.inf, 0.0, -math.inf], 0.5) == (1, 0.0)


def test_half_precision_logits_are_sampled_in_fp32():
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    ids, logprobs = sample(logits, [Sampling(1, 0.5)], np.array([0.3]))
    assert (ids, logprobs) == ([0], [pytest.approx(-0.142932, abs=1e-6)])
