"""Fills the keys that ``algorithm: <name>`` stands for into a configuration's plain values.

What the file or the command line sets wins, a value equal to the default included, so this happens
before anything is validated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lagzero.algorithms.form import Algorithm, Like
from lagzero.algorithms.named import ALGORITHMS, TIED

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Applied:
    """A configuration's plain values with those of its algorithm filled in."""

    tree: dict[str, Any]
    filled: tuple[str, ...] = ()  # dotted paths that the algorithm set
    problems: tuple[str, ...] = ()  # what the algorithm needs and the user did not give


def apply(tree: Mapping[str, Any]) -> Applied:
    """Fill in what ``tree["algorithm"]`` stands for and ``tree`` does not set.

    ``tree`` is left as it is; blocks that get a key are copied. A name that is no algorithm fills
    in nothing: validation refuses it. A key that belongs to another one (``TIED``) is filled in
    only beside the algorithm's own choice of that.
    """
    name = tree.get("algorithm")
    algorithm = ALGORITHMS.get(name) if isinstance(name, str) else None
    if algorithm is None:
        return Applied(dict(tree))
    out, filled = dict(tree), list[str]()
    for path, setting in algorithm.settings.items():
        if _look_up(tree, path) is _ABSENT and _belongs(tree, algorithm, path):
            _put(out, path, _value(tree, setting.value))
            filled.append(path)
    return Applied(out, tuple(filled), tuple(_problems(tree, algorithm, filled)))


def _look_up(tree: Mapping[str, Any], path: str) -> Any:
    """Return what lies at a dotted path, ``_ABSENT`` where nothing does.

    A path that ends early, in null or in something else than a block, is set by the user too: what
    lies there is returned.
    """
    place: Any = tree
    for part in path.split("."):
        if not isinstance(place, Mapping):
            return place
        place = cast("Mapping[str, Any]", place).get(part, _ABSENT)
        if place is _ABSENT:
            return _ABSENT
    return place


def _belongs(tree: Mapping[str, Any], algorithm: Algorithm, path: str) -> bool:
    """Say whether the keys that ``path`` hangs on are as the algorithm has them.

    A number of the user's own is another value of the same choice, unless it is 0; any other
    difference is another choice.
    """
    for owner in TIED.get(path, ()):
        given = _look_up(tree, owner)
        if given is _ABSENT:
            continue
        own = algorithm.settings.get(owner)
        if own is None:
            kept = not given
        elif isinstance(own.value, float):
            kept = given != 0
        else:
            kept = given == own.value
        if not kept:
            return False
    return True


def _value(tree: Mapping[str, Any], value: Any) -> Any:
    if not isinstance(value, Like):
        return value
    given = _look_up(tree, value.path)
    return given if isinstance(given, (int, float)) else value.default


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Write a value where nothing is, copying the blocks on the way."""
    *parents, last = path.split(".")
    place = tree
    for part in parents:
        place[part] = dict(place.get(part, {}))
        place = place[part]
    place[last] = value


def _problems(tree: Mapping[str, Any], algorithm: Algorithm, filled: list[str]) -> Iterator[str]:
    for path, what in algorithm.needs.items():
        found = _look_up(tree, path)
        if found is _ABSENT or found is None:
            yield f"{path}: missing; algorithm {algorithm.name} needs {what}"
    blocks = [_look_up(tree, path.rpartition(".")[0]) for path in algorithm.settings]
    if not filled and all(block is None or isinstance(block, Mapping) for block in blocks):
        yield (
            f"algorithm: {algorithm.name} decides nothing here, because each of its keys is given "
            "(a run's config.yaml has all of them written out); set the keys themselves, or start "
            "a new run from a recipe"
        )
