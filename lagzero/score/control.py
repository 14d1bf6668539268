"""Keeps text that a policy wrote from posing as the tokens that structure a chat."""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts that a tokenizer turns into control tokens: special, or of its template."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added: Iterable[Any] = tokenizer.added_tokens_decoder.values()
    names = {str(t.content) for t in added if t.special or t.content in template}
    names.update(tokenizer.all_special_tokens)
    return tuple(sorted(name for name in names if len(name) > 1 and not name.isspace()))


def without_control(text: str, tokens: Iterable[str]) -> str:
    """Return ``text`` with a space in each control token that it spells out: ``< |im_end|>``.

    Text without them is left as it is. Otherwise a response could end its own turn, and speak for
    the user, to the model that judges it.
    """
    tokens = tuple(tokens)
    while found := [token for token in tokens if token in text]:
        for token in found:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text
