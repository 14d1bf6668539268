"""Groups that do not end: named, begun again, and given up by rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lagzero.errors import GroupLost
from lagzero.protocols import Generator
from lagzero.types import Group, Prompt


class PatientGenerator:
    """Plays a group again when it has not ended in time, and gives it up after ``retries`` times.

    A lost event or a response that never ends then costs one group, and neither the step nor the
    run. ``report`` gets a line for people each time.
    """

    def __init__(
        self, generator: Generator, timeout_s: float, retries: int, report: Callable[[str], None]
    ):
        self._generator = generator
        self._timeout_s = timeout_s
        self._retries = retries
        self._report = report

    async def play(self, index: int, prompt: Prompt) -> Group:
        """Return the group of visit ``index``. Raises GroupLost after the last retry."""
        for left in range(self._retries, -1, -1):
            try:
                return await asyncio.wait_for(self._generator.play(index, prompt), self._timeout_s)
            except asyncio.TimeoutError:
                then = "it begins again" if left else "it is given up"
                self._report(
                    f"group {index} (prompt {prompt.id}) has not ended within "
                    f"{self._timeout_s:g} s (rollout.timeout_s): {then}"
                )
        raise GroupLost(f"timeout: no end within {self._timeout_s:g} s")
