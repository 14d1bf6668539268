"""Products of 16-bit integers: their error, their bits, and what must never overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.native import kernels
from lagzero.numerics.exact import Places

TYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def steps_of(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise [K] as the library is said to: integers, and a step for each 256 of them."""
    integers, steps = np.zeros(len(row), np.int64), []
    for start in range(0, len(row), 256):
        part = row[start : start + 256].astype(np.float64)
        largest = np.abs(part).max()
        norm = np.linalg.norm(part)
        step = max(largest / 32767, norm / 46300) if largest else 1.0
        integers[start : start + 256] = np.rint(part / step)
        steps.append(step)
    return integers, np.array(steps)


def twin(inputs: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """Multiply chunk by chunk in 64-bit integers; refuse sums that 32 bits could not hold."""
    out = np.zeros((len(inputs), len(weight)))
    rows = [[steps_of(row.float().numpy()) for row in each] for each in (inputs, weight)]
    for t, (x, x_steps) in enumerate(rows[0]):
        for m, (w, w_steps) in enumerate(rows[1]):
            for c in range(len(x_steps)):
                part = slice(256 * c, 256 * (c + 1))
                assert np.abs(x[part] * w[part]).sum() < 2**31
                out[t, m] += (x[part] @ w[part]) * x_steps[c] * w_steps[c]
    return out


@pytest.mark.parametrize("size", [32, 256, 288, 608])
@pytest.mark.parametrize("outputs", [1, 15, 33])
def test_a_product_is_that_of_its_slow_twin(size, outputs):
    """Up to a few numbers that float32 and float64 round to different integers."""
    inputs, weight = (
        random(5, size) * torch.tensor([[1e-4], [1], [30], [1e6], [0]]),
        random(outputs, size, seed=1),
    )
    found, wanted = kernels.multiply_int16(inputs, weight, None).numpy(), twin(inputs, weight)
    scale = inputs.norm(dim=1).numpy()[:, None] * weight.norm(dim=1).numpy()
    assert (np.abs(found - wanted) <= 2e-5 * scale).all()
    assert np.median(np.abs(found - wanted)[:4] / scale[:4]) < 1e-6
    assert (found[4] == 0).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bias_and_rounding_are_those_of_a_linear_layer(dtype):
    inputs, weight, bias = random(7, 96).to(dtype), random(37, 96).to(dtype), random(37).to(dtype)
    found = kernels.multiply_int16(inputs, weight, bias)
    wanted = torch.nn.functional.linear(inputs, weight, bias)
    assert found.dtype == dtype
    assert (found - wanted).abs().max() < (5e-3 if dtype == torch.float32 else 0.3)
    wide = kernels.multiply_int16(inputs, weight, bias, wide=True)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), found)


@pytest.mark.parametrize("size", [256, 512])
def test_sums_of_the_largest_integers_fit(size):
    """Equal numbers have the largest sum of squares, one large number the largest integer."""
    equal, lone = torch.full((size,), 3.0), torch.zeros(size)
    lone[5], signs = 1e4, torch.where(torch.arange(size) % 2 == 0, 1.0, -1.0)
    rows = torch.stack([equal, -equal, lone, equal * signs, lone + 1e-3])
    wanted = (rows.double() @ rows.double().t()).float()
    found = kernels.multiply_int16(rows, rows, None)
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    for row in rows:
        one = kernels.multiply_int16(row[None], row[None], None)
        assert one.item() == pytest.approx(float(row.double() @ row.double()), rel=5e-4)


