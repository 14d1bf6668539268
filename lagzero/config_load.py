"""From a YAML file and ``--a.b=c`` overrides to a checked ``Config``, or every problem at once.

Imports neither torch nor a model library: a wrong configuration is refused within a second.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeGuard, cast

import pydantic
from pydantic_core import ErrorDetails

from lagzero import config_check, config_yaml
from lagzero.algorithms.apply import apply
from lagzero.config import Block, Config
from lagzero.config_schema import Path, blocks, child, describe, dotted, locate, suggest
from lagzero.errors import ConfigError
from lagzero.nearest import nearest

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a configuration is checked against, besides its types.

    training: whether what only training needs counts. parts: for a type of block, a function
    (path, block) -> problems, which starts each with the path; it sees every sound block of its
    type, so that rooms above this one can report their own problems with all others.
    """

    training: bool = True
    parts: Mapping[type[Block], Callable[[str, Any], Iterable[str]]] = field(
        default_factory=dict[type[Block], Callable[[str, Any], Iterable[str]]]
    )


def load_config(
    path: str | FilePath, overrides: Sequence[str] = (), rules: Rules | None = None
) -> Config:
    """Read a configuration file, apply overrides in order, and check the whole.

    path: a YAML file. overrides: ``--a.b=c`` each; the value is YAML, list items go by index
    (``--data.train.0.size=64``), and a list's length as index appends. Then ``algorithm`` fills in
    the keys that it stands for and that neither sets.
    Raises ConfigError with every problem: unreadable YAML, repeated or unknown keys, wrong types,
    values out of range, and combinations that cannot work.
    """
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error})"]) from error
    raw, yaml_problems = config_yaml.parse(text)
    problems = [f"{path}: {problem}" for problem in yaml_problems]
    if not isinstance(raw, dict):
        if not problems:
            problems = [f"{path}: expected keys with values, found {_found(raw)}"]
        raise ConfigError(problems)
    tree = cast(Tree, raw)
    sources: dict[str, str] = {}
    for override in overrides:
        problem = _override(tree, override, sources)
        if problem is not None:
            problems.append(problem)
    rules = rules or Rules()
    applied = apply(tree)
    sources |= dict.fromkeys(applied.filled, f"algorithm: {tree.get('algorithm')}")
    problems += applied.problems if rules.training else ()
    config, more = _build(applied.tree, rules)
    problems += [_with_source(problem, sources) for problem in more]
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Check a configuration given as plain nested values. Raises ConfigError like load_config."""
    applied = apply(tree)
    config, problems = _build(applied.tree, Rules())
    problems = [*applied.problems, *problems]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def to_yaml(config: Config) -> str:
    """Write every key, defaults included, as YAML that load_config reads back equal."""
    return config_yaml.dump(config.model_dump(mode="json"))


def _flatten(config: Config) -> dict[str, Any]:
    """Map each dotted path (``train.optimizer.lr``, ``data.train.0.size``) to its plain value."""
    return dict(_leaves(config, ()))


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Map each path whose value differs to (old, new); a path that one lacks counts as None."""
    before, after = _flatten(old), _flatten(new)
    names = list(dict.fromkeys([*before, *after]))
    return {
        name: (before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    }


def _holds_blocks(value: Any) -> TypeGuard[list[Block]]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(items) and all(isinstance(item, Block) for item in items)


def _leaves(value: Any, at: Path) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Block):
        for name in type(value).model_fields:
            yield from _leaves(getattr(value, name), (*at, name))
    elif _holds_blocks(value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*at, index))
    elif isinstance(value, tuple):
        yield dotted(at), list(cast("tuple[Any, ...]", value))
    else:
        yield dotted(at), value


def _override(tree: Tree, text: str, sources: dict[str, str]) -> str | None:
    """Write one override into the tree, or say why it cannot be."""
    name, equals, value_text = text.removeprefix("--").partition("=")
    parts = name.split(".")
    if not text.startswith("--") or not equals or not all(parts):
        return f"{text}: not an override; write --a.b=c, for example --schedule.steps=20"
    value, problems = config_yaml.parse(value_text)
    if problems:
        return f"{text}: the value is {problems[0]}"
    place: Any = tree
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        key = _key(place, part, above)
        if isinstance(key, _Refusal):
            return f"--{name}: {key}"
        last = depth == len(parts) - 1
        if isinstance(place, list):
            items = cast("list[Any]", place)
            if key == len(items):
                items.append(None)
        below = value if last else _below(place, key, parts[depth + 1], tuple(parts[: depth + 1]))
        cast(Any, place)[key] = below
        place = below
    sources[name] = text
    return None


class _Refusal(str):
    """Why a part of an override's path cannot be followed."""


def _key(place: Any, part: str, above: str) -> str | int | _Refusal:
    if isinstance(place, dict):
        return part
    if isinstance(place, list):
        length = len(cast("list[Any]", place))
        if not part.isdecimal():
            return _Refusal(f"{above} is a list; say which item, for example {above}.0.{part}")
        if int(part) > length:
            return _Refusal(
                f"{above} has {length} item(s), counted from 0; {length} would append one"
            )
        return int(part)
    return _Refusal(f"{above} holds {_found(place)}, so it has no key {part}")


