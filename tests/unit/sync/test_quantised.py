"""Weights that are quantised anew for each version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from lagzero.errors import WeightSyncError
from lagzero.numerics.quantise import Kind, dequantise, quantise
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.sync.memory import CopiedWeights
from lagzero.sync.quantised import QuantisedWeights, RequantisedWeights

Tensors = dict[str, torch.Tensor]


class Engine:
    """Holds weights as an 8-bit engine does, and notes what they are when a version comes."""

    def __init__(self, layout: Tensors):
        self.weights = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in layout.items()}
        self.heard: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def weights_changed(self, version: int) -> None:
        matrix = dequantise(self.weights["a.weight"], self.weights["a.scale"], torch.float32)
        self.heard.append((version, matrix, self.weights["norm"].clone()))


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


def source() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(6, 8, generator=generator),
        "b.weight": torch.randn(3, 6, generator=generator),
        "norm": torch.ones(6),
    }


def linked(
    weights: Tensors, compute: ComputeThread, kind: Kind = "int8", changing: set[str] | None = None
) -> tuple[RequantisedWeights, Engine]:
    changing = set(weights) if changing is None else changing
    staged = QuantisedWeights(weights, ["a.weight", "b.weight"], kind, changing)
    engine = Engine(staged.layout(torch.bfloat16))
    link = CopiedWeights(staged.tensors, engine.weights, engine, compute, staged.changing)
    return RequantisedWeights(staged.refresh, link, compute), engine


def test_layout_keeps_8_bits_and_float32_scales_and_casts_the_rest():
    staged = QuantisedWeights(source(), ["a.weight"], "int8", ())
    types = {name: tensor.dtype for name, tensor in staged.layout(torch.bfloat16).items()}
    assert types == {
        "a.weight": torch.int8,
        "a.scale": torch.float32,
        "b.weight": torch.bfloat16,
        "norm": torch.bfloat16,
    }
    own = {name: tensor.dtype for name, tensor in staged.layout(None).items()}
    assert own == {**types, "b.weight": torch.float32, "norm": torch.float32}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_every_version_is_quantised_anew_and_is_one_version(kind: Kind, compute: ComputeThread):
    """Numbers, scales and the tensors that are not quantised are of the same step."""
    weights = source()
    link, engine = linked(weights, compute, kind)
    for version in (1, 2, 3):
        for tensor in weights.values():
            tensor.mul_(-1.7)
        asyncio.run(link.publish(version))
        heard, matrix, norm = engine.heard[-1]
        assert heard == version
        expected = dequantise(*quantise(weights["a.weight"], kind), torch.float32)
        assert torch.equal(matrix, expected)
        assert torch.equal(norm, weights["norm"].to(torch.bfloat16))


def test_what_training_cannot_change_is_quantised_once(compute: ComputeThread):
    """As a frozen base under adapters: later versions bring the rest."""
    weights = source()
    link, engine = linked(weights, compute, changing={"b.weight"})
    asyncio.run(link.publish(0))
    first = {name: tensor.clone() for name, tensor in engine.weights.items()}
    for tensor in weights.values():
        tensor.mul_(3.0)
    asyncio.run(link.publish(1))
    assert torch.equal(engine.weights["a.weight"], first["a.weight"])
    assert torch.equal(engine.weights["a.scale"], first["a.scale"])
    assert torch.allclose(engine.weights["b.scale"], 3 * first["b.scale"])


def test_a_bad_weight_is_refused_and_the_engine_stays_as_it_was(compute: ComputeThread):
    weights = source()
    link, engine = linked(weights, compute)
    asyncio.run(link.publish(0))
    before = {name: tensor.clone() for name, tensor in engine.weights.items()}
    weights["a.weight"][2, 3] = float("nan")
    weights["norm"].mul_(5)
    with pytest.raises(WeightSyncError, match=r"a\.scale: holds NaN or infinity"):
        asyncio.run(link.publish(1))
    assert all(torch.equal(engine.weights[name], before[name]) for name in before)
    assert [version for version, _, _ in engine.heard] == [0]
