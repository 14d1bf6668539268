"""Exact values: rational arithmetic on big integers, under a budget of bits."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, comb, factorial, floor

from lagzero.score.nodes import Add, Based, Func, Mul, Node, Num, Percent, Pow

IN_PROCESS_BITS = 2**17
WORKER_BITS = 2**21


class TooLargeError(Exception):
    """A number with more bits than the budget allows."""


@dataclass(slots=True)
class Budget:
    """How many more bits of results may be made."""

    bits: int

    def spend(self, bits: int) -> None:
        """Take the bits of one result. Raises TooLargeError."""
        self.bits -= bits
        if self.bits < 0:
            raise TooLargeError


def rational(node: Node, budget: Budget) -> Fraction | None:
    """Return the value of a node that is a rational number, None where it cannot be told.

    Raises TooLargeError where the value may be rational but has too many bits.
    """
    match node:
        case Num():
            return node.value
        case Add() | Mul():
            return _joined(node, budget)
        case Pow():
            base, exponent = rational(node.base, budget), rational(node.exponent, budget)
            return None if base is None or exponent is None else power(base, exponent, budget)
        case Percent():
            value = rational(node.of, budget)
            return None if value is None else value / 100
        case Func():
            args = [rational(arg, budget) for arg in node.args]
            known = [arg for arg in args if arg is not None]
            return _function(node.name, known, budget) if len(known) == len(args) else None
        case Based():
            return _based(node)
        case _:
            return None


def power(base: Fraction, exponent: Fraction, budget: Budget) -> Fraction | None:
    """Return base**exponent where that is a real rational number.

    An odd root of a negative number is the real one.
    """
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator)
        return None if root is None else power(root, Fraction(exponent.numerator), budget)
    times = exponent.numerator
    if base == 0:
        return Fraction(0) if times > 0 else None
    if abs(base) != 1:
        budget.spend(abs(times) * _bits(base))
        return base**times
    return base if times % 2 else Fraction(1)


def bits(value: Fraction) -> int:
    """Return the size of a fraction: the bits of its longer half."""
    return _bits(value)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _joined(node: Add | Mul, budget: Budget) -> Fraction | None:
    total = Fraction(0) if isinstance(node, Add) else Fraction(1)
    # Every part is looked at, so that a part that is too large is never overlooked.
    values = [rational(arg, budget) for arg in node.args]
    for value in values:
        if value is None:
            return None
        total = total + value if isinstance(node, Add) else total * value
        budget.spend(_bits(total))
    return total


def _root(value: Fraction, degree: int) -> Fraction | None:
    if degree > 10_000 or (value < 0 and degree % 2 == 0):
        return None
    top = _integer_root(abs(value.numerator), degree)
    bottom = _integer_root(value.denominator, degree)
    if top is None or bottom is None:
        return None
    return Fraction(top if value >= 0 else -top, bottom)


def _integer_root(value: int, degree: int) -> int | None:
    if value < 2:
        return value
    low, high = 1, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle - 1
    return low if low**degree == value else None


def _function(name: str, args: list[Fraction], budget: Budget) -> Fraction | None:
    match name, args:
        case "abs", [value]:
            return abs(value)
        case "floor", [value]:
            return Fraction(floor(value))
        case "ceil", [value]:
            return Fraction(ceil(value))
        case "factorial", [value] if value.denominator == 1 and value >= 0:
            budget.spend(value.numerator * value.numerator.bit_length())
            return Fraction(factorial(value.numerator))
        case "binom", [n, k] if n.denominator == k.denominator == 1 and 0 <= k <= n:
            few = min(k.numerator, n.numerator - k.numerator)
            budget.spend(few * n.numerator.bit_length())
            return Fraction(comb(n.numerator, k.numerator))
        case _:
            return None


def _based(node: Based) -> Fraction | None:
    if not 2 <= node.base <= 36 or len(node.digits) > 1000:
        return None
    try:
        return Fraction(int(node.digits, node.base))
    except ValueError:
        return None
