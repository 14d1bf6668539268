"""Checks of a built-in reward's options, made before anything is loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from lagzero.errors import ConfigError
from lagzero.nearest import unknown_name


def is_whole(value: object, least: int) -> bool:
    """Say whether an option is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_switch(value: object) -> bool:
    """Say whether an option is true or false."""
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    """Say whether an option is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def refuse(*checks: tuple[str, object, bool, str]) -> None:
    """Raise one ConfigError for all options (name, what was found, is valid, what is valid)."""
    problems = [
        f"{name}: found {found!r}; valid: {valid}"
        for name, found, holds, valid in checks
        if not holds
    ]
    if problems:
        raise ConfigError(problems)


def one_of(name: str, value: object, *valid: str) -> None:
    """Raise ConfigError, with the nearest valid word, unless an option is one of them."""
    if value not in valid:
        raise ConfigError([f"{name}: {unknown_name(str(value), valid)}"])


def model_settings(path: object) -> dict[str, Any] | None:
    """Return a model folder's config.json; None for a hub id, which is looked up when loading.

    Raises ConfigError for a folder that is none, or that holds no model.
    """
    if not isinstance(path, str) or not path:
        raise ConfigError([f"path: found {path!r}; valid: a model folder or a hub id"])
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith(("/", "./", "../", "~")):
            raise ConfigError([f"path: there is no folder {path}; give a model folder or a hub id"])
        return None
    try:
        return cast("dict[str, Any]", json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError) as error:
        problem = f"path: {path} holds no readable config.json; give a folder of save_pretrained"
        raise ConfigError([f"{problem} ({error})"]) from error
