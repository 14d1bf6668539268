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
    """Draw reward above mismatch, a column for each distortion that was tried; none, no figure."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    table = read_curves(curves)
    known = {name for name, _ in table}
    panels = [p for p in PANELS if any(c.panel == p and c.name in known for c in CONDITIONS)]
    if not panels:
        return
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    fig, axes = plt.subplots(
        2, len(panels), figsize=(3.4 * len(panels) + 0.6, 5.4), sharex=True, sharey="row"
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
        for axis in (top, bottom):
            axis.grid(alpha=0.25, linewidth=0.6)
    axes[0, 0].set_ylabel("reward of the trainer's policy\n(held-out prompts)")
    axes[1, 0].set_ylabel("KL(sampler || trainer)\nnats a token")
    named = {
        label: line
        for axis in axes[0]
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    fig.tight_layout(rect=(0, 0.06, 1, 1))
    fig.legend(named.values(), named.keys(), loc="lower center", ncols=len(named), frameon=False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=130, metadata={"Software": None})
    plt.close(fig)


def _lines(top: Any, bottom: Any, condition: Condition, table: Table) -> None:
    """Draw each seed thin, a cross where it stopped early, and their mean while all go on."""
    colour = COLOURS[condition.colour]
    runs = [columns for (name, _), columns in sorted(table.items()) if name == condition.name]
    last = max(columns["step"][-1] for columns in table.values())
    for axis, column in ((top, "policy_reward"), (bottom, "kl")):
        is_kl = column == "kl"
        seen = [np.maximum(r[column], KL_FLOOR) if is_kl else r[column] for r in runs]
        kept = [~np.isnan(y) for y in seen]
        curves = [(r["step"][k], y[k]) for r, y, k in zip(runs, seen, kept, strict=True)]
        for x, y in curves:
            axis.plot(x, y, color=colour, alpha=0.35, linewidth=0.8)
        for run, (x, y) in zip(runs, curves, strict=True):
            if run["step"][-1] < last:
                axis.plot(x[-1], y[-1], "x", color=colour, markersize=6, markeredgewidth=1.6)
        common = min((x for x, _ in curves), key=len)
        together = np.array([y[: len(common)] for _, y in curves])
        mean = np.exp(np.log(together).mean(axis=0)) if is_kl else together.mean(axis=0)
        axis.plot(common, mean, color=colour, linewidth=1.9, label=condition.label)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
