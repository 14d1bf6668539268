"""Renders prompts to token ids. Training and evaluation, the engine and the trainer use this route.

The text of a chat prompt is what the template wrote; the text of a raw prompt is the prompt. Both
are tokenised without the tokenizer's own additions, and then the leading BOS is settled in one
place, ``one_bos``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lagzero.data.rows import Content, Row
from lagzero.errors import ConfigError
from lagzero.types import Array

BATCH_ROWS = 1000


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer; those of transformers have it."""

    chat_template: Any
    bos_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return {"input_ids": one list of ids for each text}."""
        ...

    def apply_chat_template(
        self,
        conversation: list[list[dict[str, str]]],
        *,
        chat_template: str | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> Any:
        """Return one rendered text for each conversation."""
        ...


@dataclass(frozen=True, slots=True)
class Rendering:
    """How prompts become tokens: everything that may differ between two configurations."""

    chat: bool = True
    system_prompt: str | None = None  # before text prompts only; messages are used as they are
    chat_template: str | None = None  # Jinja text; None: the tokenizer's own


def one_bos(ids: Sequence[int], bos_id: int | None, adds: bool) -> list[int]:
    """Return ``ids`` with exactly one leading BOS, where the text or the tokenizer has one.

    ``adds``: the tokenizer puts BOS before a text by itself. Only the lead is touched: some
    tokenizers use their BOS inside a chat as well. Applying it twice changes nothing.
    """
    lead = 0
    while lead < len(ids) and ids[lead] == bos_id:
        lead += 1
    if bos_id is None or not (lead or adds):
        return list(ids)
    return [bos_id, *ids[lead:]]


def render(rows: Sequence[Row], tokenizer: Tokenizer, how: Rendering) -> Iterator[Array | str]:
    """Yield for each row its token ids, int32 [T], or the reason why it cannot be rendered.

    The rendered prompt holds everything that the template adds, up to the header of the reply.
    Rows are rendered in batches, as they are asked for. Raises ConfigError when chat prompts have
    no template, or a system prompt has nowhere to go.
    """
    _check_rendering(tokenizer, how)
    bos_id = tokenizer.bos_token_id
    adds = _encode(tokenizer, ["a"], True)[0][:1] == [bos_id]
    for start in range(0, len(rows), BATCH_ROWS):
        contents = [row.content for row in rows[start : start + BATCH_ROWS]]
        texts = _chat_texts(contents, tokenizer, how) if how.chat else _raw_texts(contents)
        good = [text for text in texts if isinstance(text, str)]
        encoded = iter(_encode(tokenizer, good, False) if good else [])
        for text in texts:
            if isinstance(text, _Unrenderable):
                yield text.reason
                continue
            ids = one_bos(next(encoded), bos_id, adds)
            yield np.array(ids, np.int32) if ids else "renders to no tokens"


@dataclass(frozen=True, slots=True)
class _Unrenderable:
    reason: str


def _check_rendering(tokenizer: Tokenizer, how: Rendering) -> None:
    problems: list[str] = []
    if how.chat and how.chat_template is None and not tokenizer.chat_template:
        problems.append(
            "data.chat: this tokenizer has no chat template; set model.chat_template, "
            "or data.chat=false for raw text"
        )
    if how.system_prompt is not None and not how.chat:
        problems.append("model.system_prompt: raw text (data.chat=false) has no place for one")
    if problems:
        raise ConfigError(problems)


def _encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=special)["input_ids"]]


def _raw_texts(contents: Sequence[Content]) -> list[str | _Unrenderable]:
    return [
        content if isinstance(content, str) else _Unrenderable("messages need data.chat=true")
        for content in contents
    ]


def _chat_texts(
    contents: Sequence[Content], tokenizer: Tokenizer, how: Rendering
) -> list[str | _Unrenderable]:
    from jinja2 import TemplateError  # comes with transformers; a raw prompt does not need it

    chats = [_messages(content, how.system_prompt) for content in contents]
    texts: Sequence[str | _Unrenderable]
    try:
        texts = _apply(chats, tokenizer, how)
    except TemplateError:
        texts = [_one_chat_text(chat, tokenizer, how) for chat in chats]
    return [_check_text(text, content, how) for text, content in zip(texts, contents, strict=True)]


def _one_chat_text(
    chat: list[dict[str, str]], tokenizer: Tokenizer, how: Rendering
) -> str | _Unrenderable:
    from jinja2 import TemplateError

    try:
        return _apply([chat], tokenizer, how)[0]
    except TemplateError as error:
        return _Unrenderable(f"the chat template refuses it: {error}")


def _apply(chats: list[list[dict[str, str]]], tokenizer: Tokenizer, how: Rendering) -> list[str]:
    return list(
        tokenizer.apply_chat_template(
            chats, chat_template=how.chat_template, tokenize=False, add_generation_prompt=True
        )
    )


def _messages(content: Content, system_prompt: str | None) -> list[dict[str, str]]:
    if not isinstance(content, str):
        return [dict(message) for message in content]
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": content}]


def _check_text(text: str | _Unrenderable, content: Content, how: Rendering) -> str | _Unrenderable:
    """Refuse what a template left out without a word: the prompt, or the system prompt."""
    if isinstance(text, str) and isinstance(content, str):
        if content.strip() not in text:
            return _Unrenderable("the chat template leaves out the prompt's text")
        if how.system_prompt is not None and how.system_prompt.strip() not in text:
            return _Unrenderable("the chat template leaves out the system prompt")
    return text
