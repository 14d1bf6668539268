"""Generated number problems: as many as wanted, in any mix, with a held-out part.

A problem's split is a function of what is asked, never of a seed. One in ``EVAL_ONE_IN`` problems,
by a stable hash, belongs to ``eval``; the ``train`` split never holds one of these. Operands whose
order does not matter are sorted before hashing: when 12 + 34 is held out, so is 34 + 12.
"""

from __future__ import annotations

import hashlib
import math
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from lagzero.config import SourceConfig
from lagzero.data.rows import Record, Records
from lagzero.errors import ConfigError
from lagzero.nearest import unknown_name

EVAL_ONE_IN = 5
DEFAULT_SIZE = 1000
MAX_DRAWS = 20_000  # in a row that give nothing new, before the space counts as used up

WORDING = {
    "add": "What is {problem}? Reply with just the number.",
    "sub": "What is {problem}? Reply with just the number.",
    "mul": "What is {problem}? Reply with just the number.",
    "max": "Which is the largest of these numbers: {problem}? Reply with just the number.",
    "min": "Which is the smallest of these numbers: {problem}? Reply with just the number.",
    "compare": "Which number is larger, {problem}? Reply with just the number.",
    "count": "How many times does {target} appear in this list: {problem}? "
    "Reply with just the number.",
}
DEFAULT_COUNT = {"add": 2, "sub": 2, "mul": 2, "max": 3, "min": 3, "compare": 2, "count": 6}
FIXED_COUNT = ("sub", "compare")
DISTINCT = ("max", "min", "compare")


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of problem in the mix: ``count`` numbers of ``digits`` decimal digits each."""

    kind: str
    weight: float = 1.0
    digits: int = 2
    count: int = 0  # 0: the kind's own
    wording: str = ""  # with {problem} (and {target} for kind count); empty: the kind's own

    @property
    def label(self) -> str:
        """Name of the task in the ``task`` column, such as ``add-2x1`` for one-digit sums."""
        return f"{self.kind}-{self.count}x{self.digits}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: the parts of its wording, its answer, and ``key``, which says what is asked."""

    parts: Mapping[str, str]
    answer: int
    key: str


def arithmetic_records(source: SourceConfig) -> Records:
    """Generate ``source.size`` problems (default 1000) with different prompts.

    ``options``: ``tasks``, a list of {kind, weight, digits, count, wording}; without it, two-digit
    sums. Kinds: add, sub (never negative), mul, max, min, compare, count (how often one number
    appears in a list). The mix follows the weights as closely as whole rows allow at every length,
    so a shorter source is a prefix of a longer one. Rows hold prompt, answer and task.
    Raises ConfigError, its paths relative to the source, for options that are unknown or out of
    range and when fewer than ``size`` different problems exist.
    """
    tasks, problems = parse_options(source.options)
    if problems:
        raise ConfigError(problems)
    rng = random.Random(f"arithmetic {source.seed}")  # a text seed keeps -1 apart from 1
    seen: set[str] = set()
    made = [0] * len(tasks)
    records: list[Record] = []
    total = math.fsum(task.weight for task in tasks)
    size = source.size or DEFAULT_SIZE
    for number in range(1, size + 1):
        behind = [t.weight / total * number - m for t, m in zip(tasks, made, strict=True)]
        at = behind.index(max(behind))
        row = _new_row(tasks[at], source.split, rng, seen)
        if row is None:
            raise ConfigError([_used_up(tasks[at], made[at], size, source.split)])
        made[at] += 1
        records.append(Record(number, f"row {number}", row))
    return Records(records)


