"""Attention over packed rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lagzero.numerics.packed import DensePlan, PackedPlan, _partition  # pyright: ignore
from lagzero.types import Array

CPU = torch.device("cpu")


def row(segments: list[tuple[int, int]]) -> tuple[Array, Array, Array]:
    """Positions, segment ids and parents of (length, parent) segments."""
    positions: list[int] = []
    ids: list[int] = []
    for number, (length, parent) in enumerate(segments):
        first = segments[parent][0] if parent >= 0 else 0
        positions.extend(range(first, first + length))
        ids.extend([number] * length)
    parents = np.array([p for _, p in segments], np.int32)
    return np.array(positions, np.int32), np.array(ids, np.int32), parents


def random_row(seed: int) -> tuple[Array, Array, Array]:
    """Several prompts, each with children of mixed lengths, and some stand-alone segments."""
    rng = np.random.default_rng(seed)
    segments: list[tuple[int, int]] = []
    for _ in range(4):
        segments.append((int(rng.integers(1, 40)), -1))
        prompt = len(segments) - 1
        segments.extend((int(rng.integers(1, 30)), prompt) for _ in range(rng.integers(0, 9)))
    return row(segments)


def states(
    num: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [T, 4, 8], key and value [T, 2, 8]."""
    generator = torch.Generator().manual_seed(num)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(num, heads, 8, dtype=dtype, generator=generator).requires_grad_()

    return make(4), make(2), make(2)


@pytest.mark.parametrize("window", [None, 1, 5, 33])
@pytest.mark.parametrize("seed", range(4))
def test_fast_and_dense_attention_agree_in_value_and_gradient(seed: int, window: int | None):
    """Float64: only the order of sums differs."""
    facts = random_row(seed)
    results: list[list[torch.Tensor]] = []
    for plan in (PackedPlan(*facts, CPU), DensePlan(*facts, CPU)):
        inputs = states(len(facts[0]))
        out = plan.attend(0, *inputs, 0.3, window)
        (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()).sum().backward()
        results.append([out, *(i.grad for i in inputs if i.grad is not None)])
    for fast, dense in zip(*results, strict=True):
        torch.testing.assert_close(fast, dense, rtol=1e-10, atol=1e-10)


def test_plan_gives_the_same_again_for_another_layer():
    facts = random_row(1)
    plan = PackedPlan(*facts, CPU)
    inputs = states(len(facts[0]))
    first = plan.attend(0, *inputs, 0.3, 4)
    plan.attend(1, *states(len(facts[0])), 0.3, None)
    assert torch.equal(plan.attend(2, *inputs, 0.3, 4), first)


def test_a_token_sees_its_past_and_its_prompt_and_nothing_else():
    """Gradients of one output show what it read: the prompt (0-2) and places 3-4 of itself."""
    facts = row([(3, -1), (4, 0), (2, 0), (2, -1)])
    query, key, value = states(11)
    PackedPlan(*facts, CPU).attend(0, query, key, value, 1.0, None)[4].sum().backward()
    assert value.grad is not None
    read = value.grad.abs().sum((1, 2)) > 0
    assert read.tolist() == [True] * 5 + [False] * 6


def test_window_counts_positions_not_places():
    """The second child stands at places 7-8 and positions 3-4, right after its prompt's 0-2.

    With a window of 3 its first token, position 3, sees positions 1, 2 and 3.
    """
    facts = row([(3, -1), (4, 0), (2, 0)])
    query, key, value = states(9)
    PackedPlan(*facts, CPU).attend(0, query, key, value, 1.0, 3)[7].sum().backward()
    assert value.grad is not None
    read = value.grad.abs().sum((1, 2)) > 0
    assert np.flatnonzero(read.numpy()).tolist() == [1, 2, 7]


def test_half_precision_is_attended_in_float32_on_a_cpu():
    """Against float32 of the same inputs, only the final rounding to bfloat16 is left."""
    facts = random_row(2)
    query, key, value = (s.detach() for s in states(len(facts[0]), torch.bfloat16))
    plan = PackedPlan(*facts, CPU)
    out = plan.attend(0, query, key, value, 0.3, None)
    assert out.dtype == torch.bfloat16
    exact = plan.attend(0, query.float(), key.float(), value.float(), 0.3, None)
    assert torch.equal(out, exact.bfloat16())


def test_padding_stays_small():
    """200 responses of 5 to 400 tokens to prompts of 50: at most 1.5 times the scores needed."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([np.full(25, 50), rng.integers(5, 400, 200)])
    parents = np.concatenate([np.full(25, -1), np.arange(200) // 8])
    parts = _partition(lengths, parents)
    keys = lengths + np.where(parents >= 0, 50, 0)
    padded = sum(len(p) * lengths[p].max() * keys[p].max() for p in parts)
    assert padded < 1.5 * (lengths * keys).sum()
    assert len(parts) < 20
    assert sorted(np.concatenate(parts)) == list(range(225))


@pytest.mark.parametrize(
    ("segments", "parents", "reason"),
    [
        ([0, 0, 2], [-1, -1, -1], "count 0, 1, 2"),
        ([1, 1], [-1, -1], "count 0, 1, 2"),
        ([0, 1, 0], [-1, -1], "count 0, 1, 2"),
        ([0, 1], [-1], "2 segments and 1 parents"),
        ([0, 1], [-1, 2], "a parent must be"),
        ([0, 1, 2], [-1, 0, 1], "a parent must be"),
        ([], [], "a row needs"),
    ],
)
def test_rows_that_are_none_are_refused(segments: list[int], parents: list[int], reason: str):
    with pytest.raises(ValueError, match=reason):
        PackedPlan(np.zeros(len(segments), int), np.array(segments), np.array(parents), CPU)
