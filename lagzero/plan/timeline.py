"""Timelines in plain text: one row a lane, one character a slice of time, dots where it idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_LABEL_WIDTH = 9


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of the timeline. ``end_s`` is None while it goes on."""

    row: str
    label: str
    start_s: float
    end_s: float | None = None


@dataclass(slots=True)
class Recorder:
    """Collects bars, and gives each running rollout of an engine the lowest free lane."""

    spans: list[Span] = field(default_factory=list[Span])
    open: dict[tuple[str, str], tuple[str, float]] = field(
        default_factory=dict[tuple[str, str], tuple[str, float]]
    )

    def begin(self, engine: str, label: str, now_s: float) -> None:
        """Open a bar in the engine's lowest free lane."""
        taken = {row for (where, _), (row, _) in self.open.items() if where == engine}
        number = next(n for n in range(len(taken) + 1) if f"{engine}{n}" not in taken)
        self.open[engine, label] = (f"{engine}{number}", now_s)

    def end(self, engine: str, label: str, now_s: float) -> None:
        """Close a bar."""
        row, start = self.open.pop((engine, label))
        self.spans.append(Span(row, label, start, now_s))

    def close(self, now_s: float) -> list[Span]:
        """Return all bars; those still open end now."""
        rest = [Span(row, label, at, now_s) for (_, label), (row, at) in self.open.items()]
        return [*self.spans, *(span for span in rest if span.start_s < now_s)]


def timeline(
    spans: Sequence[Span],
    rows: Sequence[tuple[str, str]],
    end_s: float,
    char_s: float,
    tick_s: float,
) -> str:
    """Draw rows, given as (name of their spans, what to print), from 0 to ``end_s`` seconds.

    ``char_s`` is the time of a character and ``tick_s`` the distance of the marks above.
    """
    width = round(end_s / char_s)
    lines = ["time".ljust(_LABEL_WIDTH) + _ruler(end_s, char_s, tick_s)]
    for name, title in rows:
        cells = ["."] * width
        for span in spans:
            if span.row == name:
                start, end = round(span.start_s / char_s), round((span.end_s or end_s) / char_s)
                cells[start:end] = bar(span.label, end - start)
        lines.append(title.ljust(_LABEL_WIDTH) + "".join(cells))
    return "\n".join(lines)


def bar(label: str, width: int) -> str:
    """Draw a bar of exactly ``width`` characters, with its label if there is room.

    >>> bar("r1", 12), bar("r0", 4), bar("r0", 3), bar("r0", 2), bar("r0", 1)
    ('[----r1----]', '[r0]', '[-]', '[]', '|')
    """
    if width < 2:
        return "|" * width
    inner = width - 2
    if len(label) > inner:
        return f"[{'-' * inner}]"
    left = (inner - len(label)) // 2
    return f"[{'-' * left}{label}{'-' * (inner - len(label) - left)}]"


def _ruler(end_s: float, char_s: float, tick_s: float) -> str:
    text = ""
    tick = 0
    while tick * tick_s <= end_s:
        at = round(tick * tick_s / char_s)
        if len(text) < at or not text:
            text = text.ljust(at) + f"{tick * tick_s:g}"
        tick += 1
    return text
