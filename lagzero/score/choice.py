"""Multiple choice: which one letter an answer picks."""

from __future__ import annotations

import re

_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}"
)
_ALONE = re.compile(r"\(?([A-Ja-j])\)?[.:]?")
_WITH_TEXT = re.compile(r"(?:\(([A-J])\)|([A-J])[.:)])\s+(.+)", re.DOTALL)
_LEAD = re.compile(r"^(?:the\s+)?(?:correct\s+)?(?:option|choice)\s+(?:is\s+)?:?\s*", re.IGNORECASE)
_ANOTHER = re.compile(
    r"^(?:or|and|/|,|&)\s*\(?[A-J]\)?(?![A-Za-z])|(?:\bor|\band|/|,|&)\s*(?:\([A-J]\)|[A-J][.:)])"
    r"|(?:\bor|\band)\s+[A-J]\s*$"
)


def choice_letter(answer: str) -> str | None:
    """Return the letter A to J that an answer picks, None where it picks none or several.

    ``E``, ``(e)``, ``E.``, ``option E`` and ``E: some text`` pick E. ``E some text`` does not: a
    letter that stands before a word may be the word "A".
    """
    text = _plain(answer)
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone[1].upper()
    with_text = _WITH_TEXT.fullmatch(text)
    if with_text is None or _ANOTHER.search(with_text[3]):
        return None
    return with_text[1] or with_text[2]


def choice_gold(gold: str) -> str | None:
    """Return the letter of a gold answer that is a choice: a capital, alone or with its text."""
    text = _plain(gold)
    if re.fullmatch(r"\(?[A-J]\)?[.:]?", text) or _WITH_TEXT.fullmatch(text):
        return choice_letter(gold)
    return None


def _plain(text: str) -> str:
    text = _WRAPPER.sub(r"\1", text).replace("$", "")
    text = re.sub(r"\*\*|__|\\[ ,;]", " ", text).strip()
    return _LEAD.sub("", text.rstrip(" ")).strip()
