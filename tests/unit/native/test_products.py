"""bfloat16 products of few and many rows, their gradients, and those of log-probs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.native import kernels
from lagzero.native.gradients import multiply_back, score_back
from lagzero.numerics import rows
from lagzero.train.logprobs import whole_logprobs

HALF, WIDE = torch.bfloat16, torch.float32


def random(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@given(
    num=st.integers(256, 600),
    outputs=st.one_of(st.integers(1, 90), st.integers(250, 290)),
    inputs=st.sampled_from([32, 96, 160, 2048, 2080]),
    threads=st.integers(1, 3),
    wide=st.booleans(),
    biased=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_many_rows_have_the_bits_of_few(on_threads, num, outputs, inputs, threads, wide, biased):
    """However a trainer's rows are multiplied, an engine multiplies a few at a time."""
    x, w = random(num, inputs), random(outputs, inputs, seed=1)
    bias = random(outputs, seed=2) if biased else None
    many = on_threads(threads, kernels.multiply, x, w, bias, wide)
    for start in (0, 100, num - 40):
        few = kernels.multiply(x[start : start + 40], w, bias, wide)
        assert torch.equal(many[start : start + 40], few)
    assert many.dtype == (WIDE if wide else HALF)
    exact = x.double() @ w.double().t() + (bias.double() if bias is not None else 0)
    off = (many.double() - exact).abs()
    sums = x.double().abs() @ w.double().abs().t()  # of sizes: float32 adds up
    assert (off <= exact.abs() * (0 if wide else 2**-8) + sums * 2**-20 + 2**-20).all()


