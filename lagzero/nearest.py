"""What a misspelt name probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the closest of ``names``, or None when none is near.

    ``cutoff``: least similarity in [0, 1], where 2/3 is two letters of three in common.
    """
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown_name(name: str, names: Iterable[str]) -> str:
    """Describe an unknown name: what it probably meant, if anything is near, and what is valid."""
    known = sorted(names)
    near = nearest(name, known)
    hint = f"did you mean '{near}'? " if near else ""
    return f"'{name}' is unknown; {hint}valid: {', '.join(known) or 'none'}"
