"""What the configuration gives as a file or folder, or as something else in its place."""

from __future__ import annotations

from pathlib import Path

from lagzero.errors import ConfigError


def chat_template_text(given: str) -> str:
    """Return the Jinja text of ``model.chat_template``: itself, or what the file of that name has.

    Jinja text is what has ``{{`` or ``{%`` in it. Raises ConfigError for what is neither.
    """
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no name that a file can have
        problem = (
            f"model.chat_template: '{given[:80]}' is neither Jinja text (no {{{{ or {{%) nor a "
            "readable file; give one, or null for the tokenizer's own"
        )
        raise ConfigError([problem]) from error


def looks_like_path(text: str) -> bool:
    """Say whether a model's name can only mean a folder, not a hub id."""
    return text.startswith(("/", "./", "../", "~"))  # ~ of a user who does not exist
