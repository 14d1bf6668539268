"""What the loop talks to: times stages, records metrics, shows progress. It never steers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from lagzero.observe.catalog import checked, find
from lagzero.observe.metrics import MetricsLog
from lagzero.observe.timing import StageClock

Probe = Callable[[], Mapping[str, float]]
"""Returns metrics of the step that ends now, such as the engine's counters since the last call."""


class View(Protocol):
    """Shows a run to a person."""

    def stage(self, running: Sequence[str]) -> None:
        """Show which stages are running now."""
        ...

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, or an evaluation made after it."""
        ...

    def close(self) -> None:
        """Give the terminal back."""
        ...


class RunObserver:
    """Joins a stage clock, a metrics file and a view. Satisfies ``protocols.Observer``."""

    def __init__(
        self,
        log: MetricsLog,
        view: View,
        clock: StageClock | None = None,
        probes: Sequence[Probe] = (),
    ):
        self._log = log
        self._view = view
        self._clock = clock or StageClock()
        self._probes = tuple(probes)

    @asynccontextmanager
    async def stage(self, stage: str) -> AsyncGenerator[None]:
        """Time a stage. Raises ValueError for one whose time the catalogue lacks."""
        if find(f"time/{stage}_s") is None:
            raise ValueError(f"no time/{stage}_s in lagzero/observe/catalog.py; add a row")
        before = self._clock.running()
        async with self._clock.stage(stage):
            self._tell(before)
            try:
                yield
            finally:
                before = self._clock.running()
        self._tell(before)

    def _tell(self, before: tuple[str, ...]) -> None:
        running = self._clock.running()
        if running != before:
            self._view.stage(running)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a finished step with its times. Raises ValueError for an unknown metric."""
        values: dict[str, Any] = dict(metrics)
        for probe in self._probes:
            values |= probe()
        values |= {f"time/{name}_s": seconds for name, seconds in self._clock.take().items()}
        values |= derived(step, values)
        self._record(step, values)

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record what an evaluation after ``step`` steps measured (0: before training).

        Its time is its own and belongs to no step.
        """
        spent = self._clock.take()
        self._record(step, {**metrics, "time/evaluate_s": spent.get("evaluate", 0.0)})

    def _record(self, step: int, metrics: Mapping[str, Any]) -> None:
        is_step, is_update = "time/step_s" in metrics, "train/loss" in metrics
        self._log.write(step, metrics, empty=is_step and not is_update)
        self._view.show(step, checked(metrics))

    def close(self) -> None:
        """Close the file and give the terminal back."""
        self._view.close()
        self._log.close()


def derived(step: int, values: Mapping[str, float]) -> dict[str, float]:
    """Compute what follows from other metrics; what lacks its inputs is left out."""
    out: dict[str, float] = {}
    if values.get("time/generate_s", 0) > 0 and {"length/mean", "rollouts/count"} <= values.keys():
        sampled = values["length/mean"] * values["rollouts/count"]
        out["time/generate_tok_per_s"] = sampled / values["time/generate_s"]
    if "version/min" in values:
        out["lag/max"] = step - 1 - values["version/min"]
    return out
