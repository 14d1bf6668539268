"""Weights within one process: shared tensors where the types agree, else one cast copy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Protocol

import torch

from lagzero.errors import WeightSyncError
from lagzero.runtime.local_runtime import ComputeThread


class WeightReceiver(Protocol):
    """What must hear that weights changed."""

    def weights_changed(self, version: int) -> None:
        """Take note of the version that the weights now are."""
        ...


class SharedWeights:
    """Trainer and engine hold the same tensors, so publishing is only the announcement."""

    def __init__(self, receiver: WeightReceiver, compute: ComputeThread):
        self._receiver = receiver
        self._compute = compute

    async def publish(self, version: int) -> None:
        """Announce the version between two engine steps."""
        await self._compute.call(self._receiver.weights_changed, version)


class CopiedWeights:
    """The engine holds its own tensors; publishing casts into them and then announces."""

    def __init__(
        self,
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        receiver: WeightReceiver,
        compute: ComputeThread,
    ):
        self._source = source
        self._target = target
        self._receiver = receiver
        self._compute = compute

    async def publish(self, version: int) -> None:
        """Copy every tensor, then announce the version; WeightSyncError changes nothing."""
        await self._compute.call(self._publish, version)

    def _publish(self, version: int) -> None:
        copy_weights(self._source, self._target)
        self._receiver.weights_changed(version)


def copy_weights(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Cast ``source`` into ``target`` in place, after checking that names and shapes all agree.

    Raises WeightSyncError that lists every disagreement; ``target`` is then unchanged.
    """
    problems: list[str] = []
    for name in source.keys() - target.keys():
        near = difflib.get_close_matches(name, target, 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        problems.append(f"{name}: the engine has no such tensor{hint}")
    problems.extend(f"{name}: missing from the update" for name in target.keys() - source.keys())
    problems.extend(
        f"{name}: shape {list(source[name].shape)}, the engine's is {list(target[name].shape)}"
        for name in source.keys() & target.keys()
        if source[name].shape != target[name].shape
    )
    problems.extend(
        f"{name}: holds NaN or infinity"
        for name in source.keys() & target.keys()
        if not bool(torch.isfinite(source[name]).all())
    )
    if problems:
        raise WeightSyncError("weight update refused:\n" + "\n".join(sorted(problems)))
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].copy_(tensor)
