"""The gold answer of a row, as text: rows hold text, Python numbers or numpy numbers."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real


def gold_text(value: object) -> str | None:
    """Return a gold answer as text, None where the row has none (None, "", NaN).

    3, 3.0 and numpy's 3 all give "3". Raises TypeError for what is no text and no number.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else None
    if isinstance(value, Real):
        number = float(value)
        if not math.isfinite(number):
            return None
        return str(int(number)) if number.is_integer() else format(Decimal(repr(number)), "f")
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return gold_text(item())
    raise TypeError(f"a gold answer is text or a number, not {type(value).__name__}: {value!r}")
