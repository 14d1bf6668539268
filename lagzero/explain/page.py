"""The generated part of docs/objectives.md: each algorithm, and defaults of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lagzero.algorithms.form import Algorithm, Like
from lagzero.algorithms.named import ALGORITHMS
from lagzero.config import Config
from lagzero.config_load import parse_config
from lagzero.explain.formula import objective
from lagzero.explain.numbers import shown
from lagzero.explain.peers import PEERS, known_paths

_TEACHER = "teacher"


def markdown() -> str:
    """Return the generated part of the page."""
    return "\n".join([*_overview(), "", *_each(), *_peers()])


def example(algorithm: Algorithm) -> Config:
    """Return the smallest configuration that trains with an algorithm, all else at its default."""
    tree: dict[str, Any] = {
        "algorithm": algorithm.name,
        "data": {"train": [{"kind": "arithmetic"}]},
        "score": {"rewards": [{"use": "reward"}]},
        "eval": {"before": False, "after": False},
    }
    for path in algorithm.needs:
        block, key = path.split(".")
        tree[block] = {key: _TEACHER}
    return parse_config(tree)


def _overview() -> Iterator[str]:
    yield "| `algorithm` | what is minimised | source |"
    yield "|---|---|---|"
    for algorithm in ALGORITHMS.values():
        loss = objective(example(algorithm)).loss
        yield f"| [`{algorithm.name}`](#{algorithm.name}) | `{loss}` | {algorithm.source} |"


def _each() -> Iterator[str]:
    for algorithm in ALGORITHMS.values():
        yield from [f"#### `{algorithm.name}`", "", f"{algorithm.title}. {algorithm.sentence}", ""]
        yield from ["```text", *_formula(algorithm), "```", ""]
        yield from ["| key | value | from |", "|---|---|---|"]
        for path, setting in algorithm.settings.items():
            own = setting.value
            value = f"that of `{own.path}`" if isinstance(own, Like) else f"`{shown(own)}`"
            yield f"| `{path}` | {value} | {_cell(setting.where)} |"
        yield ""
        for path, what in algorithm.needs.items():
            yield f"- To be given: `{path}`, {what.replace(' there,', ',')}."
        if algorithm.sizes:
            yield f"- Sizes of the source: {algorithm.sizes}."
        for lack in algorithm.lacks:
            yield f"- Not included: {lack}."
        if algorithm.needs or algorithm.sizes or algorithm.lacks:
            yield ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _formula(algorithm: Algorithm) -> Iterator[str]:
    formula = objective(example(algorithm))
    yield formula.loss
    symbols = {name: text for name, text in formula.symbols.items() if name not in ("i, t", "pi")}
    width = max(len(symbol) for symbol in symbols)
    for symbol, meaning in symbols.items():
        yield f"  {symbol:<{width}}  {meaning}"


def _peers() -> Iterator[str]:
    yield from ["### Defaults of other libraries", ""]
    yield f"| key | {' | '.join(peer.name for peer in PEERS)} |"
    yield f"|---|{'---|' * len(PEERS)}"
    for path in known_paths():
        cells = [
            f"`{shown(peer.defaults[path].value)}` ({peer.defaults[path].name})"
            if path in peer.defaults
            else ""
            for peer in PEERS
        ]
        yield f"| `{path}` | {' | '.join(cells)} |"
    yield ""
    for peer in PEERS:
        yield f"- {peer.name}: {peer.source} ({peer.version})"
