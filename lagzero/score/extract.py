"""Where in a reply its answer stands. No gold answer is looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from lagzero.score.choice import choice_letter
from lagzero.score.nodes import Words
from lagzero.score.read import readings

MAX_BARE_CHARS = 200
MAX_LINE_CHARS = 25_000
MAX_NESTED = 5


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A reply that gives no answer, and why; ``unmarked``: nothing in it claims to be one."""

    reason: str
    unmarked: bool = False


Answer: TypeAlias = str | NoAnswer

_OPEN = re.compile(r"<(think|thinking|reasoning)>", re.IGNORECASE)
_CLOSE = re.compile(r"</(think|thinking|reasoning)>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"-?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_HASHES = re.compile(r"(?:^|(?<=\s))####[^\S\n]*([^\n]*)")
_MARKER = re.compile(
    r"(?:\bfinal\s+answer|\banswer)\b[*_\s]*(?:(?:is|are)\b[*_\s]*:?|:|=)[*_\s]*"
    r"|\bfinal\s+answer\b[*_]*[^\S\n]*(?=\n)\s*",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(
    r"[.!?](?=\s|$)|,?(?<!\s)\s+(?:because|since|so|as|which|but|therefore)\b", re.IGNORECASE
)
_EMPHASISED = re.compile(r"(\*\*|__|`|\*)(.+?)\1", re.DOTALL)
_EMPHASIS = re.compile(r"^(?:\*\*|__)(.+?)(?:\*\*|__)", re.DOTALL)


def extract_answer(response: str) -> Answer:
    """Return the answer that a reply gives, as text, or why it gives none.

    Reasoning in think tags never counts, and a reply whose reasoning is cut off has no answer.
    Then the first of these that occurs decides, at its last occurrence: a box, answer tags,
    ``####``, words such as "the answer is", and a reply that is an answer and nothing else. An
    occurrence that is empty or cut off means no answer; nothing before it is looked at.
    """
    said = without_reasoning(response)
    if isinstance(said, NoAnswer):
        return said
    for find in (_boxed, _tagged, _hashed, _marked, _bare):
        found = find(said)
        if found is not None:
            return found
    return NoAnswer("no answer is marked", unmarked=True)


def without_reasoning(response: str) -> Answer:
    """Return what a reply says outside its think tags."""
    said, at = "", 0
    closes = list(_CLOSE.finditer(response))
    opened = _OPEN.search(response)
    if closes and (opened is None or closes[0].start() < opened.start()):
        at = closes[0].end()  # the prompt held the opening tag
    while opened := _OPEN.search(response, at):
        closed = _CLOSE.search(response, opened.end())
        if closed is None:
            return NoAnswer("the reasoning is not closed")
        said += response[at : opened.start()] + " "
        at = closed.end()
    rest = response[at:]
    stray = list(_CLOSE.finditer(rest))
    # After a closing tag with no opening one, everything before it was reasoning.
    return rest[stray[-1].end() :] if stray else said + rest


def unwrap(text: str) -> str:
    """Open a box or ``####`` around an answer; the text itself where there is none."""
    found = _boxed(text)
    if found is None:
        found = _hashed(text)
    if found is None:
        return text
    return "" if isinstance(found, NoAnswer) else found


def has_box(text: str) -> bool:
    """Return whether a text has a box, well formed or not."""
    return _BOX.search(text) is not None


def _boxed(text: str) -> Answer | None:
    found: Answer | None = None
    at = 0
    if _BOX.search(text) is None:
        return None
    closing = _closing_braces(text)
    while match := _BOX.search(text, at):
        start = match.end()
        if text.startswith("{", start):
            end = closing.get(start)
            content, at = (text[start + 1 : end], end) if end else (None, start + 1)
        else:
            short = _UNBRACED.match(text, start)
            content, at = (short[0], short.end()) if short else (None, start)
        if content is None:
            found = NoAnswer("the last box is not closed")
        elif is_blank(content):
            found = NoAnswer("the last box is empty")
        elif (inner := list(_BOX.finditer(content))) and len(inner) <= MAX_NESTED:
            inside = _boxed(content)
            found = content.strip() if inside is None else inside
        else:
            found = content.strip()
    return found


def _closing_braces(text: str) -> dict[int, int]:
    """Return where each brace that is closed is closed; escaped braces do not count."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def is_blank(text: str) -> bool:
    """Return whether a text shows nothing."""
    text = re.sub(r"\\(?:text|mathrm|quad|qquad|[,;:! ])|[{}$~\s]|\\$", "", text)
    return not text


def _tagged(text: str) -> Answer | None:
    opened: int | None = None
    found: Answer | None = None
    for match in _TAG.finditer(text):
        if not match[1]:
            opened = match.end()
            found = NoAnswer("the last answer tag is not closed")
        elif opened is not None:
            content = text[opened : match.start()].strip()
            found = content if content else NoAnswer("the answer tags are empty")
            opened = None
    return found


def _hashed(text: str) -> Answer | None:
    matches = list(_HASHES.finditer(text))
    if not matches:
        return None
    return _tidy(matches[-1][1][:MAX_LINE_CHARS]) or NoAnswer("nothing follows ####")


def _marked(text: str) -> Answer | None:
    matches = list(_MARKER.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :].lstrip()[:MAX_LINE_CHARS]
    # What closes emphasis that began before the marker ("**Final answer: 61**") goes with it.
    rest = re.sub(r"^[*_]+\s*(?=[*_])", "", rest)
    emphasis = _EMPHASIS.match(rest)
    if emphasis:
        return _tidy(emphasis[1]) or NoAnswer("nothing follows the word answer")
    line = rest.partition("\n")[0].strip()
    math = _MATH.match(rest)
    if math:
        return next(part for part in math.groups() if part is not None).strip()
    end = _SENTENCE_END.search(line)
    return _tidy(line[: end.start()] if end else line) or NoAnswer(
        "nothing follows the word answer"
    )


def _bare(text: str) -> Answer | None:
    if len(text.strip()) > MAX_BARE_CHARS:
        return None
    text = _tidy(text)
    if not text or "\n" in text:
        return None
    if choice_letter(text) is not None:
        return text
    read = [reading for reading in readings(text) if not isinstance(reading.node, Words)]
    return text if read and not any(reading.remark for reading in read) else None


def _tidy(text: str) -> str:
    text = text.strip()
    for _ in range(MAX_NESTED):
        match = _EMPHASISED.fullmatch(text)
        if match is None:
            break
        text = match[2].strip()
    text = re.sub(r"\s*[*_]{2,}$", "", text) if text.count("**") % 2 else text
    whole = _MATH.fullmatch(text.rstrip("."))
    if whole:
        return next(part for part in whole.groups() if part is not None).strip()
    return re.sub(r"(?<![.\s])\.$", "", text).strip()
