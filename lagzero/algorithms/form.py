"""What a published objective is made of, here: keys, values and the places they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Like:
    """The value of another key of the same configuration."""

    path: str
    default: Any  # of that key, where the user leaves it


@dataclass(frozen=True, slots=True)
class Setting:
    """A key's value and the place that it comes from."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One published objective."""

    name: str
    title: str  # as people write it
    sentence: str
    source: str
    settings: Mapping[str, Setting]  # by dotted path
    sizes: str = ""
    lacks: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict[str, str])  # path: what to give there
