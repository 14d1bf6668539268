"""The metrics file: one JSON object a line.

A ``{"schema": {...}}`` line explains each metric before its first use. A line ``{"step": n, ...}``
holds a step's metrics, n being the policy version that it made; an evaluation has a line of its own
with the step it was made after, and ``read_metrics`` joins the two. Groups that taught nothing,
and so made no version, have a line ``{"empty_after": n, ...}``. A value that is not finite is left
out: every line is valid JSON, and an absent name means "nothing to measure".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lagzero.errors import LagzeroError
from lagzero.observe.catalog import checked, schema


class MetricsLog:
    """Appends to a metrics file; each line is on its way to the disk when ``write`` returns."""

    def __init__(self, path: str | Path, resume_step: int | None = None):
        """Start a new file, or continue one after ``resume_step``.

        Lines of later steps, and a last line that a kill cut short, are dropped on resuming.
        Raises LagzeroError when a new run would write over an existing file.
        """
        self._path = Path(path)
        self._explained: set[str] = set()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            if self._path.exists():
                raise LagzeroError(f"{path} holds another run's metrics; resume it, or move it")
        elif self._path.exists():
            self._cut(resume_step)
        self._file = self._path.open("a", encoding="utf-8")

    def _cut(self, last_step: int) -> None:
        kept: list[str] = []
        for record in _records(self._path):
            self._explained |= set(record.get("schema", ()))
            kept_step = record.get("step", last_step) <= last_step
            if kept_step and record.get("empty_after", -1) < last_step:
                kept.append(json.dumps(record))
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, self._path)

    def write(self, step: int, metrics: Mapping[str, Any], empty: bool = False) -> None:
        """Append one line; ``empty``: of groups that gave no update after ``step``.

        Raises ValueError for a metric that the catalogue lacks.
        """
        values = checked(metrics)
        new = [name for name in values if name not in self._explained]
        if new:
            self._explained |= set(new)
            self._line({"schema": schema(new)})
        self._line({"empty_after" if empty else "step": step, **values})

    def _line(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return one mapping a step, in the order of steps, with ``step`` among its keys.

    A last line that a kill cut short is left out.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in _records(Path(path)):
        if "step" in record:
            steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def read_schema(path: str | Path) -> dict[str, dict[str, str]]:
    """Return the unit, reduction and explanation of each metric in the file."""
    rows: dict[str, dict[str, str]] = {}
    for record in _records(Path(path)):
        rows.update(record.get("schema", {}))
    return rows


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise LagzeroError(f"{path}: line {number} is not JSON ({error.msg})") from error
    return records
