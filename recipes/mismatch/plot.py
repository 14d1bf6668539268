"""The figure of docs/mismatch.md, from curves.csv.

python recipes/mismatch/plot.py CURVES.csv FIGURE.png      needs matplotlib
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from conditions import CONDITIONS, PANELS, Condition

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#3b6fb6",
    "#d1793b",
    "#4d9a63",
    "#8a63b0",
    "#c2504f",
    "#8c8c8c",
)
COLOURS = {
    "exact": GREY,
    "none": RED,
    "behaviour": PURPLE,
    "tis": BLUE,
    "mis": ORANGE,
    "icepop": GREEN,
}
KL_FLOOR = 1e-6  # below it a float32 run is at zero
Table = Mapping[tuple[str, int], Mapping[str, Any]]


def read_curves(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return for each condition and seed its columns as arrays, NaN where nothing was measured."""
    rows: dict[tuple[str, int], list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault((row.pop("condition"), int(row.pop("seed"))), []).append(row)
    return {
        key: {c: np.array([float(r[c] or "nan") for r in found]) for c in found[0]}
        for key, found in rows.items()
    }


def draw(curves: Path, figure: Path) -> None:
    """Draw reward above mismatch, a column for each distortion."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    table = read_curves(curves)
    known = {name for name, _ in table}
    panels = [p for p in PANELS if any(c.panel == p and c.name in known for c in CONDITIONS)]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    fig, axes = plt.subplots(
        2, len(panels), figsize=(4.1 * len(panels) + 0.6, 5.6), sharex=True, sharey="row"
    )
    axes = np.reshape(axes, (2, -1))
    for (top, bottom), panel in zip(axes.T, panels, strict=True):
        for condition in CONDITIONS:
            everywhere = condition.panel == "all" and panel != "slow"  # which has its own
            if (condition.panel == panel or everywhere) and condition.name in known:
                _lines(top, bottom, condition, table)
        top.set_title(PANELS[panel], fontsize=10)
        bottom.set_yscale("log")
        bottom.set_xlabel("optimiser step")
        top.legend(fontsize=7.5, frameon=False, loc="best")
        for axis in (top, bottom):
            axis.grid(alpha=0.25, linewidth=0.6)
    axes[0, 0].set_ylabel("reward of the trainer's policy\n(held-out prompts)")
    axes[1, 0].set_ylabel("KL(sampler || trainer)\nnats a token")
    fig.tight_layout()
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=130, metadata={"Software": None})
    plt.close(fig)


def _lines(top: Any, bottom: Any, condition: Condition, table: Table) -> None:
    """Draw each seed thin and their mean thick."""
    colour = COLOURS[condition.colour]
    runs = [columns for (name, _), columns in sorted(table.items()) if name == condition.name]
    rewards = [(r["step"], r["policy_reward"]) for r in runs]
    kls = [(r["step"], np.maximum(r["kl"], KL_FLOOR)) for r in runs]
    for axis, curves in ((top, rewards), (bottom, kls)):
        seen = [(x[~np.isnan(y)], y[~np.isnan(y)]) for x, y in curves]
        for x, y in seen:
            axis.plot(x, y, color=colour, alpha=0.3, linewidth=0.7)
        longest = max((x for x, _ in seen), key=len)
        reached = [[y[i] for _, y in seen if len(y) > i] for i in range(len(longest))]
        average = np.array([np.mean(values) for values in reached])
        if axis is bottom:
            average = np.array([np.exp(np.mean(np.log(values))) for values in reached])
        axis.plot(longest, average, color=colour, linewidth=1.8, label=condition.label)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
