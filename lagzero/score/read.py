"""From the text of an answer to what it says: its tree, its unit and its closing remark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from lagzero.score.nodes import (
    Degree,
    Listing,
    Mul,
    Node,
    Relation,
    Sym,
    UnreadableError,
    product,
    symbols,
    word_set,
)
from lagzero.score.parse import parse
from lagzero.score.tokens import Token, join_thousands, lex, normalise

_REMARK_STARTS = word_set("for where with when whenever if such provided given")
# Words that only say what a letter stands for. Any other remark narrows the answer.
_HARMLESS = word_set(
    "for where with when whenever any all every each some an a is are be integer integers "
    "number numbers real reals natural naturals whole rational arbitrary constant constants "
    "denotes the of in set any-integer"
)
_NOT_UNITS = word_set(
    "is are was not no but times plus minus than mod if then so because since maybe between "
    "from to by up down less more least most either neither both approximately about over "
    "until squared cubed half"
)
_UNIT_NAMES = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm",
    "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb", "lbs": "lb", "ounce": "oz",
    "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml",
    "dollar": "usd", "buck": "usd", "cent": "cent", "degree": "degree", "deg": "degree",
    "radian": "radian", "rad": "radian", "mph": "mi/h", "kph": "km/h",
    "a.m.": "am", "p.m.": "pm", "a.m": "am", "p.m": "pm",
}  # fmt: skip
_SIZES: dict[str, tuple[str, Fraction]] = {
    "mm": ("length", Fraction(1, 1000)), "cm": ("length", Fraction(1, 100)),
    "m": ("length", Fraction(1)), "km": ("length", Fraction(1000)),
    "in": ("length", Fraction(254, 10000)), "ft": ("length", Fraction(3048, 10000)),
    "yd": ("length", Fraction(9144, 10000)), "mi": ("length", Fraction(1609344, 1000)),
    "s": ("time", Fraction(1)), "min": ("time", Fraction(60)), "h": ("time", Fraction(3600)),
    "day": ("time", Fraction(86400)), "week": ("time", Fraction(604800)),
    "mg": ("mass", Fraction(1, 1000)), "g": ("mass", Fraction(1)), "kg": ("mass", Fraction(1000)),
    "ml": ("volume", Fraction(1, 1000)), "l": ("volume", Fraction(1)),
    "cent": ("money", Fraction(1, 100)), "usd": ("money", Fraction(1)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read an answer. ``unit`` and ``remark`` are "" where there is none."""

    node: Node
    unit: str = ""
    remark: str = ""


def readings(text: str) -> list[Reading]:
    """Return the ways to read an answer, none where it is unreadable.

    ``1,234`` is a number and also a listing of two, so there may be two ways.
    """
    try:
        plain = normalise(text)
    except UnreadableError:
        return []
    found: list[Reading] = []
    for form in dict.fromkeys((join_thousands(plain), plain)):
        try:
            found.append(_read(lex(form)))
        except (UnreadableError, RecursionError):
            continue
    return found


def plain_form(text: str) -> str:
    """Return the text with only the white space that separates something, for equality as text."""
    if len(text) > 200_000:
        return text
    try:
        text = normalise(text)
    except UnreadableError:
        text = text.strip()
    text = re.sub(r"\{(\w)\}", r" \1", text)
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)


def unit_factor(gold: str, answer: str) -> Fraction | None:
    """Return what turns a number of the answer's units into the gold's; None: other units.

    A unit that only one side names is left out of account.
    """
    if not gold or not answer or gold == answer:
        return Fraction(1)
    (gold_name, gold_power), (name, power) = _power_of(gold), _power_of(answer)
    if gold_power != power or gold_name not in _SIZES or name not in _SIZES:
        return None
    (gold_kind, gold_size), (kind, size) = _SIZES[gold_name], _SIZES[name]
    return (size / gold_size) ** power if kind == gold_kind else None


