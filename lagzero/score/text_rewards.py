"""Rewards that look at the text of a reply and at no value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lagzero.score.extract import NoAnswer, extract_answer, unwrap, without_reasoning
from lagzero.score.gold import gold_text
from lagzero.score.judgement import Judgement, column_of, completion_text


class ExactMatch:
    """Reward 1 for a reply whose answer is the gold answer letter by letter, else 0.

    Option ``column`` holds the gold answers; ``ignore_case: true`` compares in lower case. The
    answer is the one that is marked, or the whole reply where none is.
    """

    def __init__(self, *, column: str = "answer", ignore_case: bool = False):
        self.column = column
        self.ignore_case = ignore_case

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return one value a completion."""
        return [judgement.value for judgement in self.judge(completions, columns)]

    def judge(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Judgement]:
        """Return one judgement a completion; the note holds the answer that was found."""
        golds = column_of(columns, self.column, len(completions))
        pairs = zip(golds, completions, strict=True)
        return [self._judgement(gold_text(gold), completion_text(reply)) for gold, reply in pairs]

    def _judgement(self, gold: str | None, reply: str) -> Judgement:
        if gold is None:
            return Judgement(None, note="the row has no gold answer")
        answer = extract_answer(reply)
        if isinstance(answer, NoAnswer) and answer.unmarked:
            answer = without_reasoning(reply)
        if isinstance(answer, NoAnswer) or not answer.strip():
            return Judgement(0.0, {"answered": 0.0}, note="no answer found")
        verdict = self._form(answer) == self._form(unwrap(gold))
        word = "right" if verdict else "wrong"
        return Judgement(float(verdict), {"answered": 1.0}, note=f"{word}: {answer[:200]}")

    def _form(self, text: str) -> str:
        text = " ".join(text.split())
        return text.lower() if self.ignore_case else text


class Format:
    """Reward 1 for a reply that marks an answer, right or wrong, else 0.

    Option ``pattern``: a regular expression that the whole reply must match instead.
    """

    def __init__(self, *, pattern: str | None = None):
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return one value a completion."""
        return [float(self.is_met(completion_text(completion))) for completion in completions]

    def is_met(self, reply: str) -> bool:
        """Return whether a reply has the form."""
        if self.pattern is not None:
            return self.pattern.fullmatch(reply) is not None
        return isinstance(extract_answer(reply), str)
