"""YAML as the configuration reads and writes it: plain scalars mean what they look like.

PyYAML follows YAML 1.1, where ``1e-6`` is text, ``no`` is false, ``1:30`` is 90 and ``010`` is 8.
Here ``1e-6`` is a number and the other three are text, text and 10. A repeated key is a problem and
no overwrite. Reader and writer share one table of scalars, so what is written reads back the same.
"""

from __future__ import annotations

import re
from typing import Any, cast

import yaml

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("merge", r"^<<$", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, pattern, firsts in _SCALARS:
        for first in firsts:
            key = "" if first == "\0" else first
            table.setdefault(key, []).append((f"tag:yaml.org,2002:{kind}", re.compile(pattern)))
    return table


class _Loader(yaml.SafeLoader):
    """Safe loading that notes repeated keys instead of overwriting."""

    yaml_implicit_resolvers = _resolvers()

    def __init__(self, text: str):
        super().__init__(text)
        self.problems: list[str] = []

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            self._note_repeated_keys(node)
        return super().construct_mapping(cast(yaml.MappingNode, node), deep=deep)

    def _note_repeated_keys(self, node: yaml.MappingNode) -> None:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                self.problems.append(
                    f"line {line}: {name} is given twice in one block (first on line "
                    f"{seen[name]}); keep one"
                )
            seen.setdefault(name, line)


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)), 10)  # 010 is ten


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


class _Dumper(yaml.SafeDumper):
    """Safe writing that quotes exactly the text that the reader would take for something else."""

    yaml_implicit_resolvers = _resolvers()


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # Unicode's own line breaks fold into a space unless they are escaped, as double quotes do.
    style = '"' if any(char in value for char in "\x85\u2028\u2029") else None
    return cast(Any, dumper).represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def parse(text: str) -> tuple[Any, list[str]]:
    """Return the value of a YAML text and its problems, each with its line. Never raises."""
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # characters that YAML does not allow
        return None, [f"not YAML: {_one_line(error)}"]
    try:
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        return None, [*loader.problems, f"not YAML: {_one_line(error)}"]
    finally:
        cast(Any, loader).dispose()
    return value, loader.problems


def dump(value: Any) -> str:
    """Write plain values as YAML that ``parse`` reads back to the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
