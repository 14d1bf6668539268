"""Which CPU cores each process of a run works on, and how its math threads wait for each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_THREADS = Path("/proc/self/task")
_SPINS = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "5000"}


def limit_spinning() -> None:
    """Set how long OpenMP's threads spin, for this process and its engines, unless the user did.

    Math threads wait for each other some hundred times a forward pass. One that goes to sleep at
    once must be woken for more than it waited; one that spins on holds a core on which, beside
    other work, the last thread could begin (figures in docs/log.md). The policy makes the count
    hold as well where several threads of a process have math threads of their own. Read when torch
    is loaded.
    """
    if not _SPINS.keys() & os.environ.keys():
        os.environ.update(_SPINS)


@dataclass(frozen=True, slots=True)
class CoreSets:
    """Disjoint sets of cores: one for each engine process, the rest for the trainer."""

    engines: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]


def core_sets(num_engines: int, threads: int) -> CoreSets | None:
    """Give each engine ``threads`` cores, from the last ones down.

    Returns None where that leaves no core for the trainer, or where a system has no such sets.
    """
    cores = _usable()
    first = len(cores) - num_engines * threads
    if first < 1:
        return None
    return CoreSets(_runs(cores[first:], threads), tuple(cores[:first]))


def core_halves(num_engines: int, threads: int) -> tuple[CoreSets, CoreSets] | None:
    """Halve the cores, and give each engine ``threads`` of its half, from the last ones down.

    The trainer of a half is all of it: its engines stand still meanwhile. Of an odd number the
    last core is left over. Returns None where a half is too small, or where a system has no such
    sets, or does not tell a process's threads (see ``move_threads``).
    """
    cores = _usable()
    size, taken = len(cores) // 2, num_engines // 2 * threads
    if size < max(taken, 1) or not _THREADS.is_dir():
        return None
    first, second = (cores[at : at + size] for at in (0, size))
    return (
        CoreSets(_runs(first[size - taken :], threads), tuple(first)),
        CoreSets(_runs(second[size - taken :], threads), tuple(second)),
    )


def _usable() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _runs(cores: Sequence[int], length: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(cores[at : at + length]) for at in range(0, len(cores), length))


def stay_on(cores: tuple[int, ...]) -> None:
    """Keep the calling thread, and threads that it starts, on these cores."""
    os.sched_setaffinity(0, cores)


def move_threads(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Move this process's threads that are kept on exactly the ``old`` cores to the ``new`` ones.

    After ``stay_on`` those are the thread that called it and what it started, such as a math
    library's own threads; nobody else lists them.
    """
    for thread in _THREADS.iterdir():
        number = int(thread.name)
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if os.sched_getaffinity(number) == set(old):
                os.sched_setaffinity(number, new)