@given(
    num=st.one_of(st.integers(0, 20), st.integers(40, 130)),
    outputs=st.one_of(st.integers(1, 90), st.integers(250, 290)),
    inputs=st.sampled_from([32, 96, 576]),
    threads=st.integers(1, 3),
    wide=st.booleans(),
    biased=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_weight_in_tiles_gives_the_bits_of_the_weight_itself(
    on_threads, num, outputs, inputs, threads, wide, biased
):
    """A decoder's weights lie in tiles where the processor likes it; a trainer's do not."""
    x, w = random(num, inputs), random(outputs, inputs, seed=1)
    bias = random(outputs, seed=2) if biased else None
    if not kernels.takes_tiles(w):
        pytest.skip("a decoder takes weights as they lie here")
    tiled = kernels.tile(w)
    found = on_threads(threads, kernels.multiply, x, w, bias, wide, tiled)
    assert torch.equal(found, kernels.multiply(x, w, bias, wide))
    other = random(outputs, inputs, seed=3)
    assert kernels.tile(other, tiled).numbers.data_ptr() == tiled.numbers.data_ptr()
    assert torch.equal(kernels.multiply(x, w, None, packed=tiled), kernels.multiply(x, other, None))


@pytest.mark.parametrize("inputs", [20_000, 32_768, 32_800])
def test_sums_of_very_many_inputs_fit_a_threads_memory(on_threads, inputs):
    x, w = random(40, inputs), random(50, inputs, seed=1)
    tiled = kernels.tile(w) if kernels.takes_tiles(w) else None
    found = on_threads(2, kernels.multiply, x, w, None, True)
    assert torch.equal(kernels.multiply(x, w, None, True, tiled), found)
    exact, sums = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
    assert ((found.double() - exact).abs() <= sums * 2**-16).all()


def test_weights_that_are_not_bfloat16_are_taken_as_they_lie():
    assert not kernels.takes_tiles(random(64, 64, dtype=WIDE))


def test_rows_that_are_no_numbers_spoil_no_others():
    x, w = random(300, 64), random(70, 64)
    clean = kernels.multiply(x, w, None)
    x[7, 3], x[288, 9] = float("nan"), float("inf")
    found = kernels.multiply(x, w, None)
    others = [row for row in range(300) if row not in (7, 288)]
    assert torch.equal(found[others], clean[others])
    assert found[7].isnan().all() and not found[288].isfinite().any()


@given(
    num=st.one_of(st.integers(1, 70), st.integers(500, 620), st.sampled_from([2047, 2100])),
    outputs=st.sampled_from([32, 64, 96, 288, 2080]),
    inputs=st.sampled_from([32, 64, 160]),
    threads=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_gradients_of_products_are_those_of_the_dense_formula(
    on_threads, num, outputs, inputs, threads
):
    x, w, grad = random(num, inputs), random(outputs, inputs, seed=1), random(num, outputs, seed=2)
    before = random(outputs, inputs, dtype=WIDE, seed=3)
    total = before.clone()
    found = on_threads(threads, multiply_back, grad, x, w, total)
    if found is None:  # no matrix unit here; torch makes them
        assert torch.equal(total, before)
        return
    again, twice = multiply_back(grad, x, w, None), before.clone()
    multiply_back(grad, x, w, twice)
    assert torch.equal(again, found) and torch.equal(twice, total)  # on any threads
    exact, sums = grad.double() @ w.double(), grad.double().abs() @ w.double().abs()
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + sums * 2**-20).all()
    exact = before.double() + grad.double().t() @ x.double()
    sums = before.double().abs() + grad.double().abs().t() @ x.double().abs()
    assert ((total.double() - exact).abs() <= sums * 2**-20).all()


def test_gradients_that_there_is_no_product_for_are_left_to_torch():
    x, w, total = random(9, 64), random(50, 64), torch.zeros(50, 64)
    assert multiply_back(random(9, 50), x, w, total) is None  # 50 outputs are no tiles
    assert multiply_back(random(9, 64, dtype=WIDE), x, random(64, 64), total) is None
    assert (total == 0).all()


@pytest.mark.parametrize("outputs", [64, 50])
def test_a_weights_gradient_is_added_to_the_one_in_float32_that_an_optimiser_keeps(outputs):
    x, w = random(40, 64).requires_grad_(), random(outputs, 64).requires_grad_()
    grad = random(40, outputs, seed=2)

    def gradient() -> torch.Tensor | None:
        x.grad = w.grad = None
        rows._Multiply.apply(x, w, None, False, kernels.KERNELS).backward(grad)
        return w.grad

    plain = gradient()
    assert plain is not None and plain.dtype == HALF
    kept = torch.ones(outputs, 64)
    setattr(w, rows.MAIN_GRAD, kept)
    left = gradient()
    total = kept - 1 + (0 if left is None else left.float())
    exact = grad.float().t() @ x.detach().float()
    assert x.grad is not None
    torch.testing.assert_close(total, exact, rtol=2**-7, atol=2**-5)
    torch.testing.assert_close(
        x.grad.float(), grad.float() @ w.detach().float(), rtol=2**-7, atol=0.2
    )


@pytest.mark.parametrize("dtype", [WIDE, HALF], ids=str)
@pytest.mark.parametrize("size", [5, 64, 1003])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_of_logits_is_that_of_the_formula(dtype, size, with_entropy):
    logits = 3 * random(7, size, dtype=WIDE)
    logits[2] = -200 * torch.arange(size)  # all but one have no probability
    logits = logits.to(dtype)
    targets = torch.arange(7) % size
    of_logprobs, of_entropies = random(7, dtype=WIDE, seed=1), random(7, dtype=WIDE, seed=2)
    _, entropies, normalisers = kernels.score(logits, targets, 0.8)
    found = score_back(
        logits,
        targets,
        0.8,
        (entropies, normalisers),
        of_logprobs,
        of_entropies if with_entropy else None,
    )
    leaf = logits.double().requires_grad_()
    logprobs, entropy = whole_logprobs(leaf, lambda x: x, targets, 0.8, 1, True)
    loss = (logprobs * of_logprobs).sum()
    if with_entropy:
        loss = loss + (entropy * of_entropies).sum()
    (exact,) = torch.autograd.grad(loss, leaf)
    assert found.dtype == dtype
    step = 2**-17 if dtype == WIDE else 2**-8
    # a share is wrong by that of its exponent, |z| 2^-23 with z up to 20
    torch.testing.assert_close(found.double(), exact, rtol=step, atol=2**-17)


def test_a_row_without_numbers_has_no_gradient_and_spoils_no_other():
    logits = random(3, 40, dtype=WIDE)
    logits[1, 5] = float("nan")
    targets, ones = torch.zeros(3, dtype=torch.long), torch.ones(3)
    _, *scored = kernels.score(logits, targets, 1.0)
    found = score_back(logits, targets, 1.0, (scored[0], scored[1]), ones, None)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
