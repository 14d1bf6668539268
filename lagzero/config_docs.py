"""Writes the generated parts of docs/configuration.md, metrics.md and objectives.md.

    python -m lagzero.config_docs docs

The explanation of a key is the comment on its line or above it in ``config.py``, and that of a
block its docstring, so that there is one place to write them.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from lagzero.config import Block, Config
from lagzero.config_schema import Path as KeyPath
from lagzero.config_schema import block_of, child, describe, dotted, field_type, keys
from lagzero.explain.page import markdown as objectives
from lagzero.observe import catalog

_FIELD = re.compile(r"((?:^    # .*\n)*)^    (\w+): .*?(?:  # (.*))?$", re.MULTILINE)


def comments(block: type[Block]) -> dict[str, str]:
    """Map each key of a block to the comments above and on its line; empty text without any."""
    return {
        name: " ".join([*above.replace("# ", "").split(), *beside.split()]).replace("None", "null")
        for above, name, beside in _FIELD.findall(inspect.getsource(block))
    }


def markdown() -> str:
    """Return the tables of docs/configuration.md, one for each block, in the order of a file."""
    lines: list[str] = []
    for path, block in [((), Config), *_blocks()]:
        lines += [f"### {f'`{_shown(path)}`' if path else 'Top level'}", ""]
        lines += [_cell(" ".join((inspect.getdoc(block) or "").split())), ""]
        lines += ["| key | valid | default | meaning |", "|---|---|---|---|"]
        meaning = comments(block)
        for name, field in block.model_fields.items():
            kind, key = _valid(field), _shown((*path, name))
            said = meaning[name] or _first_sentence(block_of(field_type(field)))
            cells = (f"`{key}`", _cell(kind), _default(field), _cell(said))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _first_sentence(block: type[Block] | None) -> str:
    text = " ".join((inspect.getdoc(block) or "").split()) if block is not None else ""
    return re.split(r"(?<=\.) ", text)[0]


def _blocks() -> list[tuple[KeyPath, type[Block]]]:
    found: list[tuple[KeyPath, type[Block]]] = []
    for path, field in keys(Config):
        kind = field_type(field)
        item: Any = child(kind, 0)
        block = block_of(kind) or (None if item is None else block_of(item))
        if block is not None:
            found.append(((*path, 0) if block_of(kind) is None else path, block))
    return found


def _valid(field: FieldInfo) -> str:
    return re.sub(
        r"a block with [\w, ]+?(?= each\)| or null|$)", "a block", describe(field_type(field))
    )


def _shown(path: KeyPath) -> str:
    return dotted(tuple("N" if part == 0 else part for part in path))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Block):
        return "its defaults"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", r"\|")


def fill(page: str, name: str, table: str) -> str:
    """Replace what stands between a page's begin and end marks. Raises ValueError without them."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page lacks {begin.strip()} or {end}")
    head, rest = page.split(begin, 1)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"


def pages(folder: Path) -> dict[Path, str]:
    """Map each generated page to the text that it should hold."""
    tables = {
        "configuration": markdown(),
        "metrics": catalog.markdown(),
        "objectives": objectives(),
    }
    return {
        path: fill(path.read_text(encoding="utf-8"), name, table)
        for name, table in tables.items()
        for path in [folder / f"{name}.md"]
    }


def main(folder: str) -> None:
    """Rewrite the generated tables under ``folder``."""
    for path, text in pages(Path(folder)).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
