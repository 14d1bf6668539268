"""Cores of a run's processes are disjoint, and the trainer keeps at least one."""

from __future__ import annotations

import os

import pytest

from lagzero.runtime.cores import CoreSets, core_sets


@pytest.mark.parametrize(
    ("cores", "engines", "threads", "expected"),
    [
        ({0, 1}, 1, 1, CoreSets(((1,),), (0,))),
        ({0, 1}, 2, 1, None),
        ({0}, 1, 1, None),
        ({2, 3, 5, 8, 9}, 2, 2, CoreSets(((3, 5), (8, 9)), (2,))),
        ({0, 1, 2, 3}, 1, 1, CoreSets(((3,),), (0, 1, 2))),
    ],
)
def test_engines_take_the_last_cores(monkeypatch, cores, engines, threads, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    assert core_sets(engines, threads) == expected


def test_a_system_without_core_sets_pins_nothing(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert core_sets(1, 1) is None
