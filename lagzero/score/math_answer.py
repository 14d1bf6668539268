"""The answer checker: whether a reply's answer equals the gold answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lagzero.score.checker_pool import CheckerError, CheckerPool, Job
from lagzero.score.decide import decide_at_once
from lagzero.score.extract import NoAnswer, extract_answer, without_reasoning
from lagzero.score.gold import gold_text
from lagzero.score.judgement import Judgement, column_of, completion_text
from lagzero.score.number_answer import last_number

MAX_NOTE_CHARS = 200


def check(
    gold: object, answer: str, pool: CheckerPool | None = None, *, round_to_gold: bool = False
) -> bool:
    """Return whether an answer equals the gold answer (text or a number), by the written rules.

    Rational values are decided at once. Anything else goes to ``pool``, or without one to a worker
    that lives for this check. Never runs anything that a text holds. A gold answer that is missing
    or empty equals nothing. Raises CheckerError when the workers themselves fail.
    """
    text = gold_text(gold)
    if text is None:
        return False
    verdict = decide_at_once(text, answer, round_to_gold=round_to_gold)
    if verdict is not None:
        return verdict
    job = Job(text, answer, round_to_gold)
    if pool is not None:
        return pool.check(job)
    with CheckerPool() as own:
        return own.check(job)


class MathAnswer:
    """Reward 1 for a right answer, 0 for a wrong one or none.

    Options: ``column`` holds the gold answers; ``extract: false`` takes the whole reply for the
    answer (a box in it is still opened); ``last_number: true`` takes the last number of a reply
    that marks no answer; ``round_to_gold: true`` accepts what rounds to a decimal gold answer.
    Beside the value it reports ``answered``: 1 where the reply gives an answer, right or wrong.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        workers: int = 1,
        column: str = "answer",
        extract: bool = True,
        last_number: bool = False,
        round_to_gold: bool = False,
    ):
        self.pool = CheckerPool(timeout_s, workers)
        self.column = column
        self.extract = extract
        self.last_number = last_number
        self.round_to_gold = round_to_gold

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return one value a completion. Raises CheckerError when a check could not be made."""
        judgements = self.judge(completions, columns)
        for judgement in judgements:
            if judgement.failure:
                raise CheckerError(judgement.failure)
        return [judgement.value for judgement in judgements]

    def judge(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Judgement]:
        """Return one judgement a completion; the note holds the answer that was found."""
        golds = column_of(columns, self.column, len(completions))
        texts = [gold_text(gold) for gold in golds]
        answers = [self.answer_of(completion_text(completion)) for completion in completions]
        verdicts: dict[Job, bool | CheckerError] = {}
        waiting: list[Job] = []
        for gold, answer in zip(texts, answers, strict=True):
            if gold is None or isinstance(answer, NoAnswer):
                continue
            job = Job(gold, answer, self.round_to_gold)
            if job not in verdicts:
                verdict = decide_at_once(gold, answer, round_to_gold=self.round_to_gold)
                verdicts[job] = verdict is True
                if verdict is None:
                    waiting.append(job)
        verdicts.update(zip(waiting, self.pool.check_all(waiting), strict=True))
        return [
            self._judgement(gold, answer, verdicts)
            for gold, answer in zip(texts, answers, strict=True)
        ]

    def answer_of(self, reply: str) -> str | NoAnswer:
        """Return what a reply's answer is under these options."""
        said = without_reasoning(reply)
        if isinstance(said, NoAnswer):
            return said
        if not self.extract:
            return said if said.strip() else NoAnswer("the reply is empty")
        found = extract_answer(reply)
        if isinstance(found, NoAnswer) and found.unmarked and self.last_number:
            return last_number(said) or found
        return found

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    def _judgement(
        self,
        gold: str | None,
        answer: str | NoAnswer,
        verdicts: Mapping[Job, bool | CheckerError],
    ) -> Judgement:
        if gold is None:
            return Judgement(None, note="the row has no gold answer")
        if isinstance(answer, NoAnswer):
            return Judgement(0.0, {"answered": 0.0}, note=f"no answer: {answer.reason}")
        verdict = verdicts[Job(gold, answer, self.round_to_gold)]
        if isinstance(verdict, CheckerError):
            return Judgement(None, failure=str(verdict))
        word = "right" if verdict else "wrong"
        return Judgement(
            float(verdict), {"answered": 1.0}, note=f"{word}: {answer[:MAX_NOTE_CHARS]}"
        )
