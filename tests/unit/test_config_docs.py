"""The generated pages keep up with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from lagzero.config import Config, LossConfig
from lagzero.config_docs import comments, fill, markdown, pages
from lagzero.config_schema import dotted, keys

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("path", sorted(pages(DOCS)))
def test_a_generated_page_is_what_the_code_says(path: Path):
    assert path.read_text() == pages(DOCS)[path], "run `make docs`"


def test_every_key_is_documented():
    table = markdown()
    for path, _ in keys(Config):
        assert f"| `{dotted(tuple('N' if p == 0 else p for p in path))}` |" in table


def test_every_key_has_a_meaning():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.rstrip(" |").count(" | ") < 3] == []


def test_a_comment_stands_on_the_line_of_its_key_or_above_it():
    assert "(GSPO)" in comments(LossConfig)["ratio"]
    assert comments(LossConfig)["clip_low"] == "ratio bound 1 - clip_low; 1: none"
    assert comments(LossConfig)["clip_high"].startswith("ratio bound 1 + clip_high; ")


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="begin metrics"):
        fill("text", "metrics", "table")
