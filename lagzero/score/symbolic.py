"""Whether two expressions have one value: exact arithmetic, then many digits, then algebra.

Only worker processes load this; some questions never end.
"""

from __future__ import annotations

import random
from fractions import Fraction
from importlib import import_module
from typing import Any

from lagzero.score.exact import WORKER_BITS, Budget, TooLargeError, bits, power, rational
from lagzero.score.nodes import (
    Add,
    Based,
    Degree,
    Func,
    Mul,
    Node,
    Num,
    Percent,
    Pow,
    Sym,
    rebuild,
    symbols,
    walk,
)

mpmath: Any = import_module("mpmath")
sympy: Any = import_module("sympy")

POINTS = 12
ENOUGH_POINTS = 3
FIRST_DIGITS = 100
LAST_DIGITS = 500
MAX_DIGITS = 8000
MAX_EXPONENT = 10**9
_TRIG = {"sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc"}
_OTHER = {
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "ln": "log",
    "log": "log",
    "exp": "exp",
}


class UndefinedError(Exception):
    """No value at this point."""


def equal(gold: Node, answer: Node) -> bool:
    """Return whether two scalars are equal wherever both are real numbers.

    Rational numbers are compared exactly. Anything else is evaluated at random points: a
    difference shows that they differ. Where none shows, algebra decides a constant difference,
    and else agreement to ``LAST_DIGITS`` digits beyond those of the constants written out.
    """
    if gold == answer:
        return True
    if any(part == Sym("oo") for node in (gold, answer) for part in walk(node)):
        return False
    try:
        gold, answer = folded(gold), folded(answer)
        if isinstance(gold, Num) and isinstance(answer, Num):
            return gold.value == answer.value
        extra = sum(_digits(part) for node in (gold, answer) for part in walk(node))
        extra = min(extra, MAX_DIGITS)
        if not _agree(gold, answer, FIRST_DIGITS + extra):
            return False
        proof = _algebra(gold, answer)
        return _agree(gold, answer, LAST_DIGITS + extra, ENOUGH_POINTS) if proof is None else proof
    except (TooLargeError, UndefinedError):
        return False


def folded(node: Node) -> Node:
    """Return the node with every rational part worked out. Raises TooLargeError."""
    value = rational(node, Budget(WORKER_BITS))
    return Num(value) if value is not None else rebuild(node, folded)


def rounds_to(gold: Fraction, places: int, answer: Node) -> bool:
    """Return whether an answer without variables rounds to a decimal of so many places."""
    if symbols(answer):
        return False
    try:
        answer = folded(answer)
        if isinstance(answer, Num):
            off = abs(answer.value - gold)
        else:
            with mpmath.mp.workdps(FIRST_DIGITS + places):
                value = mpmath.mpmathify(_value(answer, {}))
                if mpmath.im(value) != 0:
                    return False
                off = abs(value - _ratio(gold))
                return bool(off <= mpmath.mpf(5) / mpmath.mpf(10) ** (places + 1))
    except (TooLargeError, UndefinedError):
        return False
    return off <= Fraction(1, 2 * 10**places)


def _digits(part: Node) -> int:
    return bits(part.value) // 3 if isinstance(part, Num) else 0


def _agree(gold: Node, answer: Node, digits: int, enough: int = POINTS) -> bool:
    names = sorted(symbols(gold) | symbols(answer))
    source = random.Random(20_011)
    complex_only: list[tuple[Any, Any]] = []
    num_real = num_valued = 0
    for _point in range(POINTS if names else 1):
        at = {name: Fraction(source.randint(-4000, 4000), 997) for name in names}
        values = _both(gold, answer, at, digits)
        if values is None:
            continue
        num_valued += 1
        (a, a_real), (_, b_real), same = values
        if a_real and b_real:
            num_real += 1
            if not same:
                return False
            if num_real == enough:
                break
        elif a_real != b_real:
            return False
        else:
            complex_only.append((a, same))
    if num_valued == 0:
        return False
    # With hardly a real point to go by, the complex values decide.
    return num_real >= 2 or (num_real == 1 and not names) or all(same for _, same in complex_only)


