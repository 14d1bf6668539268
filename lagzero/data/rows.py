"""Turns raw records into rows that every later stage may trust, or says why it cannot.

Nothing is repaired and nothing is skipped: a record that fails is named by its place and reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, cast

import numpy as np

from lagzero.nearest import nearest

Content = str | tuple[Mapping[str, str], ...]

# A reward is called with these keywords, so no column may carry the same name.
RESERVED = ("prompts", "completions")


@dataclass(frozen=True, slots=True)
class Record:
    """One record as its source holds it. ``number`` counts from 1 and ``place`` is for people."""

    number: int
    place: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Records:
    """All that a source yielded: records, what could not be read, and what was left out."""

    records: Sequence[Record]
    problems: Mapping[int, str] = field(default_factory=dict[int, str])  # by number, with place
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])  # reason -> count


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column holds what. ``answer`` None: no answer; ``id`` None: the record's number."""

    prompt: str
    answer: str | None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A checked record: ``content`` is what is rendered, ``columns`` what rewards read."""

    id: str
    content: Content
    columns: Mapping[str, Any]


def canonical_text(value: Any) -> str:
    """Return the one text form of an answer or id: 3, 3.0 and np.int64(3) all give "3".

    Text is kept as it is. A fraction is written out in full, without an exponent.
    Raises ValueError, with the reason, for anything that is not text or a finite number.
    """
    if isinstance(value, np.generic) and not isinstance(value, np.floating):
        value = cast(Any, value).item()
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty")
        return value
    if value is None:
        raise ValueError("is missing (null)")
    if isinstance(value, bool):
        raise ValueError(f"is {value}, neither text nor a number")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (float, np.floating, Decimal)):
        number = Decimal(str(cast(Any, value)))
        if not number.is_finite():
            raise ValueError(f"is {number}, not a finite number")
        # str keeps the digits a person wrote: float32(0.1) is "0.1", not 0.10000000149.
        text = format(number, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text == "-0" else text
    raise ValueError(f"is of type {type(value).__name__}, neither text nor a number")


def check_content(value: Any, chat: bool) -> Content:
    """Return a prompt as text or as a tuple of chat messages.

    Raises ValueError, with the reason, for anything else, for an empty prompt, and for messages
    when ``chat`` is false (only a template can render them).
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty")
        return value
    if value is None:
        raise ValueError("is missing (null)")
    if isinstance(value, np.ndarray):
        value = cast(Any, value).tolist()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is of type {type(value).__name__}, neither text nor chat messages")
    if not chat:
        raise ValueError("is a list of messages, which needs data.chat=true")
    items = cast(Sequence[Any], value)
    messages = tuple(_check_message(at, item) for at, item in enumerate(items))
    if not any(message["content"].strip() for message in messages):
        raise ValueError("is empty")
    return messages


def _check_message(at: int, item: Any) -> Mapping[str, str]:
    if not isinstance(item, Mapping):
        raise ValueError(f"has a message [{at}] that is not a mapping of role and content")
    # Parquet and Arrow fill the fields that a message lacks with null.
    message = {k: v for k, v in cast(Mapping[Any, Any], item).items() if v is not None}
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"has a message [{at}] without '{key}'")
    for key, text in message.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(f"has a message [{at}] whose '{key}' is not text")
    return message


def check_records(
    records: Records, columns: Columns, label: str, chat: bool
) -> tuple[list[Row], list[str]]:
    """Check all of a source's records; return its rows and every problem, in order of place.

    A row's id is ``label/record id``. ``label`` holds no slash, so ids of different labels differ.
    """
    problems = list(records.problems.items())
    absent = _absent_columns(records.records, columns)
    rows: list[Row] = []
    first_place: dict[str, str] = {}
    for record in records.records:
        row_id, row, reasons = _check_record(record, columns, label, chat, absent)
        if row_id in first_place:
            reasons.append(f"id '{row_id}' repeats that of {first_place[row_id]}")
        elif row_id is not None:
            first_place[row_id] = record.place
        if row is not None:
            rows.append(row)
        problems += [(record.number, f"{record.place}: {reason}") for reason in reasons]
    in_order = sorted(problems, key=lambda problem: problem[0])
    return rows, [*absent.values(), *(text for _, text in in_order)]


def _absent_columns(records: Sequence[Record], columns: Columns) -> dict[str, str]:
    """Describe each wanted column that no record has: one problem, not one for each row."""
    present = {name for record in records for name in record.fields}
    wanted = [c for c in (columns.prompt, columns.answer, columns.id) if c is not None]
    if not records:
        return {}
    return {c: f"every row: {_missing(c, present, columns)}" for c in wanted if c not in present}


def _missing(column: str, present: Iterable[str], wanted: Columns) -> str:
    names = sorted(str(name) for name in present)
    # A column that already has a part to play was not misspelt.
    free = [n for n in names if n not in (wanted.prompt, wanted.answer, wanted.id)] or names
    near = nearest(column, free)
    hint = f"; did you mean '{near}'?" if near else ""
    role = {wanted.id: "id", wanted.answer: "answer", wanted.prompt: "prompt"}[column]
    return (
        f"no column '{column}'{hint} (columns: {', '.join(names) or 'none'}); "
        f"set data.{role}_column"
    )


def _check_record(
    record: Record, wanted: Columns, label: str, chat: bool, absent: Mapping[str, str]
) -> tuple[str | None, Row | None, list[str]]:
    reasons: list[str] = []
    fields = record.fields

    def column(name: str, check: Any) -> Any:
        if name not in fields:
            if name not in absent:
                reasons.append(_missing(name, fields, wanted))
            return None
        try:
            return check(fields[name])
        except ValueError as reason:
            reasons.append(f"column '{name}' {reason}")
            return None

    content = column(wanted.prompt, partial(check_content, chat=chat))
    answer = None if wanted.answer is None else column(wanted.answer, canonical_text)
    row_id = str(record.number) if wanted.id is None else column(wanted.id, canonical_text)
    reasons += [
        f"column '{name}' has a name that rewards are called with; rename it"
        for name in RESERVED
        if name in fields and name != wanted.prompt
    ]
    if row_id is None or content is None:
        return row_id, None, reasons
    kept = {name: value for name, value in fields.items() if name != wanted.prompt}
    if answer is not None:
        kept["answer"] = answer
    return row_id, Row(f"{label}/{row_id}", content, kept), reasons
