"""Backward passes in C: gradients of the dense formulas, the same bits whatever the threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.native import kernels, modules
from lagzero.native.gradients import attend_back, gate_back, normalise_back
from lagzero.numerics import rows
from lagzero.numerics.packed import DensePlan
from lagzero.numerics.rows import RowPlan

TYPES = [torch.float32, torch.bfloat16]
WINDOWS = [None, 1, 4, 40]
EPS = 1e-5
SCALE = 0.3
CPU = torch.device("cpu")
TORCH = replace(kernels.KERNELS, back=None)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def packed(*families: tuple[int, list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions, segments and parents of (length of a prompt or 0, lengths after it)."""
    positions: list[np.ndarray] = []
    parents: list[int] = []
    for prompt, lengths in families:
        parent = len(parents) if prompt else -1
        if prompt:
            positions.append(np.arange(prompt))
            parents.append(-1)
        positions += [prompt + np.arange(length) for length in lengths]
        parents += [parent] * len(lengths)
    segments = np.repeat(range(len(parents)), [len(each) for each in positions])
    return np.concatenate(positions), segments, np.array(parents)


ROWS = {
    "shared": packed((33, [20, 1, 64]), (0, [50]), (1, [5, 1]), (0, [1])),
    "single tokens": packed((0, [1] * 20), (7, [1] * 9)),
    "long": packed((0, [300])),
    "one token": packed((0, [1])),
}


def inputs_of(num: int, size: int, dtype: torch.dtype, heads: tuple[int, int] = (6, 2)):
    """Return query, key, value and the gradient of a result."""
    of, shared = heads
    return [
        random(num, n, size, dtype=dtype, seed=7 * place)
        for place, n in enumerate((of, shared, shared, of))
    ]


def attended(plan, parts, window: int | None) -> list[torch.Tensor]:
    """Return the gradients of query, key and value."""
    *leaves, grad = (each.detach().clone() for each in parts)
    leaves = [each.requires_grad_() for each in leaves]
    out = plan.attend(0, *leaves, SCALE, window)
    return list(torch.autograd.grad(out, leaves, grad))


def close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, terms: float = 1) -> None:
    """Within the rounding of the result and of some float32 operations on its largest terms.

    ``terms`` is how large the terms are of which a number is the sum, or 1.
    """
    assert found.dtype == dtype and found.shape == exact.shape
    gap = (found.double() - exact).abs()
    rounding = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    assert (gap <= rounding * exact.abs() + 2.0**-19 * max(terms, 1.0)).all(), gap.max()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [16, 48, 64, 80])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_gradients_of_attention_are_those_of_a_dense_mask(row, dtype, size, window):
    facts = ROWS[row]
    parts = inputs_of(len(facts[0]), size, dtype)
    exact = attended(DensePlan(*facts, CPU), [each.double() for each in parts], window)
    found = attended(RowPlan(kernels.KERNELS, *facts, CPU), parts, window)
    # Gradients of scores are differences of sums over E; of a row's keys they cancel.
    terms = float(max(each.abs().max() for each in exact)) + size**0.5
    for one, other in zip(found, exact, strict=True):
        close(one, other, dtype, terms)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (8, 8), (14, 2), (48, 1)], ids=str)
def test_any_number_of_heads_shares_a_key_head(heads):
    facts = packed((40, [30, 9]), (0, [70]))
    parts = inputs_of(len(facts[0]), 32, torch.float32, heads)
    exact = attended(DensePlan(*facts, CPU), [each.double() for each in parts], None)
    found = attended(RowPlan(kernels.KERNELS, *facts, CPU), parts, None)
    for one, other in zip(found, exact, strict=True):
        close(one, other, torch.float32, 20 * heads[0] / heads[1])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_they_are_as_exact_as_those_of_torch(dtype, window):
    facts = packed((60, [100, 80, 120]), (0, [200]))
    parts = inputs_of(len(facts[0]), 64, dtype)
    exact = attended(DensePlan(*facts, CPU), [each.double() for each in parts], window)
    ours, torchs = (
        attended(RowPlan(each, *facts, CPU), parts, window) for each in (kernels.KERNELS, TORCH)
    )
    for one, other, true in zip(ours, torchs, exact, strict=True):
        gaps = [(each.double() - true).square().mean().sqrt() for each in (one, other)]
        assert gaps[0] < 1.25 * gaps[1]


