"""The command ``lagzero simulate``: flags are the keys of a ``Scenario``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lagzero.errors import ConfigError
from lagzero.nearest import nearest
from lagzero.plan.report import MAX_LANES, can_draw, draw, table
from lagzero.plan.scenario import NAMES, Scenario, as_text, read_keys, with_keys
from lagzero.plan.simulate import Result, simulate

_OWN = ("sweep", "json", "timeline", "help")


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    keys: tuple[tuple[str, str], ...] = ()
    sweep: tuple[str, tuple[str, ...]] | None = None
    json: str | None = None
    timeline: str = "auto"  # auto, always, never
    help: bool = False


def run(words: Sequence[str]) -> int:
    """Simulate what the words ask for, print it and return 0. Raises ConfigError."""
    request = parse(words)
    if request.help:
        print(usage())
        return 0
    base = with_keys(Scenario(), request.keys) if request.sweep is None else None
    if base is not None:
        scenarios, titles = [base], [""]
    else:
        name, values = request.sweep or ("", ())
        scenarios = _swept(request.keys, name, values)
        titles = [f"{name}={value}" for value in values]
    small = [s.lanes is not None and s.lanes <= MAX_LANES for s in scenarios]
    record = request.timeline != "never"
    results = [simulate(s, record and few) for s, few in zip(scenarios, small, strict=True)]
    if request.json is not None:
        body = [result.as_json() for result in results]
        Path(request.json).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    try:
        _show(results, titles, request)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough; the exit must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _swept(keys: Sequence[tuple[str, str]], name: str, values: Sequence[str]) -> list[Scenario]:
    """Make a scenario for each value. Problems are told once, not once a value."""
    scenarios: list[Scenario] = []
    problems: list[str] = []
    for value in values:
        try:
            scenarios.append(with_keys(Scenario(), [*keys, (name, value)]))
        except ConfigError as error:
            problems += [each for each in error.problems if each not in problems]
    if problems:
        raise ConfigError(problems)
    return scenarios


def _show(results: Sequence[Result], titles: Sequence[str], request: Request) -> None:
    for result, title in zip(results, titles, strict=True):
        if (
            request.timeline != "never"
            and result.spans
            and (request.timeline == "always" or can_draw(result))
        ):
            print(f"{title}\n{draw(result)}\n" if title else f"{draw(result)}\n")
    print(table(results, titles))
    for result, title in zip(results, titles, strict=True):
        if len(result.steps) < (asked := result.scenario.steps):
            where = f"{title}: " if title else ""
            print(f"note: {where}the data ended after {len(result.steps)} of {asked} steps")


def parse(words: Sequence[str]) -> Request:
    """Read ``--name value`` and ``--name=value``. Raises ConfigError with every problem."""
    keys: list[tuple[str, str]] = []
    own: dict[str, str] = {}
    problems: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return Request(help=True)
        if not word.startswith("--"):
            problems.append(f"'{word}' is not understood; a flag is written --name value")
            continue
        flag, has_value, value = word[2:].partition("=")
        name = flag.replace("-", "_")
        if name not in (*NAMES, *_OWN):
            problems.append(_unknown(flag))
            if not has_value and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                problems.append(f"--{flag} needs a value, such as --{flag} {_example(name)}")
                continue
            value = rest.pop(0)
        if name in own or (name in NAMES and name in dict(keys)):
            problems.append(f"--{flag} is given twice")
        elif name in _OWN:
            own[name] = value
        else:
            keys.append((name, value))
    sweep = _sweep(own["sweep"], problems) if "sweep" in own else None
    if sweep is not None and sweep[0] in dict(keys):
        problems.append(f"--{_flag(sweep[0])} is given and swept; leave one out")
    mode = own.get("timeline", "auto")
    if mode not in ("auto", "always", "never"):
        problems.append(f"--timeline: must be one of auto, always, never, not '{mode}'")
    if "json" in own and not Path(own["json"]).absolute().parent.is_dir():
        problems.append(f"--json: {own['json']} is in a folder that does not exist")
    problems += read_keys(keys)[1]
    if problems:
        raise ConfigError(problems)
    return Request(tuple(keys), sweep, own.get("json"), mode)


def _sweep(text: str, problems: list[str]) -> tuple[str, tuple[str, ...]] | None:
    name, has_values, values = text.partition("=")
    name = name.replace("-", "_")
    if name not in NAMES:
        problems.append(f"--sweep: {_unknown(name)[2:]}")
    elif not has_values or not values:
        problems.append(f"--sweep needs values, such as --sweep {name}={_example(name)}")
    else:
        # distributions hold commas themselves, so they are set apart by a semicolon
        return name, tuple(
            values.split(";" if name in ("lengths", "score", "decode_steps") else ",")
        )
    return None


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _unknown(flag: str) -> str:
    near = nearest(flag.replace("-", "_"), (*NAMES, *_OWN), 0.0)
    return f"--{flag} is unknown; did you mean --{_flag(near or 'help')}?"


def _example(name: str) -> str:
    own = {
        "sweep": "max_lag=0,1,2,4",
        "json": "out.json",
        "timeline": "never",
        "decode_steps": "1:0.02,64:0.03",
    }
    if name in own:
        return own[name]
    default = NAMES[name].default
    return "2" if default is None else as_text(default)


def usage() -> str:
    """Return the help text: every key with its default and meaning."""
    lines = [
        "usage: lagzero simulate [--name value ...]",
        "",
        "Runs the training loop in virtual time with modelled engines and trainer.",
        "",
        "  --sweep NAME=V,V,...   one column a value (separate distributions by ;)",
        "  --json FILE            write all figures, step by step",
        "  --timeline MODE        auto (small cases of lanes), always, never",
        "",
    ]
    for name, each in NAMES.items():
        lines.append(f"  --{_flag(name)} {as_text(each.default)}")
        lines.append(f"        {each.metadata['help']}")
    return "\n".join(lines)
