"""Weights of 8 bits with one scale an output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.numerics.quantise import (
    Kind,
    QuantisedLinear,
    dequantise,
    multiply,
    quantise,
    rounded,
    rounded_linear,
)

KINDS: list[Kind] = ["int8", "fp8"]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_int8_by_hand():
    """Scales 127/127 = 1 and 254/127 = 2; halves go to the even neighbour; a row of zeros stays."""
    weight = torch.tensor([[127.0, -63.5, 0.4, 62.5], [-254.0, 3.0, 1.0, -5.0], [0.0, 0, 0, 0]])
    stored, scale = quantise(weight, "int8")
    assert stored.dtype == torch.int8
    assert stored.tolist() == [[127, -64, 0, 62], [-127, 2, 0, -2], [0, 0, 0, 0]]
    assert scale[:2].tolist() == [1.0, 2.0]
    assert rounded(weight, "int8").tolist() == [[127, -64, 0, 62], [-254, 4, 0, -4], [0, 0, 0, 0]]


def test_fp8_by_hand():
    """Scale 448/448 = 1. Between 16 and 32 e4m3 numbers are 2 apart, and 2^-9 apart around 0."""
    weight = torch.tensor([[448.0, 19.5, -17.0, 0.0031, 0.0009]])
    assert rounded(weight, "fp8").tolist() == [[448.0, 20.0, -16.0, 2 * 2**-9, 0.0]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5), min_size=1, max_size=6
    )
)
def test_no_weight_moves_by_more_than_its_bound(rows: list[list[float]]):
    """int8: s/2. fp8: 1/16 of the weight, and s/1024 around 0. Float32 adds its own rounding."""
    weight = torch.tensor(rows)
    for kind in KINDS:
        stored, scale = quantise(weight, kind)
        steps = scale.unsqueeze(1).double()
        moved = (weight.double() - stored.double() * steps).abs()
        bound = steps / 2 if kind == "int8" else weight.double().abs() / 16 + steps / 1024
        assert (moved <= bound * (1 + 1e-4)).all()
        assert stored.double().abs().max() <= {"int8": 127, "fp8": 448}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_row_does_not_make_another_one_coarser(kind: Kind):
    """Each output has its own scale, so rows are quantised as if they were alone."""
    weight = random(0, 4, 8)
    weight[0] *= 1000
    assert torch.equal(rounded(weight, kind)[1:], rounded(weight[1:], kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_weight_is_seen_in_its_scale(kind: Kind, bad: float):
    weight = random(0, 3, 4)
    weight[1, 2] = bad
    assert torch.isfinite(quantise(weight, kind)[1]).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)  # of results of size about 6: eps x a few sums of 32 products
def test_a_product_is_that_of_the_weights_that_are_meant(
    kind: Kind, with_bias: bool, dtype: torch.dtype, tolerance: float
):
    linear = torch.nn.Linear(32, 5, bias=with_bias, dtype=dtype).requires_grad_(False)
    inputs = random(1, 2, 3, 32, dtype=dtype)
    twin = QuantisedLinear(linear, kind)
    meant = dequantise(twin.weight, twin.scale, torch.float32)
    bias = None if linear.bias is None else linear.bias.float()
    expected = F.linear(inputs.float(), meant, bias)
    found = twin(inputs)
    assert found.dtype == dtype
    assert found.shape == (2, 3, 5)
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_a_layer_holds_8_bits_a_weight_and_a_scale_an_output():
    twin = QuantisedLinear(torch.nn.Linear(64, 16), "int8")
    shapes = {name: (p.dtype, tuple(p.shape)) for name, p in twin.named_parameters()}
    assert shapes == {
        "weight": (torch.int8, (16, 64)),
        "scale": (torch.float32, (16,)),
        "bias": (torch.float32, (16,)),
    }
    assert not any(p.requires_grad for p in twin.parameters())
    assert twin.weight.is_contiguous()


def test_products_leave_what_they_read_as_it_is():
    stored, scale = quantise(random(0, 4, 8), "int8")
    inputs, bias = random(1, 3, 8), random(2, 4)
    before = [t.clone() for t in (inputs, stored, scale, bias)]
    multiply(inputs, stored, scale, bias)
    assert all(map(torch.equal, (inputs, stored, scale, bias), before))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_goes_straight_through(kind: Kind):
    """As of F.linear with w + (Q(w) - w), where the bracket is a constant."""
    inputs, weight, bias = random(0, 2, 6, 8), random(1, 5, 8), random(2, 5)
    results: list[list[torch.Tensor]] = []
    for fast in (True, False):
        x, w, b = (t.clone().requires_grad_() for t in (inputs, weight, bias))
        if fast:
            out = rounded_linear(x, w, b, kind)
        else:
            out = F.linear(x, w + (rounded(w.detach(), kind) - w).detach(), b)
        (out * random(3, 2, 6, 5)).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert b.grad is not None
        results.append([out.detach(), x.grad, w.grad, b.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # And not that of the weight itself: Q(w) is what the inputs' gradient is made with.
    assert not torch.allclose(results[0][1], random(3, 2, 6, 5) @ weight, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient():
    x, w = random(0, 3, 8).requires_grad_(), random(1, 5, 8)
    rounded_linear(x, w, None, "int8").sum().backward()
    assert x.grad is not None
    assert w.grad is None
