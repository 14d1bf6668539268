"""Weights for engine processes: two slots of shared memory that the engines compute with.

The publisher casts into the slot that nobody reads; each engine points its parameters at it between
two steps, after checking version, number and checksums of all tensors. Nothing is copied twice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

import torch

from lagzero.errors import WeightSyncError
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.runtime.messages import TakeWeights
from lagzero.sync.memory import copy_weights
from lagzero.sync.segment import Segment, remove_abandoned
from lagzero.types import Array

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_NUM_SLOTS = 2
_NO_VERSION = -1  # of a slot that is being written


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in a slot, row after row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes from the start of the slot's tensors, a multiple of the alignment
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of a slot, in order. A slot is a header and the tensors.

    The header is int64 [2 + tensors]: version, number of tensors, and one checksum each.
    """

    places: tuple[TensorPlace, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Manifest:
        """Lay tensors out, those of floating point in ``dtype`` if it is given."""
        places: list[TensorPlace] = []
        offset = 0
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            size = math.prod(tensor.shape) * kind.itemsize
            places.append(TensorPlace(name, tuple(tensor.shape), kind, offset, size))
            offset += _aligned(size)
        return cls(tuple(places))

    @property
    def header_bytes(self) -> int:
        """Size of a slot's header."""
        return _aligned(8 * (2 + len(self.places)))

    @property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        last = self.places[-1] if self.places else None
        return self.header_bytes + (0 if last is None else last.offset + _aligned(last.num_bytes))


class _Slot:
    """One slot as tensors that lie in the shared memory."""

    def __init__(self, memory: SharedMemory, manifest: Manifest, number: int):
        # Tensors keep this storage alive, but nothing in them keeps the memory mapped.
        start = number * manifest.slot_bytes
        base = torch.frombuffer(
            memory.buf, dtype=torch.uint8, count=manifest.slot_bytes, offset=start
        )
        tensors = base[manifest.header_bytes :]
        self.header: Array = base[: 8 * (2 + len(manifest.places))].view(torch.int64).numpy()
        self.tensors: dict[str, torch.Tensor] = {}
        self._words: dict[str, torch.Tensor] = {}
        for place in manifest.places:
            content = tensors[place.offset : place.offset + place.num_bytes]
            self.tensors[place.name] = content.view(place.dtype).reshape(place.shape)
            padded = tensors[place.offset : place.offset + _aligned(place.num_bytes)]
            self._words[place.name] = padded.view(torch.int64)

    def checksum(self, name: str) -> int:
        """Return the sum of a tensor's 64-bit words mod 2^64: it sees any change of one word."""
        return int(self._words[name].sum())


class WeightSlots:
    """The owner's end of the shared memory: it writes."""

    def __init__(self, manifest: Manifest, changing: Collection[str] | None = None):
        """Reserve two slots. ``changing`` names what training can change; None means all.

        Memory that earlier runs could not give back is removed first.

        Raises LagzeroError when there is not enough shared memory.
        """
        remove_abandoned()
        self.manifest = manifest
        self._changing = changing
        self._segment = Segment(_NUM_SLOTS * manifest.slot_bytes)
        self._slots = [
            _Slot(self._segment.memory, manifest, number) for number in range(_NUM_SLOTS)
        ]
        self._checksums: list[dict[str, int]] = [{} for _ in range(_NUM_SLOTS)]

    @property
    def reader(self) -> SlotReader:
        """What an engine process needs to open them."""
        return SlotReader(self._segment.name, self.manifest)

    def write(self, number: int, version: int, source: Mapping[str, torch.Tensor]) -> None:
        """Cast ``source`` into a slot that nobody reads: all of it at first, then what changes.

        Raises WeightSyncError that lists every tensor that is not as the manifest says, or that
        holds NaN or infinity.
        """
        slot, checksums = self._slots[number], self._checksums[number]
        only = self._changing if checksums else None
        slot.header[0] = _NO_VERSION
        copy_weights(source, slot.tensors, only)
        for name in slot.tensors:
            if only is None or name in only:
                checksums[name] = slot.checksum(name)
        slot.header[1:] = [len(checksums), *(checksums[name] for name in slot.tensors)]
        slot.header[0] = version

    def close(self) -> None:
        """Give the memory back; every process that reads it must have ended."""
        self._slots.clear()  # before the memory that they point to
        self._segment.close()


@dataclass(frozen=True, slots=True)
class SlotReader:
    """Opens the slots in an engine process."""

    segment: str
    manifest: Manifest

    def attach(self, weights: Mapping[str, torch.Tensor]) -> AttachedSlots:
        """Connect to the parameters of an engine.

        Raises WeightSyncError that lists every parameter that is not as the manifest says, and
        tensors that are no parameters: pointing them elsewhere would leave the model as it is.
        """
        memory = SharedMemory(self.segment)
        slots = [_Slot(memory, self.manifest, number) for number in range(_NUM_SLOTS)]
        copy_weights(slots[0].tensors, weights, ())  # compares, copies nothing
        problems = [
            f"{name}: {tensor.dtype} in shared memory, the engine's is {weights[name].dtype}"
            for name, tensor in slots[0].tensors.items()
            if tensor.dtype != weights[name].dtype
        ]
        problems += [
            f"{name}: is not the module's own parameter; give dict(module.named_parameters())"
            for name, tensor in weights.items()
            if not isinstance(tensor, torch.nn.Parameter)
        ]
        if problems:
            raise WeightSyncError("weights cannot be shared:\n" + "\n".join(sorted(problems)))
        return AttachedSlots(memory, slots, weights)


class AttachedSlots:
    """The engine's end of the shared memory: its parameters lie in it."""

    def __init__(
        self, memory: SharedMemory, slots: list[_Slot], weights: Mapping[str, torch.Tensor]
    ):
        self._memory = memory  # kept: what the parameters point to goes with it
        self._slots = slots
        self._weights = weights

    def take(self, version: int, slot: int) -> None:
        """Point every parameter into a slot; one on another device is copied instead.

        Raises WeightSyncError, and changes nothing, when the slot's version, number of tensors or
        a checksum is not as announced.
        """
        chosen = self._slots[slot]
        found, count, *sums = map(int, chosen.header)
        if found != version:
            raise WeightSyncError(f"slot {slot} holds version {found}, not {version}")
        if count != len(self._weights):
            raise WeightSyncError(f"slot {slot} holds {count} tensors, not {len(self._weights)}")
        wrong = [
            name
            for name, expected in zip(chosen.tensors, sums, strict=True)
            if chosen.checksum(name) != expected
        ]
        if wrong:
            raise WeightSyncError(f"slot {slot} has wrong checksums for: {', '.join(wrong)}")
        with torch.no_grad():
            for name, parameter in self._weights.items():
                if parameter.device.type == "cpu":
                    parameter.data = chosen.tensors[name]
                else:
                    parameter.copy_(chosen.tensors[name])


class WeightReceivers(Protocol):
    """The engine processes, as far as weights concern them."""

    async def free_slot(self) -> int:
        """Wait until a slot may be written, and return it."""
        ...

    async def switch(self, order: TakeWeights) -> None:
        """Make every engine take a slot, or none."""
        ...


class SlotWeights:
    """Publishes the trainer's weights to engine processes; satisfies ``WeightLink``."""

    def __init__(
        self,
        source: Mapping[str, torch.Tensor],
        slots: WeightSlots,
        receivers: WeightReceivers,
        compute: ComputeThread,
    ):
        self._source = source
        self._slots = slots
        self._receivers = receivers
        self._compute = compute
        self._turn = asyncio.Lock()

    async def publish(self, version: int) -> None:
        """Write a free slot beside running generation; return when every live engine uses it.

        Raises WeightSyncError, with the engines at their old version, when a check fails, and
        EngineDied when no engine is left.
        """
        async with self._turn:
            slot = await self._receivers.free_slot()
            await self._compute.call(self._slots.write, slot, version, self._source)
            await self._receivers.switch(TakeWeights(version, slot))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
