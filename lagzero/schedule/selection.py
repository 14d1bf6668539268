"""Whether long groups are given up more often than chance would have it: an exact test."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from lagzero.types import Array

UNFINISHED = math.inf
"""Length of a group that was not waited for: it outlasted those that were taken instead."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts over a window of visits that ended: trained or given up.

    ``at_least`` is the length, tokens, from which a visit counts as long; ``p`` the probability of
    ``long_given_up`` or more, were the given-up visits drawn blindly from all of the window.
    """

    visits: int
    long: int
    given_up: int
    long_given_up: int
    at_least: float
    p: float

    @property
    def long_share(self) -> float:
        """Share of long visits among all: what the data are like."""
        return self.long / self.visits

    @property
    def long_trained_share(self) -> float | None:
        """Share of long visits among the trained: what the policy learns from."""
        trained = self.visits - self.given_up
        return (self.long - self.long_given_up) / trained if trained else None

    @property
    def lost_share(self) -> float | None:
        """Share of the long visits that was given up."""
        return self.long_given_up / self.long if self.long else None


class Selection:
    """Watches which visits end trained and which are given up, by their length.

    A visit is long when its length is at or above the upper quartile of the window, or above it
    when the quartile is the smallest length of all; so equal lengths have no long ones. With N
    visits, K of them long, D given up and y of those long, Fisher's exact test gives

        p = sum_{i >= y} C(K, i) C(N - K, D - i) / C(N, D)

    It is made every ``every`` visits. An alarm is raised at p < ``false_alarms`` * every / window
    and ends at p > ``calm``. The test has that level at any time, and window / every of them are
    made in a window, so runs without selection raise at most ``false_alarms`` alarms a window of
    visits in expectation, however the windows overlap.
    """

    def __init__(
        self, window: int = 512, every: int = 32, false_alarms: float = 1e-3, calm: float = 0.05
    ):
        if not 1 <= every <= window or not 0 < false_alarms < calm < 1:
            raise ValueError(
                f"every={every} (1 to window={window}), false_alarms={false_alarms} "
                f"(above 0, below calm={calm}, which is below 1)"
            )
        self.every = every
        self.level = false_alarms * every / window
        self.calm = calm
        self.evidence: Evidence | None = None  # of the latest test
        self.alarming = False
        self.num_visits = 0
        self.reasons: deque[str] = deque(maxlen=window)  # of the window's visits; "" if trained
        self._lengths: deque[float] = deque(maxlen=window)
        self._log_factorials: Array | None = None  # made for the first test; short runs have none

    def add(self, length: float, reason: str) -> None:
        """Note that a visit ended: its length, tokens, and why it was given up ("": trained)."""
        self._lengths.append(length)
        self.reasons.append(reason)
        self.num_visits += 1
        if self.num_visits % self.every == 0:
            self._test()

    def _test(self) -> None:
        if self._log_factorials is None:
            self._log_factorials = log_factorials(self._lengths.maxlen or 0)
        lengths, given_up = np.array(self._lengths), np.array([r != "" for r in self.reasons])
        found = weigh(lengths, given_up, self._log_factorials)
        self.evidence = found
        self.alarming = found.p < (self.calm if self.alarming else self.level)


def log_factorials(most: int) -> Array:
    """Return ln 0! .. ln most!, float64 [most + 1]."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])


def weigh(lengths: Array, given_up: Array, logs: Array) -> Evidence:
    """Test visits [N]: ``lengths`` float, ``given_up`` bool; ``logs`` holds ln 0! .. ln N!.

    Raises ValueError without visits.
    """
    num = len(lengths)
    if not num:
        raise ValueError("no visits to test")
    quartile = float(np.sort(lengths)[math.ceil(0.75 * num) - 1])
    is_long = lengths >= quartile
    if is_long.all():
        is_long = lengths > quartile
    at_least = float(lengths[is_long].min()) if is_long.any() else math.inf
    long, lost, both = int(is_long.sum()), int(given_up.sum()), int((is_long & given_up).sum())
    p = upper_tail(num, long, lost, both, logs)
    return Evidence(num, long, lost, both, at_least, p)


def upper_tail(num: int, marked: int, drawn: int, least: int, logs: Array) -> float:
    """Return the probability that ``least`` or more of ``drawn`` items, out of ``num``, are marked.

    Each term is exp of a sum of nine logarithms of factorials below ln(N!), so its relative error
    is below 9 ln(N!) eps: 6e-12 for N = 512.
    """
    first = max(least, drawn - (num - marked), 0)
    if least <= max(0, drawn - (num - marked)):
        return 1.0  # all that can happen
    taken = np.arange(first, min(marked, drawn) + 1)

    def log_choose(of: int, some: Array) -> Array:
        return logs[of] - logs[some] - logs[of - some]

    ways = log_choose(marked, taken) + log_choose(num - marked, drawn - taken)
    return min(1.0, float(np.exp(ways - log_choose(num, np.array(drawn))).sum()))