def _both(gold: Node, answer: Node, at: dict[str, Fraction], digits: int) -> Any:
    """Return both values with whether they are real, and whether they agree, at one point."""
    found: list[tuple[Any, Any]] = []
    for node in (gold, answer):
        values: list[Any] = []
        for precision in (digits, digits + digits // 2 + 20):
            with mpmath.mp.workdps(precision):
                try:
                    value = mpmath.mpmathify(_value(node, at))
                except (ZeroDivisionError, ValueError, OverflowError, UndefinedError):
                    values.append(None)
                    continue
                values.append(value if mpmath.isfinite(value) else None)
        found.append((values[0], values[1]))
    (a_0, a), (b_0, b) = found
    if a is None or b is None or a_0 is None or b_0 is None:
        one_sided = (a is None) != (b is None)
        return None if not one_sided or at else ((a, True), (b, False), False)
    with mpmath.mp.workdps(digits + digits // 2 + 20):
        size = max(abs(a), abs(b))
        error = 10 * (abs(a - a_0) + abs(b - b_0)) + size * mpmath.mpf(10) ** (20 - digits)
        return (a, _is_real(a, digits)), (b, _is_real(b, digits)), bool(abs(a - b) <= error)


def _is_real(value: Any, digits: int) -> bool:
    return bool(abs(mpmath.im(value)) <= abs(value) * mpmath.mpf(10) ** (20 - digits))


def _ratio(value: Fraction) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator


def _value(node: Node, at: dict[str, Fraction]) -> Any:
    match node:
        case Num():
            return _ratio(node.value)
        case Sym():
            constants = {"pi": mpmath.pi, "e": mpmath.e}
            if node.name in constants:
                return +constants[node.name]
            return mpmath.mpc(0, 1) if node.name == "i" else _ratio(at[node.name])
        case Add():
            return mpmath.fsum(_value(arg, at) for arg in node.args)
        case Mul():
            return mpmath.fprod(_value(arg, at) for arg in node.args)
        case Pow():
            return _power(node, at)
        case Percent():
            return _value(node.of, at) / 100
        case Degree():
            return _value(node.of, at) * mpmath.pi / 180
        case Func():
            return _call(node.name, [_value(arg, at) for arg in node.args])
        case _:
            raise UndefinedError


def _power(node: Pow, at: dict[str, Fraction]) -> Any:
    base = _value(node.base, at)
    if isinstance(node.exponent, Num):
        exponent = node.exponent.value
        if base == 0 and exponent <= 0:
            raise UndefinedError
        if abs(exponent) > MAX_EXPONENT:
            raise TooLargeError
        if exponent.denominator == 1:
            return base**exponent.numerator
        if exponent.denominator % 2 and mpmath.im(base) == 0 and mpmath.re(base) < 0:
            sign = -1 if exponent.numerator % 2 else 1
            return sign * (-mpmath.re(base)) ** _ratio(exponent)  # the real odd root
        return base ** _ratio(exponent)
    exponent = _value(node.exponent, at)
    if abs(exponent) > MAX_EXPONENT:
        raise TooLargeError
    return base**exponent


def _call(name: str, args: list[Any]) -> Any:
    if any(abs(arg) > mpmath.mpf(MAX_EXPONENT) for arg in args):
        raise TooLargeError
    match name:
        case "abs":
            return abs(args[0])
        case "floor":
            return mpmath.floor(args[0])
        case "ceil":
            return mpmath.ceil(args[0])
        case "factorial":
            return mpmath.factorial(args[0])
        case "binom":
            return mpmath.binomial(*args)
        case "lg":
            return mpmath.log(args[0], 10)
        case _ if name in _TRIG:
            return getattr(mpmath, _TRIG[name])(*args)
        case _:
            return getattr(mpmath, _OTHER[name])(*args)


def _algebra(gold: Node, answer: Node) -> bool | None:
    """Return whether the difference is 0 where that can be proved cheaply, else None."""
    variables = {name: sympy.Symbol(name, real=True) for name in symbols(gold) | symbols(answer)}
    try:
        difference = _expression(gold, variables) - _expression(answer, variables)
    except UndefinedError:
        return None
    if _is_small(gold) and _is_small(answer):
        difference = sympy.expand(difference)
    zero = difference.is_zero
    if zero:
        return True
    # A difference with variables in it may vanish wherever both sides are real.
    return False if zero is False and not difference.free_symbols else None


def _is_small(node: Node) -> bool:
    powers = [part.exponent for part in walk(node) if isinstance(part, Pow)]
    large = any(isinstance(power, Num) and abs(power.value) > 40 for power in powers)
    return not large and sum(1 for _ in walk(node)) < 200


def _expression(node: Node, variables: dict[str, Any]) -> Any:
    match node:
        case Num():
            return sympy.Rational(node.value.numerator, node.value.denominator)
        case Sym():
            constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}
            return constants.get(node.name) or variables[node.name]
        case Add():
            return sympy.Add(*[_expression(arg, variables) for arg in node.args])
        case Mul():
            return sympy.Mul(*[_expression(arg, variables) for arg in node.args])
        case Pow():
            if isinstance(node.base, Num) and isinstance(node.exponent, Num):
                return _root(node.base.value, node.exponent.value)
            return sympy.Pow(
                _expression(node.base, variables), _expression(node.exponent, variables)
            )
        case Percent():
            return _expression(node.of, variables) / 100
        case Degree():
            return _expression(node.of, variables) * sympy.pi / 180
        case Func() if node.name in _TRIG or node.name in _OTHER:
            name = _TRIG.get(node.name) or _OTHER[node.name]
            return getattr(sympy, name)(*[_expression(arg, variables) for arg in node.args])
        case Func() | Based() | _:
            raise UndefinedError


def _root(base: Fraction, exponent: Fraction) -> Any:
    exact = power(base, exponent, Budget(WORKER_BITS))
    if exact is not None:
        return sympy.Rational(exact.numerator, exact.denominator)
    if base < 0 and exponent.denominator % 2:
        sign = -1 if exponent.numerator % 2 else 1
        return sign * _root(-base, exponent)
    return sympy.Pow(
        sympy.Rational(base.numerator, base.denominator),
        sympy.Rational(exponent.numerator, exponent.denominator),
    )
