"""A configuration explained: as text for people, and as JSON of a fixed shape."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from lagzero.algorithms.form import Algorithm, Like
from lagzero.algorithms.named import ALGORITHMS
from lagzero.config import Config
from lagzero.explain.cautions import Caution, cautions
from lagzero.explain.choices import Choice, choices, value_at
from lagzero.explain.derived import Quantity, as_text, quantities
from lagzero.explain.formula import Formula, objective
from lagzero.explain.numbers import shown
from lagzero.explain.peers import PEERS
from lagzero.schedule.named import written_out

_WIDTH = 100


def as_json(config: Config) -> dict[str, Any]:
    """Return everything that ``text`` says; ``format`` changes when the shape does.

    A staleness preset is written out. Raises ConfigError where that cannot be.
    """
    config = written_out(config)
    formula = objective(config)
    return {
        "format": 1,
        "algorithm": _algorithm_json(config),
        "objective": {"loss": formula.loss, "symbols": formula.symbols},
        "derived": {each.key: each.value for each in quantities(config)},
        "cautions": [
            {"path": each.path, "text": each.text, "source": each.source}
            for each in cautions(config)
        ],
        "choices": {
            each.path: {
                "value": each.value,
                "default_of": list(each.same),
                "others": dict(each.others),
            }
            for each in choices(config)
        },
    }


def text(config: Config) -> str:
    """Return the whole explanation. A staleness preset is written out; raises as ``as_json``."""
    config = written_out(config)
    parts = [
        _algorithm_text(config),
        _objective_text(objective(config)),
        _derived_text(quantities(config)),
        _choices_text(choices(config)),
        _cautions_text(cautions(config)),
    ]
    return "\n\n".join(part for part in parts if part)


def departures(config: Config, algorithm: Algorithm) -> dict[str, tuple[Any, Any]]:
    """Map each key that is not as the algorithm has it to (its value here, the algorithm's)."""
    out: dict[str, tuple[Any, Any]] = {}
    for path, setting in algorithm.settings.items():
        own: Any = setting.value
        if isinstance(own, Like):
            own = value_at(config, own.path)
        here = value_at(config, path)
        if here != own:
            out[path] = (here, own)
    return out


def _named(config: Config) -> Algorithm | None:
    return None if config.algorithm is None else ALGORITHMS[config.algorithm]


def _algorithm_json(config: Config) -> dict[str, Any] | None:
    algorithm = _named(config)
    if algorithm is None:
        return None
    return {
        "name": algorithm.name,
        "source": algorithm.source,
        "departures": {
            path: {"here": here, "published": own}
            for path, (here, own) in departures(config, algorithm).items()
        },
        "lacks": list(algorithm.lacks),
    }


def _algorithm_text(config: Config) -> str:
    algorithm = _named(config)
    if algorithm is None:
        return ""
    lines = [*_wrapped(f"{algorithm.title}: {algorithm.sentence}", "", "  ")]
    lines += _wrapped(algorithm.source, "  ", "  ")
    for path, (here, own) in departures(config, algorithm).items():
        lines += _wrapped(
            f"{path} is {shown(here)} here; {algorithm.title} has {shown(own)}", "  - ", "    "
        )
    for lack in algorithm.lacks:
        lines += _wrapped(f"not included: {lack}", "  - ", "    ")
    return "\n".join(lines)


def _objective_text(formula: Formula) -> str:
    lines = [f"  {formula.loss}", ""]
    width = max(len(symbol) for symbol in formula.symbols)
    for symbol, meaning in formula.symbols.items():
        lines += _wrapped(meaning, f"  {symbol:<{width}}  ", " " * (width + 4))
    return "\n".join(["What is minimised", "", *lines])


def _derived_text(found: Iterable[Quantity]) -> str:
    rows = [(each.label, as_text(each), each.how) for each in found]
    label, value = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines: list[str] = []
    for name, number, how in rows:
        start = f"  {name:<{label}}  {number:>{value}}  "
        lines += _wrapped(how, start, " " * len(start))
    return "\n".join(["What follows", "", *lines])


def _choices_text(found: Iterable[Choice]) -> str:
    rows = [(each.path, shown(each.value), _whose(each)) for each in found]
    path, value = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines: list[str] = []
    for name, here, whose in rows:
        start = f"  {name:<{path}}  {here:<{value}}  "
        lines += _wrapped(whose, start, " " * len(start))
    versions = "; ".join(f"{peer.name} {peer.version.split(',')[0]}" for peer in PEERS)
    lines += ["", *_wrapped(f"Defaults as of {versions} (docs/objectives.md)", "  ", "  ")]
    return "\n".join(["Whose default each choice is", "", *lines])


def _whose(choice: Choice) -> str:
    same = f"default of {', '.join(choice.same)}" if choice.same else "none of these"
    by_value: dict[str, list[str]] = {}
    for name, value in choice.others:
        by_value.setdefault(shown(value), []).append(name)
    others = "; ".join(f"{', '.join(names)} {value}" for value, names in by_value.items())
    return f"{same} ({others})" if others else same


def _cautions_text(found: list[Caution]) -> str:
    lines: list[str] = []
    for each in found:
        lines += _wrapped(f"{each.path}: {each.text}", "  - ", "    ")
        lines += _wrapped(each.source, "    ", "    ")
    return "\n".join(["Known to bias or to surprise", "", *lines]) if found else ""


def _wrapped(words: str, first: str, later: str) -> Iterator[str]:
    yield from textwrap.wrap(
        words,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
