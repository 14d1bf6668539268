"""The last words of a run: what it changed, where it is, what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Z_95 = 1.959963984540054  # 97.5 % point of the normal distribution


@dataclass(frozen=True, slots=True)
class Tally:
    """``num_right`` of ``num_scored`` held-out rollouts were judged right."""

    num_right: int
    num_scored: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_right <= self.num_scored:
            raise ValueError(f"{self.num_right} right of {self.num_scored} scored")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One evaluation, greedy and sampled; None where it was not made."""

    greedy: Tally | None = None
    sampled: Tally | None = None


def wilson(tally: Tally, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson interval of a share: 95 % at the default z.

    With p = k/n::

        (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

    Rollouts count as independent. Several samples of one prompt are not quite, so that interval
    is then somewhat too narrow. Raises ValueError when nothing was scored.
    Source: Wilson 1927, J. Am. Stat. Assoc. 22.
    """
    n = tally.num_scored
    if n == 0:
        raise ValueError("nothing was scored, so there is no share")
    p = tally.num_right / n
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def accuracy_text(tally: Tally | None) -> str:
    """Write ``58.6 % (52.5 to 64.5)``; a dash when not measured."""
    if tally is None or tally.num_scored == 0:
        return "-"
    low, high = wilson(tally)
    share = tally.num_right / tally.num_scored
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _change(before: Tally | None, after: Tally | None) -> str:
    if before is None or after is None or not before.num_scored or not after.num_scored:
        return "-"
    points = 100 * (after.num_right / after.num_scored - before.num_right / before.num_scored)
    return f"{points:+.1f} points"


def final_summary(
    before: Accuracy | None,
    after: Accuracy | None,
    run_dir: str | Path,
    num_steps: int,
    next_commands: Sequence[tuple[str, str]] | None = None,
) -> RenderableType:
    """Return what to print when a run ends.

    next_commands: (what it does, command) pairs; None for the usual ones.
    """
    parts: list[RenderableType] = []
    first, last = before or Accuracy(), after or Accuracy()
    if before is not None or after is not None:
        sizes = {t.num_scored for a in (first, last) for t in (a.greedy, a.sampled) if t}
        table = Table(title=f"Held-out accuracy ({_sizes(sizes)} rollouts, 95 % interval)")
        for column in ("", "before", "after", "change"):
            table.add_column(column, justify="left" if not column else "right")
        for name, old, new in (
            ("greedy", first.greedy, last.greedy),
            ("sampled", first.sampled, last.sampled),
        ):
            table.add_row(name, accuracy_text(old), accuracy_text(new), _change(old, new))
        parts.append(table)
    parts.append(Text(f"{num_steps} steps done. The run is in {run_dir}"))
    commands = default_commands(run_dir, num_steps) if next_commands is None else next_commands
    parts.append(Text("What to try next:"))
    parts += [Text(f"  {command}\n      {what}") for what, command in commands]
    return Group(*parts)


def _sizes(sizes: set[int]) -> str:
    return (
        str(sizes.pop()) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}" if sizes else "0"
    )


def default_commands(run_dir: str | Path, num_steps: int) -> list[tuple[str, str]]:
    """Return what anyone may do with a finished run."""
    return [
        (
            "measure the trained policy again, with four samples a prompt",
            f"lagzero eval {run_dir} --eval.samples=4",
        ),
        (
            "go on training from where it stands",
            f"lagzero train --resume {run_dir} --schedule.steps={2 * max(1, num_steps)}",
        ),
        (
            "train a low-rank adapter instead of all weights",
            f"lagzero train {run_dir}/config.yaml --run_dir={run_dir}-lora "
            "--model.lora.rank=16 --train.optimizer.lr=3e-4",
        ),
    ]
