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
        ({}, ["5000", "active"]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", None]),
        ({"OMP_WAIT_POLICY": "active"}, [None, "active"]),
    ],
)
def test_a_command_sets_it(given: dict[str, str], expected: list[str | None]):
    env = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    code = (
        "import os, sys\nfrom lagzero.cli import main\nmain(['train', 'missing.yaml'])\n"
        f"print([os.environ.get(name) for name in {NAMES}], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == f"{expected} False", done.stderr
