"""How much memory the machine can still give, and tensors that take theirs only when written."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

_IF_UNKNOWN = 1 << 30


def lazy_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of any size; on a CPU, pages take memory once they are written to.

    Always asked of the system itself: what the C library has kept of freed blocks (see
    ``keep_freed_memory``) would be written with zeros at once. Unmapped with the last view of it.
    In huge pages where the system has them: a cache that is read here and there waits for the
    processor to find its pages more than for their contents otherwise.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(size, dtype=dtype, device=device)
    if hasattr(mmap, "MAP_PRIVATE"):
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=dtype).view(size)  # pyright: ignore[reportUnknownMemberType]


def take_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Write zeros to tensors on a CPU whose memory may not be there yet, by as many threads as
    torch has.

    Left to the first use, all threads of that would wait for the one that asks the system.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        done = [threads.submit(ctypes.memset, each.data_ptr(), 0, each.nbytes) for each in tensors]
        for each in done:
            each.result()


_ALIGNED = 64  # bytes: a processor's line


def empty(size: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor on the CPU whose memory, once freed, serves the next of its size.

    torch asks the C library for aligned memory, and glibc finds none in a freed block unless that
    is larger by an alignment: of equal tensors made in turn each took new memory from the system.
    Large ones lie in huge pages where the system has them.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    tensor = torch.from_numpy(memory[start : start + num_bytes])  # pyright: ignore
    return tensor.view(dtype).view(torch.Size(size))


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can be taken on a device without pushing anything else out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_system_bytes()


def free_system_bytes(root: Path = Path("/")) -> int:
    """Return the system memory that this process can still take.

    On Linux what the kernel counts as available, which includes caches that it would give up, and
    at most what the process's control groups leave; elsewhere half of all memory. ``root`` holds
    ``proc`` and ``sys``.
    """
    available = _kilobytes_available(root / "proc" / "meminfo")
    if available is None:
        return _half_of_all()
    return max(0, min([available * 1024, *_left_in_groups(root)]))


def _kilobytes_available(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1])
    return None


def _half_of_all() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return _IF_UNKNOWN


def _left_in_groups(root: Path) -> list[int]:
    """Return what each memory limit of the process's groups, v1 and v2, and their parents leaves.

    Inside a container the path that /proc names may not exist; its own group is at the mount then.
    """
    try:
        groups = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys" / "fs" / "cgroup"
    left: list[int] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = mount / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (bytes_left := _left_in(group, *files)) is not None:
                left.append(bytes_left)
    return left


def _left_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Return limit - usage; file pages that the kernel drops when asked count as left."""
    try:
        left = int((group / limit).read_text()) - int((group / usage).read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                left += int(value)
    return left
