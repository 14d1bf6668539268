"""The two ways to decide a check: at once, by exact arithmetic; and slowly, in a worker."""

from __future__ import annotations

import re
from fractions import Fraction

from lagzero.score.compare import UndecidedError, same_answer
from lagzero.score.exact import IN_PROCESS_BITS, Budget, TooLargeError, rational
from lagzero.score.extract import unwrap
from lagzero.score.nodes import SCALARS, Node, Num, Sym, symbols, walk
from lagzero.score.parse import number_of
from lagzero.score.read import readings

_DECIMAL = re.compile(r"\s*\$?\s*(-?)\s*(\d*\.(\d+))\s*\$?\s*")


def decide_at_once(gold: str, answer: str, *, round_to_gold: bool = False) -> bool | None:
    """Return the verdict where exact arithmetic reaches it in a bounded time, else None."""
    try:
        right = same_answer(gold, answer, _exactly_equal)
    except UndecidedError:
        return None
    return None if round_to_gold and not right and _as_decimal(gold) else right


def decide_slowly(gold: str, answer: str, round_to_gold: bool) -> bool:
    """Return the verdict however long it takes. Only for worker processes."""
    from lagzero.score import symbolic

    if same_answer(gold, answer, symbolic.equal):
        return True
    decimal = _as_decimal(gold) if round_to_gold else None
    if decimal is None:
        return False
    value, places = decimal
    nodes = [reading.node for reading in readings(unwrap(answer)) if not reading.remark]
    return any(
        symbolic.rounds_to(value, places, node) for node in nodes if isinstance(node, SCALARS)
    )


def _exactly_equal(gold: Node, answer: Node) -> bool:
    if gold == answer:
        return True
    budget = Budget(IN_PROCESS_BITS)
    try:
        first, second = rational(gold, budget), rational(answer, budget)
    except TooLargeError:
        raise UndecidedError from None
    if first is not None and second is not None:
        return first == second
    if Sym("oo") in (gold, answer) or any(
        part == Sym("oo") for node in (gold, answer) for part in walk(node)
    ):
        return False
    if isinstance(gold, Num | Sym) and isinstance(answer, Num | Sym):
        return False  # a number and a letter, or two letters
    if first is not None and isinstance(answer, Sym) and symbols(answer):
        return False
    raise UndecidedError


def _as_decimal(gold: str) -> tuple[Fraction, int] | None:
    """Return a gold answer that is one decimal number: its value and its number of places."""
    match = _DECIMAL.fullmatch(unwrap(gold))
    if match is None:
        return None
    value = number_of(match[2])
    return (-value if match[1] else value), len(match[3])
