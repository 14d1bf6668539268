"""Problems of the reasoning-gym package, and a reward that judges by each dataset's own rule.

Several of its datasets pass the model's text to ``eval``, directly or through sympy's parser. Two
of these (countdown, puzzle24) are judged here after a check that lets only arithmetic through; the
others are refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from lagzero.config import SourceConfig
from lagzero.data.rows import Record, Records
from lagzero.errors import ConfigError, LagzeroError
from lagzero.nearest import unknown_name

DEFAULT_SIZE = 1000
MAX_EXPRESSION = 200  # characters; bounds the work of the parser and the depth of parentheses

# Datasets whose answers are arithmetic expressions, which their rule evaluates.
ARITHMETIC = ("countdown", "puzzle24")
# Datasets whose module evaluates text of its own making, never the model's (read in 0.1.25).
EVALUATES_OWN_TEXT = (
    "basic_arithmetic",
    "bitwise_arithmetic",
    "codeio",
    "number_sorting",
    "propositional_logic",
)
_EVALUATION = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
_ARITHMETIC_TEXT = re.compile(r"[0-9+\-*/() ]+")

Reward = Callable[..., list[float | None]]


def reasoning_gym_records(source: SourceConfig) -> Records:
    """Generate ``source.size`` problems (default 1000) of the dataset ``source.name``.

    Rows hold prompt, answer and ``entry``, the dataset's whole record, which its own rule needs.
    The package seeds problem i with ``seed + i``, so neighbouring seeds would repeat all problems
    but one; here (name, split, seed) is hashed to a start, which keeps seeds and splits apart.
    Problems that may still coincide are found by ``drop_overlap``.
    Raises ConfigError, its paths relative to the source, for an unknown dataset or option, or
    settings that the dataset refuses.
    """
    assert source.name is not None  # a rule of data.source
    size = source.size or DEFAULT_SIZE
    start = hashlib.sha256(f"{source.name} {source.split} {source.seed}".encode()).digest()
    # 31 bits: some datasets hand the seed to numpy's legacy generator, which takes no more than 32.
    seed = int.from_bytes(start[:4], "big") >> 1
    dataset = create_dataset(source.name, source.options, seed=seed, size=size)
    records: list[Record] = []
    left_out = 0
    for at in range(size):
        try:
            entry = dataset[at]
        except ValueError:  # how a dataset says that this seed led to no problem
            left_out += 1
            continue
        fields = {"prompt": entry["question"], "answer": entry["answer"], "entry": entry}
        records.append(Record(at + 1, f"row {at + 1}", fields))
    return Records(records, left_out={"not generated": left_out} if left_out else {})


def extract_answer(text: str) -> str:
    """Return what follows the last ``<answer>`` up to its close, else the last line with text."""
    _, tag, tail = text.rpartition("<answer>")
    if tag:
        return tail.partition("</answer>")[0].strip()
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def reasoning_gym_score(name: str, read: Callable[[str], str] = extract_answer) -> Reward:
    """Return a dataset's own rule as ``f(prompts, completions, entry=[...], **columns)``.

    ``read`` finds the answer in a reply; the dataset's own rule gives its score, in 0..1. For
    datasets of ``ARITHMETIC`` an answer with anything but digits, ``+ - * / ( )`` and spaces, with
    ``**`` or ``//``, or longer than ``MAX_EXPRESSION`` scores 0 and is never evaluated.
    Raises ConfigError for an unknown dataset and for one that evaluates what a model wrote.
    """
    dataset = create_dataset(name, {})
    guarded = name in ARITHMETIC
    if not guarded and name not in EVALUATES_OWN_TEXT and _evaluates(dataset):
        raise ConfigError(
            [
                f"name: '{name}' may evaluate the model's text as code when it scores; use another "
                "reward, such as a comparison with the answer column"
            ]
        )

    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        entry: Sequence[Mapping[str, Any]],
        **columns: Any,
    ) -> list[float | None]:
        scores: list[float | None] = []
        for completion, record in zip(completions, entry, strict=True):
            answer = read(_text(completion))
            if guarded and not is_arithmetic(answer):
                scores.append(0.0)
            else:
                scores.append(float(dataset.score_answer(answer, record)))
        return scores

    return score


def is_arithmetic(text: str) -> bool:
    """Say whether a parser may see the text: short, and only digits, + - * / ( ) and spaces."""
    return (
        len(text) <= MAX_EXPRESSION
        and _ARITHMETIC_TEXT.fullmatch(text) is not None
        and re.search(r"\*\s*\*|/\s*/", text) is None  # a power can take for ever
        and re.search(r"[0-9)]\s*\(|\)\s*[0-9]|[0-9]\s+[0-9]", text) is None  # 2(3) is a call
    )


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _evaluates(dataset: Any) -> bool:
    """Say whether the module that scores holds a call that evaluates text, or scores elsewhere."""
    rule: Any = cast(Any, type(dataset)).score_answer
    if ".score_answer(" in inspect.getsource(rule):
        return True
    return _EVALUATION.search(inspect.getsource(sys.modules[rule.__module__])) is not None


def create_dataset(name: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """Make a dataset of the package.

    Raises ConfigError for an unknown name or option and for values that the dataset refuses, with
    the paths ``name`` and ``options.x``; LagzeroError without the package.
    """
    try:
        from reasoning_gym import factory  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise LagzeroError(
            "a reasoning_gym source needs the package: pip install 'lagzero[reasoning-gym]'"
        ) from error
    known = cast(dict[str, tuple[Any, Any]], cast(Any, factory).DATASETS)
    if name not in known:
        raise ConfigError([f"name: {unknown_name(name, known)}"])
    valid = {field.name for field in dataclasses.fields(known[name][1])} - {"seed", "size"}
    unknown = [f"options.{o}: {unknown_name(o, valid)}" for o in options if o not in valid]
    if unknown:
        raise ConfigError(unknown)
    try:
        return cast(Any, factory).create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError([f"options: {name} refuses them: {error}"]) from error
