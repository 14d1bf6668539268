"""Exact products and attention: rows do not depend on each other, and values are right."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.pytorch_utils import Conv1D

from lagzero.numerics.exact import (
    BLOCK,
    LinearMode,
    Product,
    Shape,
    cover,
    linear,
    multiply,
    shape_of,
    transposed_forward,
    whole_rows,
)
from lagzero.numerics.exact_attention import attend_exactly
from lagzero.numerics.self_check import check_attention, check_product

COUNTS = (16, 32, 48, 64, 96, 128)
ALONE = [torch.get_num_threads()]


@given(st.integers(1, 2000), st.sampled_from([(16,), (16, 32), COUNTS, (32, 48)]))
def test_a_cover_is_made_of_known_counts_and_wastes_little(num: int, counts: tuple[int, ...]):
    parts = cover(num, counts)
    assert set(parts) <= set(counts)
    assert num <= sum(parts) < max(num + counts[0], 4 * num // 3 + counts[0])


def test_covers_by_hand():
    assert cover(80, COUNTS) == [96]  # 16 rows in vain are cheaper than another call
    assert cover(300, COUNTS) == [128, 128, 48]
    assert cover(1, COUNTS) == [16]
    assert (whole_rows(1), whole_rows(16), whole_rows(17)) == (16, 16, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 24), (7, 64), (130, 300)])
def test_a_row_of_a_product_depends_on_itself_alone(dtype: torch.dtype, outputs: int, inputs: int):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    rows = torch.randn(200, inputs).to(dtype)
    product = check_product(Shape(outputs, inputs, dtype), ALONE)
    whole = multiply(rows, weight, None, product)
    for start, end in [(0, 1), (3, 5), (50, 67), (1, 200), (199, 200)]:
        assert torch.equal(multiply(rows[start:end], weight, None, product), whole[start:end])


def test_a_widened_product_is_rounded_once():
    torch.manual_seed(0)
    rows, weight, bias = (torch.randn(s).bfloat16() for s in ((33, 20), (12, 20), (12,)))
    out = multiply(rows, weight, bias, Product((16,), widen=True))
    exact = (rows.double() @ weight.double().t() + bias.double()).float().bfloat16()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact)


@pytest.mark.parametrize("widen", [False, True])
def test_gradients_are_those_of_an_ordinary_linear_layer(widen: bool):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if widen else torch.float32
    weight, bias = torch.randn(9, 20), torch.randn(9)
    inputs, grad = torch.randn(2, 35, 20), torch.randn(2, 35, 9)
    ours = [t.to(dtype).requires_grad_() for t in (inputs, weight, bias)]
    linear(*ours, Product((16,), widen)).backward(grad.to(dtype))
    theirs = [t.to(dtype).float().requires_grad_() for t in (inputs, weight, bias)]
    F.linear(*theirs).backward(grad.to(dtype).float())
    for mine, other in zip(ours, theirs, strict=True):
        # float32 sums in another order; bfloat16 rounds them once, to 8 bits
        tolerance = 2**-8 if widen else 1e-5
        torch.testing.assert_close(mine.grad.float(), other.grad, rtol=tolerance, atol=tolerance)


def test_frozen_weights_get_no_gradient():
    inputs = torch.randn(20, 8, requires_grad=True)
    weight = torch.randn(4, 8)
    linear(inputs, weight, None, Product((16,))).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand(20, -1))


def test_transposed_layers_and_modules_that_multiply_themselves_are_the_same_functions():
    torch.manual_seed(0)
    layer, inputs = Conv1D(12, 20), torch.randn(3, 20)
    shape = shape_of(layer.weight.t(), torch.float32)
    assert shape == Shape(12, 20, torch.float32, transposed=True)
    products = {shape: Product((16,)), Shape(5, 20, torch.float32): Product((16,))}
    torch.testing.assert_close(transposed_forward(layer, products, inputs), layer(inputs))
    weight = torch.randn(5, 20)
    with LinearMode(products):
        out = F.linear(inputs, weight)
    assert torch.equal(out, multiply(inputs, weight, None, Product((16,))))


def _reference(query, key, value, seen, scale):
    """In float64, one query head at a time."""
    shared = query.shape[2] // key.shape[1]
    keys, values = (t.double().repeat_interleave(shared, 1) for t in (key, value))
    scores = torch.einsum("bqhd,bhkd->bhqk", query.double(), keys) * scale
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, values)


def _inputs(batch: int, num: int, keys: int, heads: int = 6, shared: int = 3, size: int = 16):
    torch.manual_seed(1)
    query = torch.randn(batch, num, heads, size)
    key, value = (torch.randn(batch, heads // shared, keys, size) for _ in range(2))
    seen = torch.arange(keys) <= torch.arange(keys - num, keys)[:, None]
    return query, key, value, seen.expand(batch, -1, -1)


@pytest.mark.parametrize(("batch", "num", "keys"), [(1, 1, BLOCK), (3, 7, BLOCK), (2, 90, 192)])
def test_attention_and_its_gradients_are_right(batch: int, num: int, keys: int):
    query, key, value, seen = _inputs(batch, num, keys)
    tensors = [t.requires_grad_() for t in (query, key, value)]
    out = attend_exactly(*tensors, seen, 0.3, (4, 16, 64))
    reference = _reference(query, key, value, seen, 0.3)
    # sums of at most 192 numbers of order 1 in float32
    torch.testing.assert_close(out.double(), reference, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, tensors, grad)
    theirs = torch.autograd.grad(reference, tensors, grad.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 70), st.integers(0, 2), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_a_query_attends_alike_in_every_batch_and_over_every_padding(
    num: int, more_blocks: int, batch: int, seed: int
):
    counts = check_attention([16], ALONE)
    query, key, value, seen = _inputs(4, 70, 128)
    with torch.no_grad():
        whole = attend_exactly(query, key, value, seen, 0.25, counts)
        first = seed % (70 - num + 1)
        pad = (0, 0, 0, more_blocks * BLOCK)
        some = attend_exactly(
            query[:batch, first : first + num],
            F.pad(key[:batch], pad, value=math.nan),  # what lies there does not matter
            F.pad(value[:batch], pad),
            F.pad(seen[:batch, first : first + num], (0, more_blocks * BLOCK)),
            0.25,
            counts,
        )
    assert torch.equal(some, whole[:batch, first : first + num])
