"""Seeded sequences of lengths and durations, written as short texts such as ``exponential:mean=2``.

fixed:1500                                      always 1500
list:1,3,1                                      1, 3, 1, and the last one ever after
cycle:100,900                                   100, 900, 100, 900, ...
exponential:mean=1
lognormal:median=1500,sigma=0.9,min=64,max=16384    whole numbers, clipped
trace:FILE                                      the numbers of a text file, then no more
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lagzero.nearest import nearest

_OPTIONS: Mapping[str, Mapping[str, float | None]] = {
    "exponential": {"mean": None},
    "lognormal": {"median": None, "sigma": None, "min": 1.0, "max": math.inf},
}
_LISTS = ("fixed", "list", "cycle")
KINDS = (*_LISTS, *_OPTIONS, "trace")


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """A distribution: ``text`` is how it was written, the rest what that means."""

    text: str
    kind: str
    values: tuple[float, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict[str, float])

    def draws(self, seed: int) -> Draws:
        """Return the sequence of this distribution and seed."""
        return Draws(self._numbers(random.Random(seed)))

    def _numbers(self, rng: random.Random) -> Iterator[float]:
        of = self.options
        match self.kind:
            case "exponential":
                while True:
                    yield rng.expovariate(1.0) * of["mean"]
            case "lognormal":
                centre, sigma, low, high = math.log(of["median"]), of["sigma"], of["min"], of["max"]
                while True:
                    yield min(high, max(low, float(int(rng.lognormvariate(centre, sigma)))))
            case "trace":
                yield from self.values
            case "cycle":
                yield from itertools.cycle(self.values)
            case _:
                yield from self.values
                yield from itertools.repeat(self.values[-1])


class Draws:
    """Numbers drawn once and kept, so that number i is the same whenever it is asked for."""

    def __init__(self, numbers: Iterator[float]):
        self._numbers = numbers
        self._kept: list[float] = []

    def part(self, start: int, count: int) -> Sequence[float]:
        """Return numbers [start, start + count); fewer where the sequence ends."""
        missing = start + count - len(self._kept)
        if missing > 0:
            self._kept.extend(itertools.islice(self._numbers, missing))
        return self._kept[start : start + count]


def parse_lengths(text: str) -> LengthSpec:
    """Read a distribution. Raises ValueError that says what would be valid."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        if not rest and _numbers_in(text):
            return LengthSpec(text, "list", _numbers_in(text))
        raise ValueError(
            f"'{kind}' is no distribution; did you mean '{nearest(kind, KINDS, 0.0)}'? "
            f"(valid: {', '.join(KINDS)})"
        )
    if kind == "trace":
        return LengthSpec(text, kind, _trace(rest))
    if kind in _LISTS:
        values = _numbers_in(rest)
        if not values or (kind == "fixed" and len(values) > 1):
            raise ValueError(f"{kind}:{rest} needs numbers above 0, such as {kind}:1500")
        return LengthSpec(text, kind, values)
    return LengthSpec(text, kind, (), _options(kind, rest))


def _numbers_in(text: str) -> tuple[float, ...]:
    """Return comma-separated positive numbers, or none if any is not one."""
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        return ()
    return values if all(0 < value < math.inf for value in values) else ()


def _trace(path: str) -> tuple[float, ...]:
    try:
        words = Path(path).read_text(encoding="utf-8").split()
    except OSError as error:
        raise ValueError(f"trace:{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"trace:{path} is not text") from None
    values = _numbers_in(",".join(words))
    if not values:
        raise ValueError(f"trace:{path} must hold numbers above 0, apart by white space")
    return values


def _options(kind: str, text: str) -> dict[str, float]:
    valid = _OPTIONS[kind]
    found: dict[str, float] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in valid:
            raise ValueError(
                f"'{name}' is no option of {kind}; did you mean '{nearest(name, valid, 0.0)}'? "
                f"(valid: {', '.join(valid)})"
            )
        numbers = _numbers_in(value)
        if len(numbers) != 1:
            raise ValueError(f"{kind}: {name}={value} must be one number above 0")
        found[name] = numbers[0]
    missing = [name for name, default in valid.items() if default is None and name not in found]
    if missing:
        raise ValueError(f"{kind} needs {' and '.join(f'{name}=NUMBER' for name in missing)}")
    result = {name: found.get(name, default or 0.0) for name, default in valid.items()}
    if kind == "lognormal" and result["min"] > result["max"]:
        raise ValueError(f"lognormal: min={result['min']:g} is above max={result['max']:g}")
    return result
