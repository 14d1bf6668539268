"""What is installed is what is declared."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text().splitlines()
PINS = {
    line.split("==")[0]: line.split("==")[1].split(" ;")[0]
    for line in LOCK
    if line and not line.startswith("#")
}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_each_constraint_is_one_exact_public_version():
    for line in LOCK:
        pattern = r'#.*|[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_version >= "3\.11")?'
        assert re.fullmatch(pattern, line), line
    assert PINS["torch"] == "2.13.0"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_each_direct_requirement_is_pinned_and_ranged_in_the_project():
    import tomllib  # pyright: ignore[reportMissingImports]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [*project["dependencies"], *extras["dev"], *extras["parquet"], *extras["reasoning-gym"]]
    for requirement in used:
        name = re.split(r"[\[<>=!~ ]", requirement)[0]
        pinned = canonical(name) in PINS
        assert pinned != (name == "triton"), f"{name} is not in requirements.lock"
        assert ">=" in requirement
        assert "==" not in requirement.split(";")[0]


def test_ci_lints_and_tests_and_stops_at_the_first_failure():
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in script
    assert script[-3:] == ["make lint", "make test", "make test-long"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