def in_eval(key: str) -> bool:
    """Say whether the problem that asks ``key`` is held out: SHA-256(key) mod EVAL_ONE_IN = 0."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0


def _new_row(
    task: Task, split: str, rng: random.Random, seen: set[str]
) -> Mapping[str, Any] | None:
    for _ in range(MAX_DRAWS):
        problem = draw_problem(task, rng)
        if in_eval(problem.key) != (split == "eval"):
            continue
        prompt = task.wording.format(**problem.parts)
        if prompt not in seen:
            seen.add(prompt)
            return {"prompt": prompt, "answer": str(problem.answer), "task": task.label}
    return None


def draw_problem(task: Task, rng: random.Random) -> Problem:
    """Draw one problem of a task, uniformly over its operands."""
    low = 10 ** (task.digits - 1) if task.digits > 1 else 0
    span = range(low, 10**task.digits)
    if task.kind in DISTINCT:
        numbers = rng.sample(span, task.count)
    else:
        numbers = [rng.choice(span) for _ in range(task.count)]
    listed, ordered = ", ".join(map(str, numbers)), sorted(numbers)
    match task.kind:
        case "add":
            return Problem({"problem": _joined(numbers, "+")}, sum(numbers), f"add {ordered}")
        case "mul":
            return Problem({"problem": _joined(numbers, "*")}, math.prod(numbers), f"mul {ordered}")
        case "sub":
            small, large = ordered
            return Problem({"problem": f"{large} - {small}"}, large - small, f"sub {ordered}")
        case "max":
            return Problem({"problem": listed}, max(numbers), f"max {ordered}")
        case "min":
            return Problem({"problem": listed}, min(numbers), f"min {ordered}")
        case "compare":  # the same question as max of two, so the same key
            parts = {"problem": f"{numbers[0]} or {numbers[1]}"}
            return Problem(parts, max(numbers), f"max {ordered}")
        case _:
            target = rng.choice(numbers)
            key = f"count {target} {ordered}"
            return Problem({"problem": listed, "target": str(target)}, numbers.count(target), key)


def _joined(numbers: Sequence[int], sign: str) -> str:
    return f" {sign} ".join(map(str, numbers))


def _used_up(task: Task, made: int, size: int, split: str) -> str:
    return (
        f"size: found only {made} different '{task.label}' problems in the {split} "
        f"split, fewer than its share of size={size}; lower size or its weight, or raise digits"
    )


def parse_options(options: Mapping[str, Any]) -> tuple[list[Task], list[str]]:
    """Return the tasks that ``options`` describe and every problem, by paths like ``options.x``."""
    problems = [f"options.{n}: {unknown_name(n, ['tasks'])}" for n in options if n != "tasks"]
    given = options.get("tasks", [{"kind": "add"}])
    if not isinstance(given, list) or not given:
        return [], [*problems, "options.tasks: must be a list of at least one task"]
    tasks: list[Task] = []
    for at, item in enumerate(cast(list[Any], given)):
        task, reasons = _parse_task(item)
        problems += [f"options.tasks.{at}{reason}" for reason in reasons]
        tasks += [task] if task is not None else []
    return tasks, problems


def _parse_task(item: Any) -> tuple[Task | None, list[str]]:
    """Return a task, or None and its problems: ``.key: reason``, or ``: reason`` of the whole."""
    if not isinstance(item, Mapping):
        return None, [f": must be a mapping such as {{kind: add, digits: 2}}, not {item!r}"]
    options = {str(k): v for k, v in cast(Mapping[Any, Any], item).items()}
    known = [field.name for field in fields(Task)]
    reasons = [f".{name}: {unknown_name(name, known)}" for name in options if name not in known]
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in WORDING:
        missing = f"missing; valid: {', '.join(sorted(WORDING))}"
        said = missing if kind is None else unknown_name(str(kind), WORDING)
        return None, [*reasons, f".kind: {said}"]
    weight, digits = options.get("weight", 1.0), options.get("digits", 2)
    count = options.get("count", DEFAULT_COUNT[kind])
    wording = options.get("wording", WORDING[kind])
    if not _is_number(weight) or not 0 < weight < math.inf:
        reasons.append(f".weight: must be a number above 0, not {weight!r}")
    if not _is_int(digits) or not 1 <= digits <= 18:
        reasons.append(f".digits: must be a whole number from 1 to 18, not {digits!r}")
    most = 10 if kind in DISTINCT and digits == 1 else 64
    if not _is_int(count) or not 2 <= count <= most:
        reasons.append(f".count: must be a whole number from 2 to {most}, not {count!r}")
    elif kind in FIXED_COUNT and count != 2:
        reasons.append(f".count: is always 2 for kind {kind}, not {count}")
    reasons += [f".wording: {reason}" for reason in _wording_reasons(kind, wording)]
    if reasons:
        return None, reasons
    return Task(kind, float(weight), digits, count, wording), []


def _wording_reasons(kind: str, wording: Any) -> list[str]:
    wanted = ["problem", "target"] if kind == "count" else ["problem"]
    example = " and ".join(f"{{{name}}}" for name in wanted)
    if not isinstance(wording, str):
        return [f"must be text with {example}, not {wording!r}"]
    try:
        parts = list(string.Formatter().parse(wording))
    except ValueError as error:
        return [f"is not a valid format ({error}); use {example}"]
    found = [name for _, name, _, _ in parts if name is not None]
    plain = all(not spec and not conversion for _, _, spec, conversion in parts)
    if sorted(set(found)) == wanted and plain:
        return []
    return [f"must use {example} and no other field, not {wording!r}"]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)