def with_letter_unit(reading: Reading, other: Reading) -> Reading:
    """Return ``5 m`` as five metres where the other side has a unit; alone it is 5 times m."""
    node = reading.node
    if reading.unit or not other.unit or not isinstance(node, Mul) or len(node.args) < 2:
        return reading
    *rest, last = node.args
    if not isinstance(last, Sym) or last.name not in _SIZES:
        return reading
    return replace(reading, node=product(rest) if len(rest) > 1 else rest[0], unit=last.name)


def _read(tokens: list[Token]) -> Reading:
    tail = next((at for at, token in enumerate(tokens) if token.kind == "word"), None)
    unit = remark = ""
    if tail and not all(token.kind == "word" for token in tokens):
        words = tokens[tail:]
        tokens = tokens[:tail]
        if words[0].text.split()[0] in _REMARK_STARTS:
            remark = _remark(words)
            while tokens and tokens[-1].text in (",", ";"):
                tokens.pop()
        else:
            unit = _unit(tokens, words)
    node = parse(tokens)
    node, membership = _without_membership(node)
    if isinstance(node, Degree) and not unit:
        node, unit = node.of, "degree"
    return Reading(node, unit, remark or membership)


def _remark(words: Sequence[Token]) -> str:
    text = " ".join(word.text for word in words)
    names = re.findall(r"[a-z-]{2,}|[^a-z\s]", text.lower().replace("domain z", "integer"))
    harmless = all(name in _HARMLESS or name in r"\,." for name in names)
    return "" if harmless else text


def _without_membership(node: Node) -> tuple[Node, str]:
    r"""Take ``n \in \mathbb{Z}`` off the end of ``2n+1, n \in \mathbb{Z}``."""
    if not (isinstance(node, Listing) and not node.opening and len(node.items) > 1):
        return node, ""
    *items, last = node.items
    if not (isinstance(last, Relation) and last.ops == ("in",)):
        return node, ""
    name, domain = last.members
    if not (isinstance(domain, Sym) and (domain.name == "R" or domain.name.startswith("domain"))):
        return node, ""
    named = symbols(name)
    if not named or not named <= frozenset[str]().union(*map(symbols, items)):
        return node, ""
    kept = items[0] if len(items) == 1 else Listing("", "", tuple(items), node.joiner)
    return kept, ""


def _unit(head: Sequence[Token], words: Sequence[Token]) -> str:
    """Return the unit that stands after a number. Raises UnreadableError for other words."""
    ends = head[-1].kind != "op" or head[-1].text in (")", "]", "}", "!", "%", "|")
    if not ends or not any(token.kind in ("num", "cmd", "repeating") for token in head):
        raise UnreadableError("words that no number stands before")
    for before, token in pairwise(words):
        if token.kind == "num" and before.text not in ("^", "{", "-"):
            raise UnreadableError(f"after a unit: {token.text!r}")
        if token.kind not in ("word", "num", "sym") and token.text not in (
            "^",
            "{",
            "}",
            "/",
            "*",
            "-",
            ".",
        ):
            raise UnreadableError(f"after a unit: {token.text!r}")
    text = " ".join(token.text for token in words)
    text = re.sub(r"\s*([\^{}/*.-])\s*", r"\1", text).replace("{", "").replace("}", "")
    names = re.split(r"[\s/*^-]+", text)
    if len(names) > 5 or any(name in _NOT_UNITS for name in names):
        raise UnreadableError(f"not a unit: {text!r}")
    return _canonical_unit(text)


def _canonical_unit(text: str) -> str:
    text = re.sub(r"\bper\b", "/", text)
    for word, power in (("square", 2), ("sq", 2), ("cubic", 3)):
        text = re.sub(rf"\b{word}\.?\s+(\S+)", rf"\1^{power}", text)
    return re.sub(r"[a-z.]{1,}", lambda match: _unit_name(match[0]), text).replace(" ", "")


def _unit_name(word: str) -> str:
    if word in _UNIT_NAMES:
        return _UNIT_NAMES[word]
    single = word[:-1] if len(word) > 3 and word.endswith("s") else word
    return _UNIT_NAMES.get(single, single)


def _power_of(unit: str) -> tuple[str, int]:
    name, _, power = unit.partition("^")
    return name, int(power) if power.isdigit() and len(power) < 3 else 1
