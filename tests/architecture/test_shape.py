"""The shape of the program: small files, short functions, flat classes, bare rooms."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lagzero"
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(PACKAGE.rglob("__init__.py"))

FILE_LINES, FUNCTION_LINES, LOOP_LINES = 400, 60, 200


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which may be as long as the mathematics asks."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return total
    return total - (first.end_lineno - first.lineno + 1)


def test_there_is_something_to_look_at():
    assert len(MODULES) > 20
    assert len(ROOMS) > 8


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_files_are_short(path: Path):
    limit = LOOP_LINES if path == PACKAGE / "loop.py" else FILE_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) < limit


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_functions_are_short(path: Path):
    long = {f.name: n for f in functions(path) if (n := code_lines(f)) >= FUNCTION_LINES}
    assert long == {}


@pytest.mark.parametrize("path", ROOMS, ids=name)
def test_a_room_holds_a_docstring_and_nothing_else(path: Path):
    assert ast.get_docstring(tree(path))
    assert len(tree(path).body) == 1


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = [n for path in MODULES for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)]
    return {node.name: node for node in nodes}


def ancestors(class_name: str) -> int:
    """How many classes of this package lie above a class, plain exceptions and protocols apart."""
    node = classes().get(class_name)
    if node is None:
        return 0
    above = [base.id for base in node.bases if isinstance(base, ast.Name)]
    ours = [base for base in above if base in classes() and not hasattr(builtins, base)]
    return max((1 + ancestors(base) for base in ours), default=0)


def test_inheritance_has_depth_one():
    assert {c: d for c in classes() if (d := ancestors(c)) > 1} == {}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_relative_or_star_imports(path: Path):
    nodes = [n for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom)]
    assert [n.lineno for n in nodes if n.level or any(a.name == "*" for a in n.names)] == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_global_statements(path: Path):
    assert [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.Global)] == []
