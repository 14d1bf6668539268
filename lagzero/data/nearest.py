"""What a misspelt name probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the closest of ``names`` to ``name``, however far; None when there are none."""
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.0)
    return found[0] if found else None


def unknown_name(name: str, names: Iterable[str]) -> str:
    """Describe an unknown name by its nearest neighbour and all that would be valid."""
    known = sorted(names)
    return (
        f"'{name}' is unknown; did you mean '{nearest(name, known)}'? (valid: {', '.join(known)})"
    )
