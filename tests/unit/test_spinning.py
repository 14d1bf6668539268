"""How long math threads spin is set before torch is loaded, unless the user has said."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["1000", None]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", None]),
        ({"OMP_WAIT_POLICY": "active"}, [None, "active"]),
    ],
)
def test_importing_the_package_sets_it(given: dict[str, str], expected: list[str | None]):
    env = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    code = f"import os, lagzero; print([os.environ.get(name) for name in {NAMES}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == str(expected), done.stderr
