"""Weights for engines whose linear layers are stored in 8 bits: quantised anew for each version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from lagzero.numerics.quantise import STORED, Kind, quantise
from lagzero.protocols import WeightLink
from lagzero.runtime.local_runtime import ComputeThread


class QuantisedWeights:
    """A policy's weights as its engines hold them, of one version at a time.

    ``tensors`` has, under the name of each quantised matrix, its 8-bit numbers, and under
    ``scale_name`` of it the scales; all other names are the policy's own tensors.

    Args:
        source: the policy's weights, which training changes in place.
        matrices: names of those to quantise, each [M, K].
        kind: how.
        changing: names that training can change.
    """

    def __init__(
        self,
        source: Mapping[str, torch.Tensor],
        matrices: Collection[str],
        kind: Kind,
        changing: Collection[str],
    ):
        self._source = {name: source[name] for name in matrices}
        self._kind: Kind = kind
        self._changing = [name for name in matrices if name in changing]
        self._is_first = True
        self.changing = {*changing, *(scale_name(name) for name in self._changing)}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in source.items():
            self.tensors[name] = tensor
            if name in self._source:
                self.tensors[name] = torch.empty_like(tensor, dtype=STORED[kind])
                self.tensors[scale_name(name)] = tensor.new_empty(len(tensor), dtype=torch.float32)

    def layout(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Return, without content, what an engine holds whose other tensors are of ``dtype``."""
        kept = {*self._source, *(scale_name(name) for name in self._source)}
        return {
            name: tensor.to("meta", None if name in kept else dtype)
            for name, tensor in self.tensors.items()
        }

    def refresh(self) -> None:
        """Quantise what may differ from the last time: all at first."""
        for name in self._source if self._is_first else self._changing:
            stored, scale = quantise(self._source[name], self._kind)
            self.tensors[name].copy_(stored)
            self.tensors[scale_name(name)].copy_(scale)
        self._is_first = False


class RequantisedWeights:
    """Refreshes before another link publishes, so that one version is never sent as two.

    Satisfies ``WeightLink``.
    """

    def __init__(self, refresh: Callable[[], None], link: WeightLink, compute: ComputeThread):
        self._refresh = refresh
        self._link = link
        self._compute = compute

    async def publish(self, version: int) -> None:
        """Quantise the policy as it is, then publish that; raises what the link raises."""
        await self._compute.call(self._refresh)
        await self._link.publish(version)


def scale_name(matrix: str) -> str:
    """Return the name of the scales of ``layer.weight``: ``layer.scale``."""
    return matrix.removesuffix("weight") + "scale"
