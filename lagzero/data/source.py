"""Reads the records of one configured source, whatever its kind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from lagzero.config import DataConfig, SourceConfig
from lagzero.data.arithmetic import arithmetic_records
from lagzero.data.reasoning_gym_source import reasoning_gym_records
from lagzero.data.rows import Columns, Record, Records
from lagzero.errors import ConfigError, LagzeroError


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
    if source.kind in ("arithmetic", "reasoning_gym"):
        return Columns("prompt", None if config.answer_column is None else "answer")
    return Columns(config.prompt_column, config.answer_column, config.id_column)


def read_records(source: SourceConfig) -> Records:
    """Read a source. Raises ConfigError when its settings cannot be met."""
    match source.kind:
        case "arithmetic":
            return arithmetic_records(source)
        case "reasoning_gym":
            return reasoning_gym_records(source)
        case "jsonl":
            return _read_jsonl(_file(source), source.size)
        case "parquet":
            return _read_parquet(_file(source), source.size)
        case "hub":
            return _read_hub(source)


def _file(source: SourceConfig) -> Path:
    problems: list[str] = []
    if source.path is None:
        problems.append(f"{source.kind} source: path is missing; give the file to read")
    elif not Path(source.path).is_file():
        problems.append(f"{source.kind} source: there is no file {source.path}")
    if source.split != "train":
        # A file read whole under the name "eval" would quietly be the training rows again.
        problems.append(
            f"{source.kind} source: split '{source.split}' has no meaning for one file; "
            "leave it out and give each split a file of its own"
        )
    if source.name is not None or source.options:
        problems.append(f"{source.kind} source: takes neither name nor options")
    if problems:
        raise ConfigError(problems)
    return Path(cast(str, source.path))


def _read_jsonl(path: Path, size: int | None) -> Records:
    records: list[Record] = []
    problems: list[str] = []
    with path.open("rb") as lines:
        for number, place, line in islice(_lines(lines), size):
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                problems.append(f"{place}: not UTF-8 text ({error.reason})")
                continue
            except (ValueError, RecursionError) as error:  # also numbers or nesting beyond limits
                problems.append(f"{place}: not JSON ({error})")
                continue
            if isinstance(value, dict):
                records.append(Record(number, place, cast(dict[str, Any], value)))
            else:
                problems.append(f"{place}: not a JSON object but {type(value).__name__}")
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
    if source.path is None:
        raise ConfigError(["hub source: path is missing; give the dataset's id"])
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
