"""Sets of real numbers as pieces: intervals, inequalities, unions and the line with holes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from lagzero.score.exact import IN_PROCESS_BITS, Budget, TooLargeError, rational
from lagzero.score.nodes import Listing, Node, Num, Relation, SetOf, Sym, negative, symbols

Place: TypeAlias = Fraction | float  # a float only for plus or minus infinity
Equal: TypeAlias = Callable[[Node, Node], bool]
INFINITY = Sym("oo")
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


@dataclass(frozen=True, slots=True)
class Piece:
    """The numbers from ``low`` to ``high``; each end is in it or not."""

    low: Node
    has_low: bool
    high: Node
    has_high: bool


LINE = Piece(negative(INFINITY), False, INFINITY, False)


def speaks_of_sets(node: Node) -> bool:
    """Return whether a node can only mean a set of real numbers, and not a point or a list."""
    match node:
        case SetOf():
            return True
        case Relation():
            return any(op in ("<", "<=", ">", ">=", "!=") for op in node.ops)
        case Sym():
            return node.name == "R"
        case Listing():
            if node.opening == "" and node.items:
                return all(speaks_of_sets(item) for item in node.items)
            return node.opening + node.closing in ("(]", "[)") or any(
                _is_infinite(item) for item in node.items
            )
        case _:
            return False


def pieces(node: Node) -> list[Piece] | None:
    """Return the pieces of a set of real numbers, None where the node is not one."""
    match node:
        case Sym():
            return [LINE] if node.name == "R" else None
        case Listing():
            return _of_listing(node)
        case SetOf():
            return _of_sets(node)
        case Relation():
            return _of_relation(node)
        case _:
            return None


def same_set(gold: list[Piece], answer: list[Piece], equal: Equal) -> bool:
    """Return whether two sets of pieces are the same set."""
    first, second = _merged(gold), _merged(answer)
    if first is not None and second is not None:
        return first == second
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for piece in gold:
        match = next((other for other in left if _same_piece(piece, other, equal)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_piece(a: Piece, b: Piece, equal: Equal) -> bool:
    if (a.has_low, a.has_high) != (b.has_low, b.has_high):
        return False
    return equal(a.low, b.low) and equal(a.high, b.high)


def _is_infinite(node: Node) -> bool:
    return node in (INFINITY, negative(INFINITY))


def _place(node: Node) -> Place | None:
    if node == INFINITY:
        return math.inf
    if node == negative(INFINITY):
        return -math.inf
    try:
        return rational(node, Budget(IN_PROCESS_BITS))
    except TooLargeError:
        return None


def _of_listing(node: Listing) -> list[Piece] | None:
    brackets = node.opening + node.closing
    if brackets == "{}":
        return [Piece(item, True, item, True) for item in node.items]
    if brackets in ("()", "[]", "(]", "[)") and len(node.items) == 2:
        low, high = node.items
        return [Piece(low, node.opening == "[", high, node.closing == "]")]
    if brackets == "" and node.joiner in ("or", "and"):
        parts = [pieces(item) for item in node.items]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return _joined(known) if node.joiner == "or" else _intersection(known)
    return None


def _joined(parts: list[list[Piece]]) -> list[Piece]:
    return [piece for part in parts for piece in part]


def _of_sets(node: SetOf) -> list[Piece] | None:
    parts = [pieces(arg) for arg in node.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if node.op == "union":
        return _joined(known)
    if node.op == "intersection":
        return _intersection(known)
    kept, holes = known
    for hole in holes:
        if hole.low != hole.high:
            return None
        cut = [_without(piece, hole.low) for piece in kept]
        if any(part is None for part in cut):
            return None
        kept = [piece for part in cut for piece in part or []]
    return kept


def _without(piece: Piece, point: Node) -> list[Piece] | None:
    if piece == LINE:
        return [replace(piece, high=point), replace(piece, low=point)]
    low, at, high = _place(piece.low), _place(point), _place(piece.high)
    if low is None or at is None or high is None:
        return None
    if not low <= at <= high:
        return [piece]
    left = replace(piece, high=point, has_high=False)
    right = replace(piece, low=point, has_low=False)
    return ([left] if low < at else []) + ([right] if at < high else [])


def _intersection(parts: list[list[Piece]]) -> list[Piece] | None:
    kept = parts[0]
    for part in parts[1:]:
        common = [_overlap(a, b) for a in kept for b in part]
        if any(piece is None for piece in common):
            return None
        kept = [piece for found in common if found is not None for piece in found]
    return kept


def _overlap(a: Piece, b: Piece) -> list[Piece] | None:
    places = [_place(node) for node in (a.low, b.low, a.high, b.high)]
    known = [place for place in places if place is not None]
    if len(known) < 4:
        return None
    a_low, b_low, a_high, b_high = known
    low, has_low = max((a_low, not a.has_low), (b_low, not b.has_low))
    high, has_high = min((a_high, a.has_high), (b_high, b.has_high))
    if low > high or (low == high and (has_low or not has_high)):
        return []
    return [Piece(_node(low), not has_low, _node(high), has_high)]


def _node(place: Place) -> Node:
    if isinstance(place, Fraction):
        return Num(place)
    return INFINITY if place > 0 else negative(INFINITY)


def _of_relation(node: Relation) -> list[Piece] | None:
    variables = symbols(node)
    if len(variables) != 1 or "in" in node.ops or "~" in node.ops:
        return None
    parts: list[list[Piece]] = []
    for op, left, right in zip(node.ops, node.members, node.members[1:], strict=False):
        if isinstance(right, Sym) and right.name in variables:
            op, left, right = _FLIP[op], right, left
        if not (isinstance(left, Sym) and left.name in variables and not symbols(right)):
            return None
        parts.append(_half(op, right))
    if len(parts) == 2 and {parts[0][0].low, parts[1][0].low} & {LINE.low}:
        return _between(parts)
    return parts[0] if len(parts) == 1 else _intersection(parts)


def _between(parts: list[list[Piece]]) -> list[Piece] | None:
    # Two half-lines that face each other meet in an interval whatever their ends are.
    (first, *more), (second, *others) = parts
    if more or others or (first.low == LINE.low) == (second.low == LINE.low):
        return _intersection(parts)
    above, below = (second, first) if first.low == LINE.low else (first, second)
    return [Piece(above.low, above.has_low, below.high, below.has_high)]


def _half(op: str, end: Node) -> list[Piece]:
    match op:
        case "<" | "<=":
            return [Piece(LINE.low, False, end, op == "<=")]
        case ">" | ">=":
            return [Piece(end, op == ">=", INFINITY, False)]
        case "=":
            return [Piece(end, True, end, True)]
        case _:
            return [replace(LINE, high=end), replace(LINE, low=end)]


def _merged(parts: list[Piece]) -> list[tuple[Place, bool, Place, bool]] | None:
    """Return the pieces in order and joined where they touch; None where an end has no place."""
    spans: list[tuple[Place, bool, Place, bool]] = []
    for piece in parts:
        low, high = _place(piece.low), _place(piece.high)
        if low is None or high is None:
            return None
        if low < high or (low == high and piece.has_low and piece.has_high):
            spans.append((low, not piece.has_low, high, piece.has_high))
    merged: list[tuple[Place, bool, Place, bool]] = []
    for low, lacks_low, high, has_high in sorted(spans):
        if merged:
            low_0, lacks_0, high_0, has_0 = merged[-1]
            if low < high_0 or (low == high_0 and (has_0 or not lacks_low)):
                high_1, has_1 = max((high_0, has_0), (high, has_high))
                merged[-1] = (low_0, lacks_0, high_1, has_1)
                continue
        merged.append((low, lacks_low, high, has_high))
    return merged