@given(
    st.integers(0, 10_000),
    st.sampled_from([32, 96, 256, 320]),
    st.integers(-60, 30),
    st.floats(0, 6),
)
@settings(max_examples=40, deadline=None)
def test_its_error_is_small_beside_the_norms(seed, size, exponent, spread):
    """Numbers of any size, and of very different sizes within a row."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, 9, size, generator=generator, dtype=torch.float64)
    rows = draw * torch.exp(spread * torch.randn(2, 1, size, generator=generator).double())
    rows = (rows * 2.0**exponent).float()
    assert rows.isfinite().all()
    found = kernels.multiply_int16(rows[0], rows[1], None).double()
    wanted = rows[0].double() @ rows[1].double().t()
    norms = rows[0].double().norm(dim=1)[:, None] * rows[1].double().norm(dim=1)
    # Rounding moves each number by half a step; a step is norm / 46300 or largest / 32767.
    bound = 2 * 0.5 * (size**0.5) * (1 / 32767 + 1 / 46300) + 1e-5
    assert ((found - wanted).abs() <= bound * norms).all()


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_so_in_its_row_alone(what):
    inputs, weight = random(4, 64), random(40, 64)
    inputs[2, 17], weight[33, 5] = what, what
    found = kernels.multiply_int16(inputs, weight, None)
    assert found[2].isnan().all() and found[:, 33].isnan().all()
    kept = [0, 1, 3]
    clean = kernels.multiply_int16(random(4, 64)[kept], random(40, 64), None)
    others = [m for m in range(40) if m != 33]
    assert torch.equal(found[kept][:, others], clean[:, others])


@given(st.integers(0, 10_000), st.integers(1, 200), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_a_row_has_the_same_bits_among_any_others(seed, num, threads):
    generator = torch.Generator().manual_seed(seed)
    inputs, weight = (torch.randn(n, 352, generator=generator) for n in (200, 70))
    chosen = torch.randperm(200, generator=generator)[:num]
    whole, before = kernels.multiply_int16(inputs, weight, None), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        some = kernels.multiply_int16(inputs[chosen], weight, None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(some, whole[chosen])


def test_packing_again_takes_the_same_memory_and_forgets_the_old_weight():
    first, second = random(50, 64), random(50, 64, seed=9)
    packed = kernels.pack(first)
    again = kernels.pack(second, packed)
    fresh = kernels.pack(second)
    assert again.numbers.data_ptr() == packed.numbers.data_ptr()
    num = 48 * 64  # whole groups of rows; those filled up differ with the machine
    assert torch.equal(again.numbers[:num], fresh.numbers[:num])


def attention(page_size: int, query, key, value, attend, window=None):
    """Attend to keys [T, G, E] of one sequence, laid out in pages in a scrambled order."""
    num, groups, size = key.shape
    pages = -(-num // page_size)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(page_size))
    laid = torch.full((2, pages, groups, page_size, size), 7.0)
    for which, each in enumerate((key, value)):
        for at in range(num):
            laid[which, order[at // page_size], :, at % page_size] = each[at]
    places = Places(torch.arange(num), torch.zeros(num, dtype=torch.long), order.unsqueeze(0))
    return attend(query, laid[0], laid[1], places, 0.2, window)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_is_that_of_float32_and_of_any_pages(heads, window):
    query, key, value = random(70, heads, 64), random(70, 2, 64), random(70, 2, 64, seed=3)
    plain = attention(16, query, key, value, kernels.attend, window)
    found = attention(16, query, key, value, kernels.attend_int16, window)
    assert 0 < (found - plain).abs().max() < 1e-3
    for page_size in (1, 5, 32, 128):
        other = attention(page_size, query, key, value, kernels.attend_int16, window)
        assert torch.equal(found, other)


def test_the_last_token_attends_alike_alone_and_with_the_others():
    query, key, value = random(70, 6, 32), random(70, 2, 32), random(70, 2, 32, seed=3)
    whole = attention(8, query, key, value, kernels.attend_int16)
    pages = [in_pages(each, 8) for each in (key, value)]
    places = Places(torch.tensor([69]), torch.tensor([0]), torch.arange(9).unsqueeze(0))
    alone = kernels.attend_int16(query[69:], *pages, places, 0.2, None)
    assert torch.equal(alone[0], whole[69])


def in_pages(rows: torch.Tensor, size: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % size))
    return padded.view(-1, size, *rows.shape[1:]).transpose(1, 2)


def test_a_cache_of_integers_takes_two_numbers_more_a_token():
    assert kernels.cache_shape(torch.int16, 3, 2, 8, 64) == (3, 2, 8, 66)
    assert kernels.cache_shape(torch.float32, 3, 2, 8, 64) == (3, 2, 8, 64)
