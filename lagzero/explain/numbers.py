"""How numbers are written."""

from __future__ import annotations


def num(value: float | None) -> str:
    """Write a number without rounding noise: 1 - 3e-4 is 0.9997."""
    return "none" if value is None else f"{value:.10g}"


def shown(value: object) -> str:
    """Write a configuration's value as its file does."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return num(value) if isinstance(value, (int, float)) else str(value)
