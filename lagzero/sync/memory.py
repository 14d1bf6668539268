"""Weights within one process: shared tensors where the types agree, else one cast copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from lagzero.errors import WeightSyncError
from lagzero.nearest import nearest
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
    """The engine holds its own tensors; publishing casts into them and then announces.

    The first update brings all tensors, later ones those that training can change: ``changing``
    names them, None means all. Names and shapes of all are compared each time.
    """

    def __init__(
        self,
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        receiver: WeightReceiver,
        compute: ComputeThread,
        changing: Collection[str] | None = None,
    ):
        self._source = source
        self._target = target
        self._changing = changing
        self._is_first = True
        self._receiver = receiver
        self._compute = compute

    async def publish(self, version: int) -> None:
        """Copy what may differ, then announce the version; WeightSyncError changes nothing."""
        await self._compute.call(self._publish, version)

    def _publish(self, version: int) -> None:
        copy_weights(self._source, self._target, None if self._is_first else self._changing)
        self._is_first = False
        self._receiver.weights_changed(version)


def copy_weights(
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    only: Collection[str] | None = None,
) -> None:
    """Cast ``source`` into ``target`` in place, after checking that names and shapes all agree.

    With ``only``, the other tensors are neither copied nor searched for NaN and infinity.

    Raises WeightSyncError that lists every disagreement; ``target`` is then unchanged.
    """
    problems: list[str] = []
    for name in source.keys() - target.keys():
        near = nearest(name, target)
        hint = f"; the nearest is {near!r}" if near else ""
        problems.append(f"{name}: the engine has no such tensor{hint}")
    problems.extend(f"{name}: missing from the update" for name in target.keys() - source.keys())
    problems.extend(
        f"{name}: shape {list(source[name].shape)}, the engine's is {list(target[name].shape)}"
        for name in source.keys() & target.keys()
        if source[name].shape != target[name].shape
    )
    chosen = source.keys() if only is None else source.keys() & set(only)
    problems.extend(
        f"{name}: holds NaN or infinity"
        for name in chosen & target.keys()
        if not _is_finite(source[name])
    )
    if problems:
        raise WeightSyncError("weight update refused:\n" + "\n".join(sorted(problems)))
    with torch.no_grad():
        for name in chosen:
            target[name].copy_(source[name])


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all is finite. A finite sum proves it, in a ninth of the time; it may overflow."""
    if tensor.dtype == torch.float8_e4m3fn:  # has no sums
        tensor = tensor.float()
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
