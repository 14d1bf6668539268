"""Reads the records of one configured source, whatever its kind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from lagzero.config import DataConfig, SourceConfig
from lagzero.data.arithmetic import arithmetic_records, parse_options
from lagzero.data.reasoning_gym_source import create_dataset, reasoning_gym_records
from lagzero.data.rows import Columns, Record, Records
from lagzero.errors import ConfigError, LagzeroError

GENERATED = ("arithmetic", "reasoning_gym")
FILES = ("jsonl", "parquet")


def source_labels(sources: Sequence[SourceConfig]) -> list[str]:
    """Name each source for its rows' ids: ``kind:name:split``, made unique by ``#2``, ``#3``, ...

    Labels hold no slash, so that the first slash of an id ends the label.
    """
    labels: list[str] = []
    for source in sources:
        stem = Path(source.path).stem if source.path and source.kind != "hub" else source.path
        parts = (source.kind, stem, source.name, source.split)
        base = ":".join(part for part in parts if part).replace("/", ".")
        label, copy = base, 1
        while label in labels:
            copy += 1
            label = f"{base}#{copy}"
        labels.append(label)
    return labels


def source_columns(source: SourceConfig, config: DataConfig) -> Columns:
    """Say which column holds what: generators name their own, files follow the configuration."""
    if source.kind in GENERATED:
        return Columns("prompt", None if config.answer_column is None else "answer")
    return Columns(config.prompt_column, config.answer_column, config.id_column)


def check_source(at: str, source: SourceConfig) -> list[str]:
    """Return every problem of one source's settings, each with the path to change below ``at``.

    Files are looked up relative to the working directory. Reads no row; a reasoning-gym dataset is
    made, because it checks its options itself.
    """
    return [f"{at}.{problem}" for problem in (*_unused(source), *_unmet(source))]


def _unused(source: SourceConfig) -> Iterator[str]:
    """Say which settings a source's kind does not read."""
    kind = source.kind
    if kind in GENERATED and source.path is not None:
        yield f"path: not used by kind {kind}; remove it"
    if kind in (*FILES, "arithmetic") and source.name is not None:
        yield f"name: not used by kind {kind}; remove it"
    if kind in FILES and source.split != "train":
        # A file read whole under the name "eval" would quietly be the training rows again.
        yield "split: one file has no splits; remove it and give each split its own file"
    if kind in FILES and source.options:
        yield f"options: not used by kind {kind}; remove them"
    if kind not in GENERATED and source.seed != 0:
        yield f"seed: kind {kind} generates no rows; remove it (the run's seed orders the rows)"


def _unmet(source: SourceConfig) -> Iterator[str]:
    """Say what a source needs and does not have."""
    kind, path = source.kind, source.path
    if kind not in GENERATED and path is None:
        what = "the dataset's id" if kind == "hub" else f"the {kind} file"
        yield f"path: missing; kind {kind} needs {what}"
    if kind in FILES and path is not None and not Path(path).is_file():
        yield f"path: there is no file {path} (looked in {Path.cwd()})"
    if kind == "arithmetic":
        if source.split not in ("train", "eval"):
            yield f"split: found '{source.split}'; kind arithmetic has train and eval"
        yield from parse_options(source.options)[1]
    if kind == "reasoning_gym":
        if source.name is None:
            yield "name: missing; kind reasoning_gym needs the dataset's name"
            return
        try:
            create_dataset(source.name, source.options)
        except ConfigError as error:
            yield from error.problems
        except LagzeroError as error:
            yield f"kind: {error}"


def read_records(source: SourceConfig) -> Records:
    """Read a source that ``check_source`` finds nothing wrong with.

    Raises ConfigError, its paths relative to the source, for what only reading can tell.
    """
    match source.kind:
        case "arithmetic":
            return arithmetic_records(source)
        case "reasoning_gym":
            return reasoning_gym_records(source)
        case "jsonl":
            return _read_jsonl(Path(source.path or ""), source.size)
        case "parquet":
            return _read_parquet(Path(source.path or ""), source.size)
        case "hub":
            return _read_hub(source)


def _read_jsonl(path: Path, size: int | None) -> Records:
    records: list[Record] = []
    problems: dict[int, str] = {}
    with path.open("rb") as lines:
        for number, place, line in islice(_lines(lines), size):
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
            except UnicodeDecodeError as error:
                problems[number] = f"{place}: not UTF-8 text ({error.reason})"
                continue
            except json.JSONDecodeError as error:  # its own text counts lines within this one
                problems[number] = f"{place}: not JSON ({error.msg} at column {error.colno})"
                continue
            except (ValueError, RecursionError) as error:  # numbers or nesting beyond limits
                problems[number] = f"{place}: not JSON ({error})"
                continue
            if isinstance(value, dict):
                records.append(Record(number, place, cast(dict[str, Any], value)))
            else:
                problems[number] = f"{place}: not a JSON object but {type(value).__name__}"
    return Records(records, problems)


def _lines(lines: Any) -> Iterator[tuple[int, str, bytes]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, f"line {number}", line


def _read_parquet(path: Path, size: int | None) -> Records:
    try:
        import pyarrow as arrow  # pyright: ignore[reportMissingTypeStubs]
        from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise LagzeroError(
            "a parquet source needs pyarrow: pip install 'lagzero[datasets]'"
        ) from error
    try:
        file = cast(Any, parquet).ParquetFile(path)
    except cast(Any, arrow).ArrowInvalid as error:
        raise LagzeroError(f"{path} is not a Parquet file: {error}") from error
    batches = file.iter_batches(batch_size=min(size or 4096, 4096))
    return _numbered(islice((row for batch in batches for row in batch.to_pylist()), size))


def _read_hub(source: SourceConfig) -> Records:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise LagzeroError(
            "a hub source needs the datasets package: pip install 'lagzero[datasets]'"
        ) from error
    loaded: Any = cast(Any, datasets).load_dataset(
        source.path, name=source.name, split=source.split, **source.options
    )
    return _numbered(islice(loaded, source.size))


def _numbered(rows: Iterator[Mapping[str, Any]]) -> Records:
    return Records([Record(n, f"row {n}", row) for n, row in enumerate(rows, 1)])
