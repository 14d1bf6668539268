"""The library is built once, and what keeps it from being built is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from lagzero.native import library as module

build = module.library.__wrapped__  # without the cache of this process


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "lagzero"


def test_it_is_built_once_and_leaves_nothing_else_behind(folder, monkeypatch):
    assert build().forward and build().draw
    (made,) = folder.iterdir()
    before = made.stat().st_mtime_ns
    monkeypatch.setattr(module, "_build", _must_not_build)
    assert build().forward
    assert made.stat().st_mtime_ns == before


def _must_not_build(compiler: str, path: Path) -> None:
    raise AssertionError("built again")


def test_other_sources_are_another_library(folder, monkeypatch):
    build()
    monkeypatch.setattr(module, "_FLAGS", (*module._FLAGS, "-DOTHER"))
    build()
    assert len(list(folder.iterdir())) == 2


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(module.NotBuilt, match="no C compiler no-such-cc"):
        build()


def test_a_failing_compiler_is_quoted_and_leaves_no_library(folder, tmp_path, monkeypatch):
    fake = tmp_path / "cc"
    fake.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.c:1: error: bad' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(module.NotBuilt, match=r"x\.c:1: error: bad"):
        build()
    assert not list(folder.iterdir())


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(module.NotBuilt, match="cannot be written"):
        build()


def test_every_source_counts(folder):
    """A source that the key forgot would leave an old library in use."""
    here = Path(module.__file__).parent
    found = {p.name for p in here.iterdir() if p.suffix in (".c", ".h")}
    assert found == set(module.SOURCES)
