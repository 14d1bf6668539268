"""What the built-in rewards say of one completion, and how they read what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable


@dataclass(frozen=True, slots=True)
class Judgement:
    """One reward's verdict on one completion.

    ``value`` None: unscorable. ``failure``: the machinery failed, and how. ``parts`` are figures
    beside the value, ``note`` a remark for people.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    note: str = ""
    failure: str = ""


@runtime_checkable
class Judge(Protocol):
    """A reward that says more than a number. It bounds its own time."""

    def judge(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Judgement]:
        """Return one judgement a completion, in order."""
        ...


def completion_text(completion: object) -> str:
    """Return a completion's text, given as text or as chat messages."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence):
        messages = cast(Sequence[Mapping[str, object]], completion)
        texts = [message.get("content") for message in messages]
        return "\n".join(text for text in texts if isinstance(text, str))
    raise TypeError(f"a completion is text or chat messages, not {type(completion).__name__}")


def column_of(columns: Mapping[str, Any], name: str, num_rows: int) -> Sequence[Any]:
    """Return one column's values. Raises KeyError naming the columns there are."""
    if name not in columns:
        known = ", ".join(sorted(columns)) or "none"
        raise KeyError(f"the reward needs the column {name!r}; the data has: {known}")
    values = columns[name]
    if len(values) != num_rows:
        raise ValueError(f"column {name!r} has {len(values)} values for {num_rows} completions")
    return values
