"""Drawing in C is drawing by its definition: inverse CDF in float64, log-prob of what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.engine.request import Sampling
from lagzero.engine.sampler import NonFiniteLogits, sample
from lagzero.native.sampling import draw


def by_definition(
    logits: np.ndarray, temperature: float, uniform: float
) -> tuple[int, float, float]:
    """Token, log-prob, and how far the uniform number is from the token's nearest end."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if temperature == 0:
        token = int(logits.argmax())
        return token, float(np.log(probs[token])), 1.0
    ends = probs.cumsum()
    token = int((ends > uniform).argmax()) if ends[-1] > uniform else int(np.flatnonzero(probs)[-1])
    start = ends[token - 1] if token else 0.0
    margin = min(abs(uniform - start) or 1.0, abs(ends[token] - uniform))
    return token, float(np.log(probs[token])), margin


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([1, 7, 8, 255, 256, 257, 1000, 2048]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 40.0]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    seed=st.integers(0, 10**6),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_tokens_and_logprobs_are_those_of_the_definition(size, spread, temperature, seed, uniform):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    logits[rng.random(size) < 0.1] = -np.inf
    if not np.isfinite(logits).any():
        logits[0] = 0
    ids, logprobs = draw(torch.tensor(logits)[None], [temperature], np.array([uniform]))
    token, logprob, margin = by_definition(logits, temperature, uniform)
    if margin > 1e-5:
        assert ids[0] == token
        assert logprobs[0] == pytest.approx(logprob, abs=2e-5)
    assert logits[ids[0]] > -np.inf


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_tokens_without_probability_are_never_drawn(uniform):
    """Runs of them fill whole parts at both ends, where rounding would end up."""
    logits = torch.full((1, 1500), -torch.inf)
    logits[0, [600, 601]] = torch.tensor([0.0, 1e-3])
    ids, _ = draw(logits, [1.0], np.array([uniform]))
    assert ids[0] in (600, 601)


def test_shares_of_draws_are_the_probabilities():
    """Evenly spaced uniform numbers hit each token as often as its probability says, +-1."""
    probs = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05])
    num = 2000
    ids, logprobs = draw(probs.log().repeat(num, 1), [1.0] * num, (np.arange(num) + 0.5) / num)
    assert np.abs(np.bincount(ids, minlength=5) - num * probs.numpy()).max() <= 1
    np.testing.assert_allclose(logprobs, probs.log().numpy()[ids], atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(size=st.sampled_from([1, 9, 256, 263, 1000]), seed=st.integers(0, 999))
def test_rounded_logits_are_drawn_from_as_they_are(size, seed):
    """Of bfloat16: the tokens and the bits of the same numbers in float32."""
    logits = (4 * torch.randn(6, size, generator=torch.Generator().manual_seed(seed))).bfloat16()
    temperatures, uniform = [0.0, 0.5, 1.0, 1.3, 1.0, 0.7], np.random.default_rng(seed).random(6)
    for one, other in zip(
        draw(logits, temperatures, uniform),
        draw(logits.float(), temperatures, uniform),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_cannot_be_drawn_is_named(bad):
    logits = torch.zeros(5, 300)
    logits[3, 299] = bad
    with pytest.raises(NonFiniteLogits, match="row 3 of 5"):
        sample(logits, [Sampling(1)] * 5, np.zeros(5), native=True)
    logits[3] = -torch.inf
    with pytest.raises(NonFiniteLogits, match="row 3 of 5"):
        sample(logits, [Sampling(1, temperature=0.0)] * 5, np.zeros(5), native=True)


def test_a_row_does_not_depend_on_its_neighbours_and_truncated_ones_are_left_to_torch():
    torch.manual_seed(0)
    logits, uniform = torch.randn(6, 777) * 3, np.linspace(0.05, 0.95, 6)
    sampling = [Sampling(1, temperature=t) for t in (0.0, 0.5, 1.0, 1.3)]
    sampling += [Sampling(1, top_k=3), Sampling(1, temperature=0.0, top_p=0.5)]
    together = sample(logits, sampling, uniform, native=True)
    for row in range(6):
        at = slice(row, row + 1)
        alone = sample(logits[at], sampling[at], uniform[at], native=True)
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])
    torch_ids, torch_logprobs = sample(logits, sampling, uniform)
    assert together[0] == torch_ids
    np.testing.assert_allclose(together[1], torch_logprobs, atol=1e-5)
    assert together[1][4] == torch_logprobs[4]
