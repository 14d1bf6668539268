"""Cores of a run's processes are disjoint, and the trainer has at least one, which may change."""

from __future__ import annotations

import os
import threading

import pytest

from lagzero.runtime.cores import CoreSets, core_halves, core_sets, move_threads, stay_on


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


@pytest.mark.parametrize(
    ("cores", "engines", "threads", "expected"),
    [
        ({0, 1}, 2, 1, (CoreSets(((0,),), (0,)), CoreSets(((1,),), (1,)))),
        ({4, 5, 6, 7, 9}, 2, 1, (CoreSets(((5,),), (4, 5)), CoreSets(((7,),), (6, 7)))),
        (
            set(range(8)),
            4,
            1,
            (CoreSets(((2,), (3,)), (0, 1, 2, 3)), CoreSets(((6,), (7,)), (4, 5, 6, 7))),
        ),
        ({0, 1, 2, 3}, 2, 2, (CoreSets(((0, 1),), (0, 1)), CoreSets(((2, 3),), (2, 3)))),
        ({0, 1, 2}, 2, 2, None),
        ({0}, 2, 1, None),
    ],
)
def test_two_halves_share_no_core_and_the_trainer_has_all_of_one(
    monkeypatch, cores, engines, threads, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    assert core_halves(engines, threads) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_threads_of_the_trainer_move_and_others_stay():
    first, *_, last = sorted(os.sched_getaffinity(0))
    if first == last:
        pytest.skip("one core")
    told, go, end = (threading.Event() for _ in range(3))
    found: dict[str, set[int]] = {}

    def work(name: str) -> None:
        assert go.wait(10)
        found[name] = os.sched_getaffinity(0)

    def trainer() -> None:
        stay_on((first,))
        child = threading.Thread(target=work, args=("child",))
        child.start()
        told.set()
        work("trainer")
        child.join(10)
        assert end.wait(10)

    other = threading.Thread(target=work, args=("other",))
    main = threading.Thread(target=trainer)
    before = os.sched_getaffinity(0)
    other.start()
    main.start()
    assert told.wait(10)
    move_threads((last,), (first,))  # nobody is there
    move_threads((first,), (last,))
    go.set()
    other.join(10)
    end.set()
    main.join(10)
    assert found == {"child": {last}, "trainer": {last}, "other": before}
    assert os.sched_getaffinity(0) == before


def test_a_system_without_core_sets_pins_nothing(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert core_sets(1, 1) is None
    assert core_halves(2, 1) is None
