"""A soft limit on length: the overlong penalty of DAPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lagzero.score.options import is_whole, refuse


class Overlong:
    """Penalty from 0 to -1 for a response that comes near ``limit`` tokens, or goes beyond it.

    With n the tokens that the policy sampled::

        0                             n <= limit - buffer
        (limit - buffer - n) / buffer limit - buffer < n <= limit
        -1                            limit < n

    Options: ``limit`` and ``buffer``, tokens, 1 <= buffer <= limit. Source: Yu et al. 2025,
    arXiv:2503.14476, equation 13.
    """

    def __init__(self, *, limit: int, buffer: int):
        refuse(("limit", limit, is_whole(limit, 1), "a whole number of tokens >= 1"))
        fits = is_whole(buffer, 1) and buffer <= limit
        refuse(("buffer", buffer, fits, f"a whole number of tokens from 1 to limit ({limit})"))
        self.limit = limit
        self.buffer = buffer

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], sampled_tokens: Sequence[int]
    ) -> list[float | None]:
        """Return one penalty a completion."""
        return [self.penalty(number) for number in sampled_tokens]

    def penalty(self, num_tokens: int) -> float:
        """Return the penalty of a response of so many sampled tokens."""
        beyond = num_tokens - (self.limit - self.buffer)
        return 0.0 - min(max(beyond, 0) / self.buffer, 1.0)
