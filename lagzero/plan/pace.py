"""How fast a modelled engine decodes: one token of every running rollout a step, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Pace(Protocol):
    """The time that decode steps take while n rollouts run and none joins or leaves."""

    @property
    def continuous(self) -> bool:
        """Whether a rollout may join in the middle of a step."""
        ...

    def span_s(self, num_running: int, context_tokens: float, steps: float) -> float:
        """Return the seconds of ``steps`` steps; ``context_tokens`` counts all before the first."""
        ...

    def steps_until(self, num_running: int, context_tokens: float, seconds: float) -> float:
        """Return the fewest steps whose span is at least ``seconds``."""
        ...


@dataclass(frozen=True, slots=True)
class Lanes:
    """A lane works on one rollout at a time, at its own constant pace: no batching effects."""

    unit_s: float = 1.0  # of one unit of length
    continuous: bool = True

    def span_s(self, num_running: int, context_tokens: float, steps: float) -> float:
        """Return unit_s * steps."""
        return self.unit_s * steps

    def steps_until(self, num_running: int, context_tokens: float, seconds: float) -> float:
        """Return seconds / unit_s."""
        return seconds / self.unit_s


@dataclass(frozen=True, slots=True)
class Roofline:
    """Decode of a dense transformer on one device.

    Step j of n rollouts with c tokens of context before step 0 takes

        max(2 params n / (peak * efficiency),
            (weight_bytes + kv_bytes_per_token (c + n j)) / bandwidth) + overhead_s

    Prefill is not modelled. Defaults: a 7.6e9-parameter model in bf16 with 56 KiB of KV cache a
    token, on a device of 989e12 FLOP/s of which half is reached and 3.35e12 B/s.
    """

    params: float = 7.6e9
    weight_bytes: float = 15.2e9
    kv_bytes_per_token: float = 57344
    bandwidth_bytes_per_s: float = 3.35e12
    peak_flop_per_s: float = 989e12
    efficiency: float = 0.5  # of the peak that decoding reaches, 0 to 1
    overhead_s: float = 0.4e-3  # of one step, whatever runs
    continuous: bool = False

    def step_s(self, num_running: int, context_tokens: float) -> float:
        """Return the seconds of one step: the formula above at j = 0."""
        compute = 2 * self.params * num_running / (self.peak_flop_per_s * self.efficiency)
        read = self.weight_bytes + self.kv_bytes_per_token * context_tokens
        return max(compute, read / self.bandwidth_bytes_per_s) + self.overhead_s

    def _pieces(self, num_running: int, context_tokens: float) -> tuple[float, float, float, float]:
        """Return compute s, read s of step 0, its growth a step, and the first step bound by it."""
        bandwidth = self.bandwidth_bytes_per_s
        compute = 2 * self.params * num_running / (self.peak_flop_per_s * self.efficiency)
        read = (self.weight_bytes + self.kv_bytes_per_token * context_tokens) / bandwidth
        growth = self.kv_bytes_per_token * num_running / bandwidth
        if compute <= read:
            return compute, read, growth, 0
        return compute, read, growth, math.ceil((compute - read) / growth) if growth else math.inf

    def span_s(self, num_running: int, context_tokens: float, steps: float) -> float:
        """Return the sum of the first ``steps`` steps: a constant, then an arithmetic series."""
        compute, read, growth, crossing = self._pieces(num_running, context_tokens)
        if not crossing:
            return steps * (read + growth * (steps - 1) / 2 + self.overhead_s)
        flat = min(steps, crossing)
        total = flat * compute + steps * self.overhead_s
        if (rising := steps - flat) > 0:
            total += rising * (read + growth * (flat + (rising - 1) / 2))
        return total

    def steps_until(self, num_running: int, context_tokens: float, seconds: float) -> float:
        """Return the fewest whole steps whose span is at least ``seconds``: a quadratic's root."""
        if seconds <= 0:
            return 0
        compute, read, growth, crossing = self._pieces(num_running, context_tokens)
        flat_s = crossing * (compute + self.overhead_s) if crossing else 0.0
        if seconds <= flat_s:
            guess = math.ceil(seconds / (compute + self.overhead_s))
        else:
            first = read + growth * crossing + self.overhead_s  # of the rising steps
            left, slope = seconds - flat_s, growth / 2
            linear = first - slope
            more = 2 * left / (linear + math.sqrt(linear * linear + 4 * slope * left))
            guess = int(crossing) + math.ceil(more)
        guess = max(guess, 1)
        while guess > 1 and self.span_s(num_running, context_tokens, guess - 1) >= seconds:
            guess -= 1
        while self.span_s(num_running, context_tokens, guess) < seconds:
            guess += 1
        return guess


@dataclass(frozen=True, slots=True)
class Measured:
    """Decode steps as they were timed, on a straight line between the sizes that were tried.

    Below the smallest and above the largest size the nearest line goes on. Context plays no part:
    what it costs is in the timings.
    """

    points: tuple[tuple[int, float], ...]  # (sequences, seconds of one step), ascending
    continuous: bool = False

    @property
    def text(self) -> str:
        """The timings as a flag's value."""
        return ",".join(f"{n}:{seconds:g}" for n, seconds in self.points)

    def step_s(self, num_running: int) -> float:
        """Return the seconds of one step of so many sequences, at least 1 ns."""
        (n0, s0), (n1, s1) = self._around(num_running)
        slope = (s1 - s0) / (n1 - n0) if n1 > n0 else 0.0
        return max(s0 + slope * (num_running - n0), 1e-9)

    def span_s(self, num_running: int, context_tokens: float, steps: float) -> float:
        """Return steps times the seconds of one."""
        return steps * self.step_s(num_running)

    def steps_until(self, num_running: int, context_tokens: float, seconds: float) -> float:
        """Return the fewest whole steps whose span is at least ``seconds``."""
        step_s = self.step_s(num_running)
        guess = max(0, math.ceil(seconds / step_s))
        while guess and (guess - 1) * step_s >= seconds:
            guess -= 1
        while guess * step_s < seconds:
            guess += 1
        return guess

    def _around(self, num_running: int) -> Sequence[tuple[int, float]]:
        """Return the two points whose line ``num_running`` is on; one point is both."""
        above = next((i for i, (n, _) in enumerate(self.points) if n >= num_running), None)
        at = len(self.points) - 1 if above is None else above
        at = min(max(at, 1), len(self.points) - 1)
        return self.points[max(at - 1, 0)], self.points[at]


def parse_measured(text: str) -> Measured:
    """Read timings such as ``1:0.12,8:0.27,16:0.33``: seconds of a step by number of sequences.

    Raises ValueError for anything else.
    """
    points: list[tuple[int, float]] = []
    for part in text.split(","):
        size, _, seconds = part.partition(":")
        try:
            points.append((int(size), float(seconds)))
        except ValueError:
            raise ValueError(
                f"must be sequences:seconds pairs, such as 1:0.12,8:0.27, not '{part}'"
            ) from None
    points.sort()
    sizes = [n for n, _ in points]
    if sizes[0] < 1 or len(set(sizes)) < len(sizes):
        raise ValueError(f"must have each number of sequences once, from 1 on, not '{text}'")
    if not all(0 < s < math.inf for _, s in points):
        raise ValueError(f"must have seconds > 0, not '{text}'")
    return Measured(tuple(points))
