"""Starting without looking for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from lagzero.runtime.collector import without_collector


class Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_nothing_is_collected_within_and_garbage_is_gone_afterwards():
    with without_collector():
        knot = weakref.ref(Knot())
        kept = [[number] for number in range(100_000)]  # many times what starts a collection
        assert not gc.isenabled() and knot() is not None
    assert gc.isenabled() and knot() is None
    assert gc.get_freeze_count() > len(kept)


def test_it_collects_again_when_a_start_fails():
    with pytest.raises(OSError), without_collector():
        raise OSError
    assert gc.isenabled()


def test_what_is_made_later_is_collected_as_ever():
    with without_collector():
        pass
    knot = weakref.ref(Knot())
    gc.collect()
    assert knot() is None


def test_it_imports_nothing_that_takes_time():
    code = "import sys, lagzero.runtime.collector; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
