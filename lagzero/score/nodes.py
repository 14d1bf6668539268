"""What an answer says, as a tree of immutable values. Reading one never runs anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import TypeAlias


class UnreadableError(Exception):
    """The text is not an answer that the grammar knows."""


@dataclass(frozen=True, slots=True)
class Num:
    """A rational number, exact."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable or a constant; ``pi``, ``e``, ``i``, ``oo`` and ``R`` have their usual meaning."""

    name: str


@dataclass(frozen=True, slots=True)
class Add:
    """A sum."""

    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Mul:
    """A product."""

    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Pow:
    """A power; roots and quotients are powers too."""

    base: Node
    exponent: Node


@dataclass(frozen=True, slots=True)
class Func:
    """A named function of its arguments."""

    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Percent:
    """A number of hundredths."""

    of: Node


@dataclass(frozen=True, slots=True)
class Degree:
    """A number of degrees."""

    of: Node


@dataclass(frozen=True, slots=True)
class PlusMinus:
    """Both signs of a term; ``sign`` is -1 for the lower one first."""

    sign: int
    of: Node


@dataclass(frozen=True, slots=True)
class Based:
    """Digits with the base that they are written in."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Items with their brackets ("" where bare); ``joiner`` is ``,``, ``and`` or ``or``."""

    opening: str
    closing: str
    items: tuple[Node, ...]
    joiner: str = ","


@dataclass(frozen=True, slots=True)
class SetOf:
    """Sets joined by ``union``, ``intersection`` or ``minus``."""

    op: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain such as ``0 < x <= 3``: one more member than operators."""

    ops: tuple[str, ...]
    members: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Parts divided by colons: a ratio or a time of day."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells; ``kind`` is ``matrix`` or ``determinant``."""

    kind: str
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Dots:
    """What is left out of a listing."""


@dataclass(frozen=True, slots=True)
class Words:
    """Text that is not mathematics, in lower case."""

    text: str


Node: TypeAlias = (
    Num
    | Sym
    | Add
    | Mul
    | Pow
    | Func
    | Percent
    | Degree
    | PlusMinus
    | Based
    | Listing
    | SetOf
    | Relation
    | Ratio
    | Matrix
    | Dots
    | Words
)

SCALARS = (Num, Sym, Add, Mul, Pow, Func, Percent, Degree, PlusMinus, Based)
CONSTANTS = frozenset({"pi", "e", "i", "oo"})


def children(node: Node) -> tuple[Node, ...]:
    """Return the parts directly below a node."""
    match node:
        case Add() | Mul() | Func() | SetOf():
            return node.args
        case Pow():
            return (node.base, node.exponent)
        case Percent() | Degree() | PlusMinus():
            return (node.of,)
        case Listing() | Ratio():
            return node.items
        case Relation():
            return node.members
        case Matrix():
            return tuple(cell for row in node.rows for cell in row)
        case _:
            return ()


def rebuild(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the node with each part directly below it changed."""
    match node:
        case Add():
            return Add(tuple(map(change, node.args)))
        case Mul():
            return Mul(tuple(map(change, node.args)))
        case Func():
            return Func(node.name, tuple(map(change, node.args)))
        case SetOf():
            return SetOf(node.op, tuple(map(change, node.args)))
        case Pow():
            return Pow(change(node.base), change(node.exponent))
        case Percent():
            return Percent(change(node.of))
        case Degree():
            return Degree(change(node.of))
        case PlusMinus():
            return PlusMinus(node.sign, change(node.of))
        case Listing():
            return Listing(node.opening, node.closing, tuple(map(change, node.items)), node.joiner)
        case Ratio():
            return Ratio(tuple(map(change, node.items)))
        case Relation():
            return Relation(node.ops, tuple(map(change, node.members)))
        case Matrix():
            return Matrix(node.kind, tuple(tuple(map(change, row)) for row in node.rows))
        case _:
            return node


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and everything below it."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(children(top))


def depth(node: Node) -> int:
    """Return how many levels the tree has."""
    level, levels = [node], 0
    while level:
        level = [child for parent in level for child in children(parent)]
        levels += 1
    return levels


def symbols(node: Node) -> frozenset[str]:
    """Return the names of the variables in a node, constants left out."""
    names = {part.name for part in walk(node) if isinstance(part, Sym)}
    return frozenset(names - CONSTANTS - {"R"})


def number(value: int) -> Num:
    """Return an integer as a node."""
    return Num(Fraction(value))


def negative(node: Node) -> Node:
    """Return minus the node."""
    return Num(-node.value) if isinstance(node, Num) else Mul((number(-1), node))


def product(factors: Sequence[Node]) -> Node:
    """Return a product; of numbers, the number."""
    numbers = [factor.value for factor in factors if isinstance(factor, Num)]
    if len(numbers) < len(factors):
        return Mul(tuple(factors))
    return Num(prod(numbers, start=Fraction(1)))


def quotient(top: Node, bottom: Node) -> Node:
    """Return one node over another; of two numbers, the number."""
    if isinstance(top, Num) and isinstance(bottom, Num) and bottom.value != 0:
        return Num(top.value / bottom.value)
    return Mul((top, Pow(bottom, number(-1))))


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())
