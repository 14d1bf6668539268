"""Plain numbers in plain replies: a reward that needs no worker and no time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from lagzero.score.exact import IN_PROCESS_BITS, Budget, TooLargeError, rational
from lagzero.score.extract import NoAnswer, has_box, unwrap, without_reasoning
from lagzero.score.gold import gold_text
from lagzero.score.judgement import Judgement, column_of, completion_text
from lagzero.score.parse import number_of
from lagzero.score.read import readings

_NUMBER = re.compile(
    r"(?<![\w.,])[-\u2212+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+(?![\d.]))?(?![\w]|[.,]\d)"
    r"|(?<![\w.,])[-\u2212+]?\.\d+(?!\w)"
)
_AFTER_OPERAND = re.compile(r"\w$|[\d)\]}]\s*$")
_DECORATION = " \t\r\n*_`$"


def last_number(text: str) -> str | None:
    """Return the last number of a text, None where it has none.

    A minus after a number is an operator: the last number of ``7-3`` is 3.
    """
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    found = last[0]
    if found[0] in "-\u2212+" and _AFTER_OPERAND.search(text[: last.start()]):
        return found[1:]
    return found


def plain_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number: 12, -3.5, 2/3, 1,234."""
    text = text.strip().replace("\u2212", "-")
    if not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.replace(",", "").lstrip("+-").partition("/")
    if bottom and not bottom.strip("0"):
        return None
    value = number_of(top) / (number_of(bottom) if bottom else 1)
    return -value if text.startswith("-") else value


class NumberAnswer:
    """Reward 1 for a reply that is the right number, else 0.

    Options: ``column`` holds the gold answers; ``strict: true`` takes the whole reply (or the whole
    of its last box) for the number, ``strict: false`` its last number. Beside the value it reports
    ``answered``: 1 where there is such a number, right or wrong.
    """

    def __init__(self, *, column: str = "answer", strict: bool = True):
        self.column = column
        self.strict = strict

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return one value a completion."""
        return [judgement.value for judgement in self.judge(completions, columns)]

    def judge(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Judgement]:
        """Return one judgement a completion; the note holds the number that was found."""
        golds = column_of(columns, self.column, len(completions))
        return [
            self._judgement(gold, completion_text(completion))
            for gold, completion in zip(golds, completions, strict=True)
        ]

    def number_in(self, reply: str) -> str | None:
        """Return the number that a reply gives, as text."""
        said = without_reasoning(reply)
        if isinstance(said, NoAnswer):
            return None
        if has_box(said):
            said = unwrap(said)
        if not self.strict:
            return last_number(said)
        whole = said.strip(_DECORATION)
        whole = whole[:-1].strip(_DECORATION) if whole.endswith(".") else whole
        return whole if plain_number(whole) is not None else None

    def _judgement(self, gold: object, reply: str) -> Judgement:
        text = gold_text(gold)
        if text is None:
            return Judgement(None, note="the row has no gold answer")
        right = _gold_number(text)
        found = self.number_in(reply)
        if found is None:
            return Judgement(0.0, {"answered": 0.0}, note="no number found")
        verdict = plain_number(found) == right
        word = "right" if verdict else "wrong"
        return Judgement(float(verdict), {"answered": 1.0}, note=f"{word}: {found[:200]}")


def _gold_number(gold: str) -> Fraction:
    value = plain_number(unwrap(gold))
    if value is not None:
        return value
    for reading in readings(gold):
        try:
            exact = rational(reading.node, Budget(IN_PROCESS_BITS))
        except TooLargeError:
            continue
        if exact is not None:
            return exact
    raise ValueError(f"number_answer needs a number as the gold answer, not {gold!r}")
