"""Planning, scheduling and asking for help must not wait for torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lagzero"
ROOMS = ("algorithms", "schedule", "prepare", "observe", "explain", "data", "plan")
SINGLE = ("types", "protocols", "errors", "loop", "evaluate", "cli")
HEAVY = "torch transformers peft accelerate datasets pyarrow reasoning_gym"


def modules(room: str) -> list[str]:
    names = [p.stem for p in sorted((PACKAGE / room).glob("*.py")) if p.stem != "__init__"]
    return [f"lagzero.{room}.{name}" for name in names]


def loaded(code: str) -> str:
    """Run code in a fresh interpreter and return the heavy packages that it loaded."""
    tail = f"\nimport sys; print(*[m for m in '{HEAVY}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].strip()


@pytest.mark.parametrize("room", ROOMS)
def test_a_torch_free_room_imports_without_torch(room: str):
    assert modules(room), f"no modules in {room}"
    assert loaded("\n".join(f"import {module}" for module in modules(room))) == ""


@pytest.mark.parametrize("name", SINGLE)
def test_a_torch_free_module_imports_without_torch(name: str):
    assert loaded(f"import lagzero.{name}") == ""


def test_the_configuration_imports_without_torch():
    names = sorted(path.stem for path in PACKAGE.glob("config*.py"))
    assert "config_load" in names
    assert loaded("\n".join(f"import lagzero.{name}" for name in names)) == ""


def test_help_is_shown_without_torch():
    code = (
        "import sys\nfrom lagzero.cli import main\nsys.argv = ['lagzero', '--help']\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code"
    )
    assert loaded(code) == ""


def test_the_check_itself_sees_torch():
    assert loaded("import sys, types; sys.modules['torch'] = types.ModuleType('torch')") == "torch"
