"""From configuration to prompts: read, check, render, measure, order; and say what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lagzero.config import DataConfig, SourceConfig
from lagzero.config_files import chat_template_text
from lagzero.data.prompts import Prompts
from lagzero.data.rows import Row, check_records
from lagzero.data.source import check_source, read_records, source_columns, source_labels
from lagzero.data.template import Rendering, Tokenizer, render
from lagzero.errors import ConfigError, DataError
from lagzero.types import Array


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that was left out, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading came to. ``num_rows`` is what the sources held, ``num_prompts`` what is left."""

    num_rows: int
    num_prompts: int
    dropped: tuple[Dropped, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])  # never became rows
    max_prompt_tokens: int = 0  # longest prompt that is left, rendered

    def summary(self) -> str:
        """Return one line for people."""
        counts = dict(self.left_out)
        for row in self.dropped:
            # Lengths differ from row to row; what comes before them is the kind of reason.
            kind = row.reason.partition(":")[0]
            counts[kind] = counts.get(kind, 0) + 1
        parts = [f"{count} left out ({reason})" for reason, count in sorted(counts.items())]
        longest = f"longest {self.max_prompt_tokens} tokens"
        return ", ".join([f"{self.num_prompts} prompts", longest, *parts])


def load_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    which: Literal["train", "eval"],
    seed: int = 0,
    system_prompt: str | None = None,
    chat_template: str | None = None,
    context_limit: int | None = None,
) -> tuple[Prompts, LoadReport]:
    """Load the training or the held-out prompts.

    Both are read, checked and rendered alike; only the order differs: held-out prompts are visited
    once, in the order of their sources. ``seed`` orders the training prompts. A prompt is too long
    above ``config.max_prompt_tokens``, or when it fills the model's ``context_limit`` and leaves no
    room for one token of reply; both count rendered tokens.

    Raises ConfigError for settings that cannot be met and DataError, with every bad row of every
    source, for rows that cannot be used; also when no prompt is left.
    """
    sources = config.train if which == "train" else config.eval
    if not sources:
        raise ConfigError([f"data.{which}: there is no source"])
    rows, left_out = _checked_rows(f"data.{which}", sources, config)
    template = None if chat_template is None else chat_template_text(chat_template)
    how = Rendering(config.chat, system_prompt, template)
    kept, token_ids, dropped = _measured(rows, tokenizer, how, config, context_limit)
    if not kept:
        reasons = [f"{row.id}: {row.reason}" for row in dropped] or ["the sources hold no rows"]
        raise DataError(f"data.{which}: no prompt is left", reasons)
    prompts = Prompts(
        kept,
        token_ids,
        seed=seed,
        shuffle=config.shuffle and which == "train",
        epochs=config.epochs if which == "train" else 1,
    )
    longest = max(len(ids) for ids in token_ids)
    return prompts, LoadReport(len(rows), len(kept), tuple(dropped), left_out, longest)


def drop_overlap(train: Prompts, evals: Prompts) -> tuple[Prompts, tuple[Dropped, ...]]:
    """Return ``evals`` without the prompts that ``train`` also holds, and what was dropped.

    Two prompts are the same when their rendered tokens are. Raises DataError when none is left.
    """
    seen = {prompt.token_ids: prompt.id for prompt in train.in_source_order()}
    dropped = tuple(
        Dropped(prompt.id, f"also a training prompt: {seen[prompt.token_ids]}")
        for prompt in evals.in_source_order()
        if prompt.token_ids in seen
    )
    if dropped and len(dropped) == len(evals):
        reasons = [f"{row.id}: {row.reason}" for row in dropped]
        raise DataError("data.eval: no held-out prompt is left", reasons)
    return evals.without({row.id for row in dropped}), dropped


def _checked_rows(
    at: str, sources: Sequence[SourceConfig], config: DataConfig
) -> tuple[list[Row], dict[str, int]]:
    rows: list[Row] = []
    left_out: dict[str, int] = {}
    problems: dict[str, list[str]] = {}
    misconfigured: list[str] = []
    # Gathered, so that all sources are reported at once.
    for number, (source, label) in enumerate(zip(sources, source_labels(sources), strict=True)):
        wrong = check_source(f"{at}.{number}", source)
        if wrong:
            misconfigured += wrong
            continue
        try:
            records = read_records(source)
        except ConfigError as error:
            misconfigured += [f"{at}.{number}.{problem}" for problem in error.problems]
            continue
        columns = source_columns(source, config)
        good, bad = check_records(records, columns, label, config.chat)
        rows += good
        if bad:
            problems[source.path or label] = problems.get(source.path or label, []) + bad
        for reason, count in records.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    if misconfigured:
        raise ConfigError(misconfigured)
    _refuse(problems)
    return rows, left_out


def _refuse(problems: Mapping[str, list[str]]) -> None:
    if len(problems) == 1:
        name, lines = next(iter(problems.items()))
        raise DataError(name, lines)
    if problems:
        lines = [f"{name}: {line}" for name, found in problems.items() for line in found]
        raise DataError(f"{len(problems)} sources", lines)


def _measured(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    how: Rendering,
    config: DataConfig,
    context_limit: int | None,
) -> tuple[list[Row], list[Array], list[Dropped]]:
    limits = [config.max_prompt_tokens] if config.max_prompt_tokens is not None else []
    limits += [context_limit - 1] if context_limit is not None else []
    limit = min(limits, default=None)
    kept: list[Row] = []
    token_ids: list[Array] = []
    dropped: list[Dropped] = []
    problems: list[str] = []
    for row, ids in zip(rows, render(rows, tokenizer, how), strict=True):
        if isinstance(ids, str):
            problems.append(f"{row.id}: {ids}")
        elif limit is not None and len(ids) > limit:
            reason = f"prompt above {limit} tokens: has {len(ids)}"
            dropped.append(Dropped(row.id, reason))
        else:
            kept.append(row)
            token_ids.append(ids)
    if config.long_prompts == "refuse":
        problems += [f"{row.id}: {row.reason}" for row in dropped]
    if problems:
        raise DataError("data", problems)
    return kept, token_ids, dropped
