"""Errors that a user can act on. Each names the place, what was found and what is valid."""

from __future__ import annotations

from collections.abc import Sequence


class LagzeroError(Exception):
    """Any failure that the user, and not the program, can mend."""


class ConfigError(LagzeroError):
    """Every problem of a configuration at once, one line each."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(LagzeroError):
    """Rows that cannot be used, each named by its source and row number."""

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{source}: {len(problems)} unusable row(s)", *problems]))


class WeightSyncError(LagzeroError):
    """A weight transfer that was refused; the previous version stays in force."""


class GroupLost(LagzeroError):
    """A group that cannot be had: it is given up for the reason stated, and the run goes on."""


class EngineDied(LagzeroError):
    """An engine process that ended or hangs, with what it still owed."""
