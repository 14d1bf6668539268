"""What a simulation found, as a table with one column a scenario, and as a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from lagzero.plan.meter import IDLE
from lagzero.plan.simulate import Result
from lagzero.plan.timeline import timeline

MAX_LANES, MAX_CHARS = 16, 160  # of a timeline that a person can read


def table(results: Sequence[Result], titles: Sequence[str]) -> str:
    """Lay results out in columns under their titles."""
    rows: list[list[str]] = [["", *titles]] if any(titles) else []

    def row(name: str, cells: Sequence[str]) -> None:
        rows.append([name, *cells])

    row("time, s", [f"{r.time_s:,.1f}" for r in results])
    row("steps", [str(len(r.steps)) for r in results])
    row("trained tokens/s", [f"{r.tok_per_s:,.1f}" for r in results])
    row("generation slots in use", [_percent(r.slot_use) for r in results])
    for reason in IDLE:
        if any(r.slot_idle[reason] > 0 for r in results):
            row(f"  idle: {_REASONS[reason]}", [_percent(r.slot_idle[reason]) for r in results])
    row("  time below a quarter", [_percent(r.low_share) for r in results])
    if any(r.scenario.repack_below is not None for r in results):
        row("engines with nothing to do", [_percent(r.engine_idle) for r in results])
        row("  rollouts moved", [f"{r.num_moved:,}" for r in results])
        row("  tokens read again", [f"{r.num_reread:,.0f}" for r in results])
    row("trainer in use", [_percent(r.trainer_use) for r in results])
    for reason in IDLE:
        if any(r.trainer_idle[reason] > 0 for r in results):
            row(f"  idle: {_WAITS[reason]}", [_percent(r.trainer_idle[reason]) for r in results])
    row("lag of rollouts, mean", [f"{r.lag_mean:.2f}" for r in results])
    row("lag of rollouts, max", [str(r.lag_max) for r in results])
    row("lag of tokens, mean", [f"{r.lag_token_mean:.2f}" for r in results])
    row("mean length trained", [f"{r.length_mean:,.1f}" for r in results])
    row("groups started", [str(r.num_started) for r in results])
    row("groups dropped", [_percent(r.num_dropped / max(r.num_started, 1)) for r in results])
    for reason in dict.fromkeys(name for r in results for name in r.num_given_up):
        row(
            f"  given up: {reason}",
            [_percent(r.num_given_up.get(reason, 0) / max(r.num_started, 1)) for r in results],
        )
    if any(r.num_given_up for r in results):
        row("mean length given up", [f"{r.given_up_length:,.1f}" for r in results])
    if any(r.num_restarts for r in results):
        row("groups played again", [_percent(r.num_restarts / r.num_started) for r in results])
    if any(r.lost_share for r in results):
        row("tokens written for nothing", [_percent(r.lost_share) for r in results])
    row("groups unfinished at end", [str(r.num_pending) for r in results])
    if any(r.num_carried for r in results):
        row("rounds cut at the cap", [str(r.num_carried) for r in results])
    if any(r.num_evicted for r in results):
        row("rounds cut by a full cache", [str(r.num_evicted) for r in results])
    return _columns(rows)


_REASONS = {
    "tail": "tail",
    "weights": "waiting for weights",
    "turn": "the trainer's turn",
    "sync": "sync",
    "reward": "reward",
    "data": "no data",
    "routing": "queued elsewhere",
}
_WAITS = {**_REASONS, "data": "waiting for rollouts"}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def can_draw(result: Result) -> bool:
    """Whether a timeline of the result fits a terminal: few lanes, not too long."""
    lanes = result.scenario.lanes
    return lanes is not None and lanes <= MAX_LANES and _chars(result) <= MAX_CHARS


def draw(result: Result) -> str:
    """Draw lanes and trainer; a character is a quarter of a unit of length."""
    unit_s, lanes = result.scenario.unit_s, result.scenario.lanes or 0
    rows = [(f"engine 0/{n}", f"lane {chr(ord('A') + n)}") for n in range(lanes)]
    return timeline(
        result.spans, [*rows, ("trainer/0", "trainer")], result.time_s, unit_s / 4, unit_s
    )


def _chars(result: Result) -> float:
    return result.time_s / result.scenario.unit_s * 4