def test_products_of_integers_have_the_gradients_of_the_same_inputs():
    facts = ROWS["shared"]
    parts = inputs_of(len(facts[0]), 16, torch.float32)
    found = [
        attended(RowPlan(each, *facts, CPU), parts, None)
        for each in (kernels.KERNELS, kernels.kernels_of("int16"))
    ]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    prompt=st.integers(0, 60),
    dtype=st.sampled_from(TYPES),
    window=st.sampled_from(WINDOWS),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_bits_depend_on_neither_threads_nor_the_run(
    on_threads, lengths, prompt, dtype, window, seed
):
    facts = packed((prompt, lengths), (3, [8]))
    num = len(facts[0])
    query, key, value, grad = inputs_of(num, 32, dtype, (6, 3))
    plan = RowPlan(kernels.KERNELS, *facts, CPU)
    x, weight, ups = random(num, 40, dtype=dtype, seed=seed), random(40), random(num, 40)

    def run():
        given = x.flip(0)
        found = [*normalise_back(given, x, weight.to(dtype), EPS)]
        found += gate_back(given, x, ups.to(dtype))
        return [*found, *attend_back(grad, query, key, value, plan._places, SCALE, window)]

    first = run()
    for threads in (1, 2, 3, 3):
        assert all(map(torch.equal, first, on_threads(threads, run)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_no_number_stays_in_its_sequence(dtype):
    facts = packed((20, [30, 15]), (0, [25]))
    segments = torch.as_tensor(facts[1])
    parts = inputs_of(len(facts[0]), 16, dtype)
    plan = RowPlan(kernels.KERNELS, *facts, CPU)
    clean = attended(plan, parts, None)
    at = 45  # in the first response; its query head 0 belongs to key head 0
    parts[3][at, 0, 5] = torch.nan
    query, key, value = attended(plan, parts, None)
    spoilt = query.isnan().any(-1)
    assert spoilt.nonzero().tolist() == [[at, 0]] and query[at, 0].isnan().all()
    seen = (segments == 0) | ((segments == 1) & (torch.arange(len(segments)) <= at))
    for found, before in ((key, clean[1]), (value, clean[2])):
        assert found[seen, 0].isnan().any(-1).all()
        assert torch.equal(found[:, 1], before[:, 1])
        assert torch.equal(found[segments > 1], before[segments > 1])
    assert not value[..., :5].isnan().any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 48, 77, 576])
@pytest.mark.parametrize("num", [1, 64, 1000])
def test_gradients_of_a_norm_are_those_of_its_formula(num, size, dtype):
    x, weight = 3 * random(num, size, dtype=dtype), random(size, dtype=dtype)
    grad = random(num, size, dtype=dtype, seed=3)
    leaves = [each.double().requires_grad_() for each in (x, weight)]
    unit = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + EPS)
    exact = torch.autograd.grad(unit * leaves[1], leaves, grad.double())
    found = normalise_back(grad, x, weight, EPS)
    close(found[0], exact[0], dtype, float(grad.abs().max() * weight.abs().max()) * 4)
    # a sum over rows of terms of which a few percent are beyond 2
    close(found[1], exact[1], dtype, 4 * num**0.5)
    assert normalise_back(grad, x, weight, EPS, False)[1] is None


def test_the_weight_of_a_norm_may_have_another_type():
    x, grad = random(70, 48, dtype=torch.bfloat16), random(70, 48, dtype=torch.bfloat16, seed=1)
    weight = random(48)
    found = normalise_back(grad, x, weight, EPS)
    wide = normalise_back(grad.float(), x.float(), weight, EPS)
    assert torch.equal(found[0], wide[0].bfloat16()) and torch.equal(found[1], wide[1])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (9, 77), (40, 300)], ids=str)
def test_gradients_of_a_gate_are_those_of_its_formula(shape, dtype):
    gates, ups, grad = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    gates = 4 * gates
    leaves = [each.double().requires_grad_() for each in (gates, ups)]
    exact = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, grad.double())
    for one, other in zip(gate_back(grad, gates, ups), exact, strict=True):
        close(one, other, dtype, float(grad.abs().max() * ups.abs().max()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(3, 64), (1, 16), (2, 48), (5, 6)])
def test_heads_are_turned_as_the_modules_turn_them_and_back(dtype, heads, size):
    x, grad = (random(21, heads, size, dtype=dtype, seed=seed) for seed in range(2))
    angles = 9 * random(21, size, seed=2)  # of each number: scaled ones are no rotations
    cosine, sine = angles.cos().to(dtype), (1.3 * angles.sin()).to(dtype)
    turned = kernels.rotate(x.transpose(0, 1).contiguous().transpose(0, 1), cosine, sine)
    assert torch.equal(turned, modules._rotate(x, (cosine, sine)))
    leaf = x.double().requires_grad_()
    out = modules._rotate(leaf, (cosine.double(), sine.double()))
    (exact,) = torch.autograd.grad(out, leaf, grad.double())
    close(kernels.rotate_back(grad, cosine, sine), exact, dtype, 4)


def test_a_gate_far_from_0_is_closed_or_open():
    gates = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0])
    to_gates, to_ups = gate_back(torch.ones(5), gates, torch.full((5,), 3.0))
    assert to_gates.tolist() == pytest.approx([0, 0, 1.5, 3, 3], abs=1e-30)
    assert to_ups.tolist() == pytest.approx([0, 0, 0, 90, 200], abs=1e-30)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_policys_parts_use_them_where_they_are(dtype):
    """As torch's do within the rounding that theirs add, for grads that are no rows in memory."""
    x, w, up = random(30, 48, dtype=dtype), random(48, dtype=dtype), random(30, 48, dtype=dtype)
    grad = random(48, 30, dtype=dtype).t()
    leaves = [each.requires_grad_() for each in (x, w, up)]
    for made in (
        lambda by: rows._Normalise.apply(x, w, EPS, by),
        lambda by: rows._Gate.apply(x, up, kernels.gate, by.back),
    ):
        ours, torchs = (
            torch.autograd.grad(made(by), leaves, grad, allow_unused=True)
            for by in (kernels.KERNELS, TORCH)
        )
        for one, other in zip(ours, torchs, strict=True):
            if one is None or other is None:
                assert one is other
                continue
            step = 2.0**-20 if dtype == torch.float32 else 2.0**-6
            torch.testing.assert_close(one, other, rtol=step, atol=step * float(other.abs().max()))
