"""Progress in a terminal: a live panel for people, one line a step for logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lagzero.observe.observer import View

STAGES = {
    "generate": "cyan",
    "score": "magenta",
    "prepare": "yellow",
    "train": "green",
    "sync": "blue",
    "evaluate": "white",
    "checkpoint": "bright_black",
}
BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 10  # steps that the time left is judged by
REFRESH_PER_S = 2  # drawing costs a core that the run could use

# label, metric, format: what the panel and the lines show, where it was measured
FIGURES = (
    ("reward", "reward/mean", "{:.3f}"),
    ("reward > 0", "reward/positive_share", "{:.0%}"),
    ("tokens", "length/mean", "{:.0f}"),
    ("longest", "length/max", "{:.0f}"),
    ("mixed groups", "groups/mixed_share", "{:.0%}"),
    ("lag", "lag/token_mean", "{:.2f}"),
    ("mismatch KL", "mismatch/kl_k3", "{:.1e}"),
    ("grad norm", "train/grad_norm", "{:.3g}"),
    ("generate tok/s", "time/generate_tok_per_s", "{:.0f}"),
    ("train tok/s", "train/tok_per_s", "{:.0f}"),
)
EVALUATION = (
    ("greedy", "eval/greedy_accuracy", "{:.1%}"),
    ("sampled", "eval/sampled_accuracy", "{:.1%}"),
)


def make_view(console: Console, total_steps: int) -> View:
    """Return the live panel for a terminal, and the line printer for anything else."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, total_steps)
    return LineView(console, total_steps)


class LineView:
    """Prints one line a step."""

    def __init__(self, console: Console, total_steps: int):
        self._console = console
        self._total = total_steps
        self._step_s: list[float] = []

    def stage(self, running: Sequence[str]) -> None:
        """Say nothing: a log wants one line a step."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, or of an evaluation."""
        parts = [f"step {step}/{self._total}"]
        parts += [f"{label} {text}" for label, text in figures(metrics)]
        if "time/step_s" in metrics:
            self._step_s.append(working_s(metrics))
            parts.append(f"{metrics['time/step_s']:.1f} s ({share_text(metrics)})")
            parts.append(f"left {duration(time_left(self._step_s, self._total - step))}")
        self._console.print("  ".join(parts), soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Nothing to give back."""


class LiveView:
    """Redraws one panel in place. Text printed through the console appears above it."""

    def __init__(
        self, console: Console, total_steps: int, now: Callable[[], float] = time.monotonic
    ):
        self._total = total_steps
        self._now = now
        self._began = now()
        self._step = 0
        self._last: dict[str, float] = {}
        self._rewards: list[float] = []
        self._step_s: list[float] = []
        self._running: tuple[str, ...] = ()
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=REFRESH_PER_S
        )
        self._live.start()

    def stage(self, running: Sequence[str]) -> None:
        """Note which stages run; the next redraw shows them."""
        self._running = tuple(running)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step or an evaluation."""
        self._step = step
        if "time/step_s" in metrics:  # a stage that this step did not have takes no share of it
            self._last = {k: v for k, v in self._last.items() if not k.startswith("time/")}
        self._last |= metrics
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if "time/step_s" in metrics:
            self._step_s.append(working_s(metrics))
        self._live.refresh()

    def render(self) -> RenderableType:
        """Return the panel as it stands now."""
        head = Text.assemble(
            (f"step {self._step}/{self._total}", "bold"),
            f"   {duration(self._now() - self._began)} so far",
            f"   {duration(time_left(self._step_s, self._total - self._step))} left",
            (f"   {' + '.join(self._running)} ..." if self._running else "", "dim"),
        )
        rows: list[RenderableType] = [head]
        if self._rewards:
            rows.append(Text(f"reward {sparkline(self._rewards, 40)} {self._rewards[-1]:.3f}"))
        if self._last:
            rows += [_grid(figures(self._last)), stage_bar(self._last, 40)]
        return Panel(Group(*rows), title="lagzero", title_align="left")

    def close(self) -> None:
        """Leave the last panel on the screen and give the terminal back."""
        self._live.stop()


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, text) of every figure that was measured."""
    return [
        (label, form.format(metrics[name]))
        for label, name, form in (*EVALUATION, *FIGURES)
        if name in metrics
    ]


def _grid(pairs: Sequence[tuple[str, str]], columns: int = 3) -> Table:
    table = Table.grid(padding=(0, 3))
    for start in range(0, len(pairs), columns):
        row = pairs[start : start + columns]
        table.add_row(*(Text.assemble((f"{label} ", "dim"), text) for label, text in row))
    return table


def stage_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each stage's share of the time spent in stages; it adds up to 1, or is empty."""
    spent = {stage: metrics.get(f"time/{stage}_s", 0.0) for stage in STAGES}
    total = sum(spent.values())
    return {stage: s / total for stage, s in spent.items() if s > 0} if total > 0 else {}


def share_text(metrics: Mapping[str, float]) -> str:
    """Write the shares of time as ``generate 70% train 28%``, without those below 0.5 %."""
    shares = stage_shares(metrics).items()
    return " ".join(f"{stage} {share:.0%}" for stage, share in shares if share >= 0.005)


def stage_bar(metrics: Mapping[str, float], width: int) -> Text:
    """Draw the shares of time as one coloured bar of ``width`` cells with its legend."""
    text, done, drawn = Text("time   "), 0.0, 0
    for stage, share in stage_shares(metrics).items():
        done += share
        cells = round(done * width) - drawn  # of the sum, so that the bar has exactly its width
        drawn += cells
        text.append("█" * cells, STAGES[stage])
    return text.append(f" {share_text(metrics)}")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as blocks between their least and greatest, the newest last.

    More than ``width`` values are averaged in ``width`` equal parts.
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[0] * len(values)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((v - low) / (high - low) * top)] for v in values)


def working_s(metrics: Mapping[str, float]) -> float:
    """Return the seconds of a step without the checkpoint that some steps write."""
    return metrics["time/step_s"] - metrics.get("time/checkpoint_s", 0.0)


def time_left(step_s: Sequence[float], num_left: int) -> float | None:
    """Guess the seconds left from the mean of the last ``RECENT`` steps; None before the first."""
    recent = step_s[-RECENT:]
    return sum(recent) / len(recent) * max(0, num_left) if recent else None


def duration(seconds: float | None) -> str:
    """Write seconds as ``42 s``, ``3:20`` (minutes) or ``2:03:20`` (hours); ``?`` if unknown."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
