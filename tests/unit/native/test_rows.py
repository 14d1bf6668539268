"""A trainer's parts in C: torch's results, torch's gradients, and bits of the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lagzero.native import kernels
from lagzero.native.sampling import draw
from lagzero.numerics import rows
from lagzero.numerics.exact import Places
from lagzero.numerics.packed import DensePlan
from lagzero.numerics.rows import RowPlan

TYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, least: float = 1) -> None:
    """Within a few roundings of the largest number, or of ``least``."""
    step = 2.0**-20 if dtype == torch.float32 else 2.0**-7
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    gap = (found.float() - wanted.float()).abs().max()
    assert gap < 2 * step * wanted.float().abs().max().clamp(min=least)


def gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of a fixed weighted sum of it."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    out = function(*leaves)
    weights = random(*out.shape, seed=5).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("outputs", [1, 37, 64, 200])
def test_products_and_their_gradients_are_those_of_linear(dtype, outputs):
    parts = random(2, 7, 96, dtype=dtype), random(outputs, 96, dtype=dtype), random(outputs)
    parts = (*parts[:2], parts[2].to(dtype))
    wanted = gradients(F.linear, *parts)
    found = gradients(lambda x, w, b: rows._Multiply.apply(x, w, b, False, kernels.KERNELS), *parts)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)


def test_a_wide_product_is_not_rounded_and_has_the_gradients_of_float32():
    x, w = random(9, 64, dtype=torch.bfloat16), random(50, 64, dtype=torch.bfloat16)
    wanted = gradients(lambda x, w: F.linear(x.float(), w.float()), x, w)
    found = gradients(lambda x, w: rows._Multiply.apply(x, w, None, True, kernels.KERNELS), x, w)
    assert found[0].dtype == torch.float32 and (found[0].bfloat16().float() != found[0]).any()
    close(found[0], wanted[0], torch.float32)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        close(one, other, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms_and_their_gradients_are_those_of_the_module(dtype):
    module = LlamaRMSNorm(48, EPS)

    def plain(x, weight):
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    parts = 3 * random(4, 5, 48, dtype=dtype), random(48, dtype=dtype)
    wanted = gradients(plain, *parts)
    found = gradients(lambda x, w: rows._Normalise.apply(x, w, EPS, kernels.KERNELS), *parts)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gated_activations_and_their_gradients_are_those_of_silu(dtype):
    parts = 3 * random(6, 64, dtype=dtype), random(6, 64, dtype=dtype, seed=1)
    wanted = gradients(lambda gate, up: F.silu(gate) * up, *parts)
    found = gradients(lambda gate, up: rows._Gate.apply(gate, up, kernels.gate, None), *parts)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)


def test_a_gate_far_out_is_right_to_a_rounding():
    gate = torch.cat((torch.linspace(-120, 120, 4000), random(96))).bfloat16()
    found = kernels.gate(gate, torch.ones_like(gate)).double()
    wanted = gate.double() / (1 + (-gate.double()).exp())
    assert ((found - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-35).all()


def both_ways(run, *weights: torch.nn.Parameter) -> list[list[torch.Tensor]]:
    """Return gradients after two passes: from none at first, and from zeros laid out before."""
    found: list[list[torch.Tensor]] = []
    for laid_out in (False, True):
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if laid_out else None
        before = [weight.grad for weight in weights]
        for seed in (1, 2):
            run(seed).backward()
        assert not laid_out or all(w.grad is b for w, b in zip(weights, before, strict=True))
        found.append([weight.grad for weight in weights])
    return found


@pytest.mark.parametrize("padding", [None, 3])
def test_a_table_that_is_also_the_head_gets_both_gradients_in_place(padding):
    embedding = torch.nn.Embedding(50, 32, padding_idx=padding)
    head = torch.nn.Linear(32, 50)
    head.weight = embedding.weight
    ids = torch.tensor([[3, 7, 3, 0], [49, 7, 1, 3]])

    def plain(seed: int) -> torch.Tensor:
        out = head(embedding(ids).relu())
        return (out * random(*out.shape, seed=seed)).sum()

    def ours(seed: int) -> torch.Tensor:
        rows_ = rows.embed_forward(embedding, None, ids)
        out = rows.linear_forward(head, (kernels.KERNELS, False), rows_.relu())
        return (out * random(*out.shape, seed=seed)).sum()

    wanted = both_ways(plain, head.weight, head.bias)[0]
    for found in both_ways(ours, head.weight, head.bias):
        for one, other in zip(found, wanted, strict=True):
            close(one, other, torch.float32)


def test_gradients_of_bfloat16_are_left_to_autograd():
    head = torch.nn.Linear(32, 50, bias=False, dtype=torch.bfloat16)
    head.weight.grad = torch.ones_like(head.weight)
    x = random(4, 32, dtype=torch.bfloat16)
    out = rows.linear_forward(head, (kernels.KERNELS, False), x)
    (given,) = torch.autograd.grad(out.sum(), head.weight)
    assert torch.equal(head.weight.grad, torch.ones_like(given))
    close(given, x.sum(0).expand(50, -1), torch.bfloat16)


# Segments: a prompt of 3, two responses to it, a sequence alone, a prompt of 1 and its response.
SEGMENTS = np.repeat(range(6), [3, 4, 2, 9, 1, 5])
PARENTS = np.array([-1, 0, 0, -1, -1, 4])
POSITIONS = np.concatenate(
    [np.arange(3), 3 + np.arange(4), 3 + np.arange(2), np.arange(9), [0], 1 + np.arange(5)]
)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_and_its_gradients_are_those_of_a_dense_mask(dtype, window):
    facts = POSITIONS, SEGMENTS, PARENTS
    num = len(SEGMENTS)
    parts = [random(num, heads, 16, dtype=dtype, seed=heads) for heads in (6, 2, 2)]
    wide = [each.float() for each in parts]
    dense, plan = DensePlan(*facts, CPU), RowPlan(kernels.KERNELS, *facts, CPU)
    wanted = gradients(lambda q, k, v: dense.attend(0, q, k, v, 0.3, window), *wide)
    found = gradients(lambda q, k, v: plan.attend(0, q, k, v, 0.3, window), *parts)
    for one, other in zip(found, wanted, strict=True):
        # with a window of 1 gradients of scores are differences of equal numbers up to 16
        close(one, other.to(dtype), dtype, least=16 if dtype == torch.float32 else 1)
    with torch.no_grad():
        assert torch.equal(plan.attend(0, *parts, 0.3, window), found[0])


def test_positions_that_are_no_places_in_the_sequence_are_refused():
    with pytest.raises(ValueError, match="positions must count"):
        RowPlan(kernels.KERNELS, POSITIONS + 1, SEGMENTS, PARENTS, CPU)


@given(
    num=st.integers(1, 90),
    outputs=st.integers(1, 90),
    inputs=st.sampled_from([32, 64, 96]),
    dtype=st.sampled_from(TYPES),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_row_has_the_same_bits_among_any_others(
    on_threads, num, outputs, inputs, dtype, threads, seed
):
    rng = np.random.default_rng(seed)
    x = random(num, inputs, dtype=dtype, seed=seed)
    w, b = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)
    some = torch.as_tensor(rng.permutation(num)[: rng.integers(1, num + 1)])
    for function, args in (
        (kernels.multiply, (w, b)),
        (kernels.normalise, (w[0], EPS)),
        (lambda x: kernels.gate(x, x.flip(1)), ()),
    ):
        whole = on_threads(threads, function, x, *args)
        assert torch.equal(function(x[some], *args), whole[some])


@given(st.integers(0, 999), st.sampled_from(TYPES), st.integers(1, 3), st.sampled_from([None, 5]))
@settings(max_examples=30, deadline=None)
def test_a_token_attends_alike_wherever_its_sequence_stands(
    on_threads, seed, dtype, threads, window
):
    """In a row of its own, and behind others as a response to a shared prompt."""
    rng = np.random.default_rng(seed)
    first, prompt, response = rng.integers(1, 40, 3)
    whole = prompt + response
    sequence = [
        random(int(whole), heads, 16, dtype=dtype, seed=seed + heads) for heads in (4, 2, 2)
    ]
    other = [random(int(first), heads, 16, dtype=dtype) for heads in (4, 2, 2)]
    alone = RowPlan(kernels.KERNELS, np.arange(whole), np.zeros(whole, int), np.array([-1]), CPU)
    segments = np.repeat([0, 1, 2], [first, prompt, response])
    positions = np.concatenate([np.arange(first), np.arange(whole)])
    among = RowPlan(kernels.KERNELS, positions, segments, np.array([-1, -1, 1]), CPU)
    joined = [torch.cat(pair) for pair in zip(other, sequence, strict=True)]
    with torch.no_grad():
        expected = alone.attend(0, *sequence, 0.25, window)
        found = on_threads(threads, lambda: among.attend(0, *joined, 0.25, window))
    assert torch.equal(found[first:], expected)


@pytest.mark.parametrize("window", [None, 13, 40])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [16, 80])
def test_a_query_alone_has_the_bits_that_it_has_among_its_neighbours(size, dtype, window):
    """Blocks of keys begin elsewhere for it then."""
    num = 130
    query, key, value = (random(num, n, size, dtype=dtype, seed=n) for n in (6, 2, 2))
    pages, table = (key.unsqueeze(2), value.unsqueeze(2)), torch.arange(num).unsqueeze(0)
    row = Places(torch.arange(num), torch.zeros(num, dtype=torch.long), table)
    together = kernels.attend(query, *pages, row, 0.25, window)
    for at in range(num):
        one = Places(torch.tensor([at]), torch.zeros(1, dtype=torch.long), table)
        alone = kernels.attend(query[at : at + 1], *pages, one, 0.25, window)
        assert torch.equal(alone[0], together[at])


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("shared", "size"), [(1, 16), (2, 48), (3, 64), (4, 80), (7, 32)])
def test_attention_is_that_of_float64_whose_result_is_rounded_once(shared, size, dtype, window):
    """However many heads meet a key together, and whether their last numbers fill a vector."""
    num = 75
    query, key, value = (random(num, n, size, dtype=dtype, seed=n) for n in (2 * shared, 2, 2))
    places = torch.arange(num)
    row = Places(places, torch.zeros(num, dtype=torch.long), places.unsqueeze(0))
    found = kernels.attend(query, key.unsqueeze(2), value.unsqueeze(2), row, 0.25, window)
    keys, values = (each.double().repeat_interleave(shared, 1) for each in (key, value))
    behind = places.unsqueeze(1) - places
    hidden = (behind < 0) | (behind >= (window or num))
    scores = 0.25 * torch.einsum("the,she->hts", query.double(), keys)
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    wanted = torch.einsum("hts,she->the", shares, values)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0
    gap = (found.double() - wanted).abs() - rounding * wanted.abs()
    assert found.dtype == dtype
    assert gap.max() < 2e-6 * value.double().abs().max()  # float32 sums of scores up to 20


@given(
    size=st.sampled_from([1, 9, 256, 300, 1000]),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    seed=st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_a_drawn_token_is_scored_with_the_same_bits(size, temperature, seed):
    logits = 4 * random(12, size, seed=seed)
    if size > 1:
        logits[:, size // 2] = -torch.inf
    uniform = np.random.default_rng(seed).random(12)
    ids, logprobs = draw(logits, [temperature] * 12, uniform)
    found, entropies, normalisers = kernels.score(logits, torch.as_tensor(ids), temperature)
    np.testing.assert_array_equal(found.numpy(), logprobs)
    logp = (logits.double() / temperature).log_softmax(-1)
    want = torch.distributions.Categorical(logits=logp).entropy()
    torch.testing.assert_close(entropies.double(), want, rtol=1e-5, atol=1e-5)
    want = (logits.double() / temperature).logsumexp(-1)
    torch.testing.assert_close(normalisers.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_numbers_scores_nan(bad):
    logits = torch.zeros(3, 40)
    logits[1, 7] = bad
    for found in kernels.score(logits, torch.zeros(3, dtype=torch.long), 1.0):
        assert found.isnan().tolist() == [False, True, False]