def _below(place: Any, key: str | int, following: str, path: tuple[str, ...]) -> Any:
    """Return what lies at a key, or a new block or list when nothing does."""
    present = place.get(key) if isinstance(place, dict) else place[key]  # pyright: ignore
    if present is not None:
        return cast(Any, present)
    _, kind = locate(Config, [int(p) if p.isdecimal() else p for p in path])
    is_list = following.isdecimal() and kind is not None and child(kind, 0) is not None
    return [] if is_list else {}


def _with_source(problem: str, sources: Mapping[str, str]) -> str:
    """Say which override set the value that a problem is about, if one did."""
    path, _, reason = problem.partition(": ")
    unknown = reason.startswith("unknown key")  # what lies below an unknown key led to it

    def is_about(name: str) -> bool:
        below = unknown and name.startswith(f"{path}.")
        return name == path or path.startswith(f"{name}.") or below

    found = [text for name, text in sources.items() if is_about(name)]
    return f"{problem} (set by {', '.join(found)})" if found else problem


def _build(tree: Tree, rules: Rules) -> tuple[Config | None, list[str]]:
    """Validate plain values; also check whatever part is sound."""
    odd = list(_not_plain(tree, ()))
    if odd:  # the rest is checked without them
        _, problems = _build(_without_odd(tree), rules)
        return None, odd + problems
    config, errors = _validate(tree)
    if config is not None:
        return config, [*config_check.check(config, training=rules.training), *_parts(tree, rules)]
    problems = _explain(errors)
    wrong = [locate(Config, error["loc"])[0] for error in errors]
    pruned = json.loads(json.dumps(tree))
    for path in wrong:
        _remove(pruned, path)
    config, _ = _validate(pruned)
    more = [] if config is None else config_check.check(config, training=rules.training)
    told = [dotted(path) for path in wrong]
    more = [*more, *_parts(pruned, rules)]
    return None, problems + [p for p in more if not any(_mentions(p, name) for name in told)]


def _mentions(problem: str, path: str) -> bool:
    """Say whether a problem speaks of a path; a single name may be an ordinary word, too."""
    end = r"\b" if "." in path else "[.:]"
    return re.search(rf"(?<![\w.]){re.escape(path)}{end}", problem) is not None


def _parts(tree: Tree, rules: Rules) -> Iterator[str]:
    """Check each block that has a rule of its own and is sound, whatever is wrong around it."""
    for path, block, values in blocks(Config, tree):
        if block in rules.parts:
            try:
                part = block.model_validate_json(json.dumps(values))
            except pydantic.ValidationError:  # told where the whole was validated
                continue
            yield from rules.parts[block](dotted(path), part)


def _validate(tree: Tree) -> tuple[Config | None, list[ErrorDetails]]:
    try:
        # JSON mode: as strict as Python mode, but a list may fill a fixed-length tuple.
        return Config.model_validate_json(json.dumps(tree)), []
    except pydantic.ValidationError as error:
        return None, error.errors(include_url=False)


def _not_plain(value: Any, at: Path) -> Iterator[str]:
    """Find what JSON cannot say: keys that are no text, infinite numbers, odd YAML types."""
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                yield f"{dotted((*at, str(key)))}: a key must be text; put {key} in quotes"
            yield from _not_plain(item, (*at, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _not_plain(item, (*at, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{dotted(at)}: found {value}; valid: a finite number"
    elif not (value is None or isinstance(value, (str, int, float))):
        yield f"{dotted(at)}: found a {type(value).__name__}; valid: text, a number, a list, keys"


def _without_odd(value: Any) -> Any:
    """Copy plain values, leaving out what ``_not_plain`` names."""
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return {k: _without_odd(v) for k, v in pairs if isinstance(k, str) and not _is_odd(v)}
    if isinstance(value, list):
        return [_without_odd(v) for v in cast("list[Any]", value) if not _is_odd(v)]
    return value


def _is_odd(value: Any) -> bool:
    return not isinstance(value, (dict, list)) and any(_not_plain(value, ()))


def _explain(errors: Sequence[ErrorDetails]) -> list[str]:
    lines: dict[str, str] = {}  # one line a path: a union reports each of its members
    for error in errors:
        path, kind = locate(Config, error["loc"])
        if error["type"] == "extra_forbidden":
            line = f"unknown key; {suggest(Config, path)}"
        elif error["type"] == "missing":
            line = f"missing; valid: {describe(kind)}"
        else:
            line = f"found {_found(error['input'])}; valid: {describe(kind)}"
            line += _near_choice(error)
        lines.setdefault(dotted(path), line)
    below = tuple(lines)  # "expected text" for a list is noise beside the fault inside the list
    return [
        f"{path}: {line}"
        for path, line in lines.items()
        if not any(other.startswith(f"{path}.") for other in below)
    ]


def _near_choice(error: ErrorDetails) -> str:
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    choices = str(error.get("ctx", {}).get("expected", "")).replace(" or ", ", ").split(", ")
    near = nearest(error["input"], [c.strip("'") for c in choices])
    return f"; did you mean {near}?" if near else ""


def _found(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 60 else value[:57] + '...'}'"
    if isinstance(value, dict):
        return "a block of keys"
    if isinstance(value, list):
        return f"a list of {len(cast('list[Any]', value))}"
    return str(value)


def _remove(tree: Any, path: Path) -> None:
    """Take a key out, so that its default counts; for a faulty item, take out its whole list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    for part in path[:-1]:
        if not isinstance(tree, (dict, list)):
            return
        tree = cast(Any, tree)[part]
    if isinstance(tree, dict):
        cast("dict[Any, Any]", tree).pop(path[-1], None)
