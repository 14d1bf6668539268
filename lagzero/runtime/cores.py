"""Which CPU cores each process of a run works on."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreSets:
    """Disjoint sets of cores: one for each engine process, the rest for the trainer."""

    engines: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]


def core_sets(num_engines: int, threads: int) -> CoreSets | None:
    """Give each engine ``threads`` cores, from the last ones down.

    Returns None where that leaves no core for the trainer, or where a system has no such sets.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    first = len(cores) - num_engines * threads
    if first < 1:
        return None
    starts = range(first, len(cores), threads)
    engines = tuple(tuple(cores[at : at + threads]) for at in starts)
    return CoreSets(engines, tuple(cores[:first]))


def stay_on(cores: tuple[int, ...]) -> None:
    """Keep the calling thread, and threads that it starts, on these cores."""
    os.sched_setaffinity(0, cores)
