"""The tables of docs/mismatch.md, from results/*.json.

python recipes/mismatch/tables.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from conditions import CONDITIONS, PANELS, Condition

RESULTS = Path(__file__).parent / "results"


def runs_table(summary: dict[str, Any]) -> str:
    """Return what each condition came to, over its seeds, as a Markdown table."""
    lines = [
        "| sampler | trainer | policy's reward at the end (each seed) | lowest on the way "
        "| stopped early | sampler's reward at the end | KL, first 10 steps | last 10 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for condition in CONDITIONS:
        found = summary["conditions"].get(condition.name)
        if found is not None:
            ended = sum(run.startswith(f"{condition.name}/") for run in summary["ended_early"])
            lines.append(_row(condition, found, ended))
    return "\n".join(lines)


def _row(condition: Condition, found: dict[str, list[float]], ended: int) -> str:
    ends = found["reward_last"]
    sampler, trainer = PANELS.get(condition.panel), condition.label
    if sampler is None:  # nothing was tried against it
        sampler, trainer = condition.label, "uncorrected"
    elif condition.colour == "exact":
        sampler, trainer = f"{condition.label}, {sampler.partition(', ')[2]}", "uncorrected"
    cells = [
        sampler,
        trainer,
        f"**{_mean(ends):.2f}** ({', '.join(f'{value:.2f}' for value in ends)})",
        f"{min(found['reward_least']):.2f}",
        f"{ended} of {len(ends)}" if ended else "",
        f"{_mean(found['sampler_reward_last']):.2f}",
        f"{_mean(found['kl_first']):.1e}",
        f"{_mean(found['kl_last']):.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def numerics_table(numerics: dict[str, Any]) -> str:
    """Return the measured differences of log-probs as a Markdown table."""
    lines = [
        "| dtype | head | tokens | mean abs d | max abs d | std of the sum, T = 1 | T = 64 "
        "| exponent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in numerics["rows"]:
        head = "float32" if row["fp32_head"] else "same"
        cells = [row["dtype"], head, str(row["num_tokens"])]
        growth = row["std_of_sum"]
        sizes = (row["mean_abs"], row["max_abs"], growth["1"], growth["64"])
        cells += [f"{value:.1e}" for value in sizes] + [f"{row['exponent']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main(folder: Path) -> None:
    """Print the tables of what the folder has."""
    for name, table in (("summary.json", runs_table), ("numerics.json", numerics_table)):
        if (folder / name).is_file():
            print(table(json.loads((folder / name).read_text())), end="\n\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
