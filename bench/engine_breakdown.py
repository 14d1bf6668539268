"""Where the engine's time goes: a stopwatch around its parts, put on from outside.

Time is that of the engine's thread while it ran on a core; what is left of the wall time is idle
(the thread waited for another, or was preempted). A part that runs inside another stops the clock
of that one. What no hook sees counts as the part that it runs in, at last as ``other``, so the
shares always sum to 1.

Attention holds the plan of a step and the writing and gathering of the cache; layers is what else a
model's forward does: norms, rotations, activations, and the calls themselves. The C library does a
whole forward pass in one call; its attention is what a step takes more than the same step with
contexts of one token, measured afterwards, and all else there counts as matmul.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import peers

PARTS = ("native", "matmul", "attention", "sampling", "layers", "other", "idle")

# Where the parts are, by module, name and part; a name that is not there is reported.
HOOKS = (
    ("torch.nn.functional", "linear", "matmul"),
    ("lagzero.engine.attention", "PagedPlan.__init__", "attention"),
    ("lagzero.engine.attention", "PagedPlan.attend", "attention"),
    ("lagzero.engine.attention", "KVCache.copy_pages", "attention"),
    ("lagzero.engine.engine", "run", "layers"),
    ("lagzero.engine.engine", "sample", "sampling"),
    ("lagzero.engine.engine", "uniforms", "sampling"),
    ("lagzero.native.decoder", "Decoder.logits", "native"),
)
REPLAYED = 12  # steps of the C library that are measured again


class Stopwatch:
    """Seconds of this thread, by part, since it was made."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._parts = ["other"]
        self._mark = time.thread_time()

    def wrap(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return ``call`` with its time counted as ``part``."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._count()
            self._parts.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._count()
                self._parts.pop()

        return timed

    def _count(self) -> None:
        now = time.thread_time()
        self._seconds[self._parts[-1]] += now - self._mark
        self._mark = now

    def shares(self, wall_s: float) -> dict[str, float]:
        """Return each part's share of ``wall_s``, the time since the start; their sum is 1."""
        self._count()
        self._seconds["idle"] += wall_s - sum(self._seconds.values())
        return {part: seconds / wall_s for part, seconds in self._seconds.items()}


@dataclass
class Watched:
    """A stopwatch on the engine, and the rows of each step's forward pass and head."""

    watch: Stopwatch = field(default_factory=Stopwatch)
    steps: list[tuple[int, int]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # hooks that found nothing
    native: list[tuple[Any, Any]] = field(default_factory=list)  # calls of the C library, rows

    def shares(self, wall_s: float) -> dict[str, float]:
        """Return each part's share of ``wall_s``; see the module."""
        shares = self.watch.shares(wall_s)
        inside = shares.pop("native")
        part = native_attention(self.native) if self.native else 0.0
        shares["attention"] += inside * part
        shares["matmul"] += inside * (1 - part)
        return shares


def watch_engine() -> Watched:
    """Put the hooks on, for the rest of this process."""
    watched = Watched()
    for module_name, path, part in HOOKS:
        *owners, name = path.split(".")
        owner = importlib.import_module(module_name) if find_spec(module_name) else None
        for each in owners:
            owner = getattr(owner, each, None)
        call = getattr(owner, name, None)
        if call is None:
            watched.missing.append(f"{module_name}.{path}")
        else:
            setattr(owner, name, watched.watch.wrap(call, part))
    _record(watched)
    return watched


def _record(watched: Watched) -> None:
    """Note the rows of each forward pass and of its head, and the calls of the C library."""
    from lagzero.engine import engine
    from lagzero.native.decoder import Decoder

    run, logits = engine.run, Decoder.logits

    def recorded_run(policy: Any, cache: Any, works: Any) -> Any:
        out = run(policy, cache, works)
        watched.steps.append((sum(work.count for work in works), len(out)))
        return out

    def recorded_logits(self: Any, keys: Any, values: Any, page_size: int, row: Any) -> Any:
        call = functools.partial(logits, self, keys, values, page_size)
        watched.native.append((call, row))
        return call(row)

    engine.run, Decoder.logits = recorded_run, recorded_logits


def native_attention(calls: Sequence[tuple[Callable[[Any], Any], Any]]) -> float:
    """Return the share of the C library's time that contexts longer than one token take."""
    whole = short = 0.0
    for call, row in calls[:: -(-len(calls) // REPLAYED)]:
        pages = row.tables[:, :1].contiguous()
        first = replace(row, positions=row.positions * 0, tables=pages, longest=1)
        whole += peers.median_s(functools.partial(call, row))
        short += peers.median_s(functools.partial(call, first))
    return max(0.0, 1 - short / whole)
