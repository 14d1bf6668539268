"""Triton kernels: torch's results and gradients, and bits of the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton", reason="Triton comes for Linux only")

from lagzero.numerics import rows
from lagzero.numerics.exact import Places
from lagzero.numerics.packed import DensePlan
from lagzero.numerics.rows import RowPlan
from lagzero.tiles import kernels
from lagzero.train.logprobs import whole_logprobs

TYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
# Segments: a prompt of 3, two responses to it, a sequence alone, of more than one block of keys.
SEGMENTS = np.repeat(range(4), [3, 4, 2, 70])
PARENTS = np.array([-1, 0, 0, -1])
POSITIONS = np.concatenate([np.arange(3), 3 + np.arange(4), 3 + np.arange(2), np.arange(70)])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the largest number, or of 1."""
    step = 2.0**-20 if dtype == torch.float32 else 2.0**-7
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    gap = (found.cpu().float() - wanted.cpu().float()).abs().max()
    assert gap < 2 * step * wanted.float().abs().max().clamp(min=1).cpu()


def gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of a fixed weighted sum of it."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    out = function(*leaves)
    weights = random(*out.shape, seed=5).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("outputs", [1, 70])
def test_products_and_their_gradients_are_those_of_linear(device, dtype, outputs):
    parts = random(2, 35, 40, dtype=dtype), random(outputs, 40, dtype=dtype), random(outputs)
    parts = [each.to(device, dtype) for each in parts]
    wanted = gradients(F.linear, *parts)
    found = gradients(lambda x, w, b: rows._Multiply.apply(x, w, b, False, kernels.KERNELS), *parts)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)


def test_a_wide_product_is_not_rounded(device):
    x, w = (random(n, 64, dtype=torch.bfloat16).to(device) for n in (9, 50))
    found = kernels.multiply(x, w, None, wide=True)
    assert found.dtype == torch.float32 and (found.bfloat16().float() != found).any()
    close(found, F.linear(x.float(), w.float()), torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms_and_their_gradients_are_those_of_the_module(device, dtype):
    module = LlamaRMSNorm(48, EPS)

    def plain(x, weight):
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    parts = [3 * random(4, 5, 48, dtype=dtype).to(device), random(48, dtype=dtype).to(device)]
    wanted = gradients(plain, *parts)
    found = gradients(lambda x, w: rows._Normalise.apply(x, w, EPS, kernels.KERNELS), *parts)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("window", [None, 1, 66])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_and_its_gradients_are_those_of_a_dense_mask(device, dtype, window):
    facts, num = (POSITIONS, SEGMENTS, PARENTS), len(SEGMENTS)
    parts = [random(num, n, 12, dtype=dtype, seed=n).to(device) for n in (6, 2, 2)]
    dense, plan = DensePlan(*facts, device), RowPlan(kernels.KERNELS, *facts, device)
    wide = [each.float() for each in parts]
    wanted = gradients(lambda q, k, v: dense.attend(0, q, k, v, 0.3, window), *wide)
    found = gradients(lambda q, k, v: plan.attend(0, q, k, v, 0.3, window), *parts)
    for one, other in zip(found, wanted, strict=True):
        close(one, other.to(dtype), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others(device, dtype):
    rng = np.random.default_rng(3)
    x, w = random(150, 40, dtype=dtype).to(device), random(70, 40, dtype=dtype).to(device)
    logits, targets = random(150, 1500).to(device), torch.arange(150, device=device)
    product, norm = kernels.multiply(x, w, w[:, 0]), kernels.normalise(x, w[0], EPS)
    scores = kernels.score(logits, targets, 0.8)
    for size in (1, 65, 149):
        some = torch.as_tensor(rng.permutation(150)[:size]).to(device)
        assert torch.equal(kernels.multiply(x[some], w, w[:, 0]), product[some])
        assert torch.equal(kernels.normalise(x[some], w[0], EPS), norm[some])
        for one, other in zip(kernels.score(logits[some], targets[some], 0.8), scores, strict=True):
            assert torch.equal(one, other[some])


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_attends_alike_in_pages_of_any_size_whatever_lies_in_the_rest(
    device, dtype, window
):
    length, picked = 130, [0, 1, 63, 64, 65, 127, 129]
    query, key, value = (random(length, n, 16, dtype=dtype, seed=n).to(device) for n in (4, 2, 2))
    places = Places(
        torch.arange(length, device=device),
        torch.zeros(length, dtype=torch.long, device=device),
        torch.arange(length, device=device).unsqueeze(0),
    )
    whole = kernels.attend(query, key.unsqueeze(2), value.unsqueeze(2), places, 0.4, window)
    rng = np.random.default_rng(4)
    for page in (3, 16, 64):
        num = -(-length // page)
        order = torch.as_tensor(rng.permutation(num + 2)[:num]).to(device)
        caches = [
            torch.full((num + 2, 2, page, 16), torch.nan, dtype=dtype, device=device)
            for _ in range(2)
        ]
        for cache, rows_ in zip(caches, (key, value), strict=True):
            for at in range(length):
                cache[order[at // page], :, at % page] = rows_[at]
        at = torch.tensor(picked, device=device)
        some = Places(at, torch.zeros_like(at), order.unsqueeze(0))
        assert torch.equal(kernels.attend(query[at], *caches, some, 0.4, window), whole[at])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_are_those_of_softmax(device, temperature):
    logits, targets = 4 * random(5, 2100), torch.tensor([0, 7, 1023, 1024, 2099])
    logits[1, 3], logits[2, :2000] = -torch.inf, -torch.inf
    logits[2, 1023] = 0.0
    found = kernels.score(logits.to(device), targets.to(device), temperature)
    wide = logits.double().clamp(min=-1e4)  # 0 times infinity
    wanted = whole_logprobs(wide, lambda x: x, targets, temperature, 1)
    for one, other in zip(found, wanted, strict=False):
        assert (one.cpu().double() - other).abs().max() < 5e-6  # two roundings near 30
    assert (found[2].cpu() - (wide / temperature).logsumexp(-1)).abs().max() < 5e-6


def test_logits_that_are_no_numbers_have_no_log_prob(device):
    logits = random(3, 100)
    logits[0, 5], logits[1, 6], logits[2] = torch.nan, torch.inf, -torch.inf
    for each in kernels.score(logits.to(device), torch.zeros(3, dtype=torch.long).to(device), 1.0):
        assert each.isnan().all()
