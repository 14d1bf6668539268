"""The outputs that the documentation shows are what its commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lagzero.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "simulator.md"
SHOWN = re.findall(
    r"```\n\$ lagzero (simulate [^\n]*)\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)


def test_the_page_shows_commands():
    assert len(SHOWN) >= 8


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[each[0][:60] for each in SHOWN])
def test_a_command_of_the_page_prints_what_the_page_shows(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
):
    main(command.split())
    said = capsys.readouterr()
    assert (said.out + said.err).rstrip() == output
