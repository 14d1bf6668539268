"""A place in a list of tokens, the tables of the grammar, and what number literals mean."""

from __future__ import annotations

from fractions import Fraction

from lagzero.score.nodes import SCALARS, Node, Num, UnreadableError, word_set
from lagzero.score.tokens import Token

RELATIONS = {"=": "=", "~": "~", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!="}
SEPARATORS = frozenset({",", ";", "and", "or"})
CLOSERS = {"(": ")]", "[": ")]", "{": "}", r"\{": r"\}"}
SET_OPS = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "minus"}
NOT_FACTORS = frozenset(SET_OPS) | {r"\in", r"\\", r"\pm", r"\mp", r"\}", r"\&", r"\#", r"\_"}
HALVES = {r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil")}
GREEK = frozenset(
    "\\" + name
    for name in word_set(
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda "
        "mu nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi "
        "Sigma Phi Psi Omega ell"
    )
)
END = Token("end of text", "")


class Cursor:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[Token]):
        self.tokens = list(tokens)
        self.at = 0

    @property
    def peek(self) -> Token:
        """Return the token at the place, or one that says that the text ended."""
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def next(self) -> Token:
        """Return the token at the place and go past it."""
        token = self.peek
        self.at += 1
        return token

    def take(self, *texts: str) -> bool:
        """Go past the token at the place if it is one of these signs; return whether it is."""
        if self.peek.kind in ("op", "cmd") and self.peek.text in texts:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Go past one sign. Raises UnreadableError where another stands."""
        if not self.take(text):
            raise UnreadableError(f"{text!r} expected, found {self.peek.text!r}")

    def scalar(self, node: Node) -> Node:
        """Return a node that arithmetic may use. Raises UnreadableError for any other."""
        if not isinstance(node, SCALARS):
            raise UnreadableError(f"arithmetic on a {type(node).__name__.lower()}")
        return node


def number_of(text: str) -> Fraction:
    """Return the exact value of a decimal literal of any length."""
    whole, _, part = text.partition(".")
    return Fraction(_integer(whole + part), 10 ** len(part))


def _integer(digits: str) -> int:
    # In pieces, because Python refuses to convert more than a few thousand digits at once.
    value = 0
    for start in range(0, len(digits), 2000):
        piece = digits[start : start + 2000]
        value = value * 10 ** len(piece) + int(piece)
    return value


def repeating(text: str) -> Fraction:
    r"""Return the exact value of a repeating decimal such as ``0.1\overline{6}``."""
    head, _, cycle = text.replace("}", "").partition("\\")
    cycle = cycle.partition("{")[2]
    scale = 10 ** len(head.partition(".")[2])
    return number_of(head + "0") + Fraction(_integer(cycle), scale * (10 ** len(cycle) - 1))


def proper_fraction(top: Node, bottom: Node) -> Num | None:
    """Return one positive whole number over a greater one, None where they are not that."""
    if not (isinstance(top, Num) and isinstance(bottom, Num)):
        return None
    whole = top.value.denominator == bottom.value.denominator == 1
    return Num(top.value / bottom.value) if whole and 0 < top.value < bottom.value else None
