"""The outputs that the documentation shows are what its commands print."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from lagzero.cli import main
from lagzero.plan.published import main as published

ROOT = Path(__file__).parents[3]


def shown(command: str) -> list[tuple[str, str]]:
    """Find (command, output) of both pages, for commands that begin so."""
    text = "".join((ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in PAGES)
    return re.findall(rf"```\n\$ {command}([^\n]*)\n(.*?)\n```", text, re.DOTALL)


PAGES = ("simulator", "asynchrony")
SIMULATED, PLOTTED = shown("lagzero "), shown("python bench/plots.py ")
PUBLISHED = shown("python -m lagzero.plan.published")


def test_the_pages_show_commands():
    assert (len(SIMULATED) >= 14, len(PLOTTED), len(PUBLISHED)) == (True, 4, 1)


@pytest.mark.parametrize(("command", "output"), SIMULATED, ids=[each[0][:60] for each in SIMULATED])
def test_a_command_of_a_page_prints_what_the_page_shows(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
):
    main(command.split())
    said = capsys.readouterr()
    assert (said.out + said.err).rstrip() == output


@pytest.mark.parametrize(("words", "output"), PLOTTED, ids=[each[0] for each in PLOTTED])
def test_the_numbers_of_a_plot_are_what_the_page_shows(
    words: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["plots.py", *words.split()])
    runpy.run_path(str(ROOT / "bench" / "plots.py"), run_name="__main__")
    assert capsys.readouterr().out.rstrip() == output


def test_every_plot_is_on_a_page_and_there():
    pages = (ROOT / "docs").glob("*.md")
    images = {
        name
        for page in pages
        for name in re.findall(r"\(img/(\w+\.png)\)", page.read_text("utf-8"))
    }
    assert images == {each.name for each in (ROOT / "docs" / "img").glob("*.png")}


@pytest.mark.long
def test_the_published_comparison_is_what_the_page_shows(capsys: pytest.CaptureFixture[str]):
    published([])
    assert capsys.readouterr().out.rstrip() == PUBLISHED[0][1]
