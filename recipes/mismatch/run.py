"""Train one small model with samplers that differ from the trainer, with and without corrections.

    python recipes/mismatch/run.py --out DIR          every condition, three seeds, and the figure
    python recipes/mismatch/run.py --out DIR --only int4   conditions whose name begins so

DIR gets the model, a folder of metrics for each run, curves.csv, summary.json and mismatch.png.
Runs that DIR already holds are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import shutil
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from conditions import CONDITIONS, Condition
from experiment import train
from plot import draw
from task import draw_letters, train_supervised, write_prompts

from lagzero.config import Config
from lagzero.config_load import load_config
from lagzero.errors import LagzeroError
from lagzero.observe.metrics import read_metrics

HERE = Path(__file__).parent
CURVES = {  # column of curves.csv -> metric
    "sampler_reward": "reward/mean",
    "policy_reward": "eval/sampled_reward_mean",
    "kl": "behaviour/kl_k3",
    "gap_max": "behaviour/gap_max",
    "ess_share": "behaviour/ess_share",
    "entropy": "policy/entropy",
    "grad_norm": "train/grad_norm",
    "masked_share": "correction/masked_share",
    "truncated_share": "correction/truncated_share",
}
Curve = list[dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, then the tables and the figure."""
    options = parse(arguments)
    torch.set_num_threads(1)
    out: Path = options.out
    make_start(out, options.letters, options.warmup)
    conditions = [c for c in CONDITIONS if c.name.startswith(tuple(options.only))]
    curves: dict[tuple[str, int], Curve] = {}
    ends: dict[str, str] = {}
    for seed in range(options.seeds):
        for condition in conditions:
            began = time.perf_counter()
            curve, end = run(condition, seed, options.steps, out)
            curves[condition.name, seed] = curve
            if end:
                ends[f"{condition.name}/{seed}"] = end
            seconds = time.perf_counter() - began
            print(line(condition, seed, curve), f"{seconds:.0f} s", end, flush=True)
    write_curves(out / "curves.csv", curves)
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "only")}
    found = {"settings": settings, "ended_early": ends, "conditions": summary(curves)}
    (out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    if find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed")
    else:
        draw(out / "curves.csv", out / "mismatch.png")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Run the mismatch experiment.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--letters", type=int, default=16, help="that a reply must hold")
    parser.add_argument("--warmup", type=int, default=2500, help="supervised steps before")
    parser.add_argument("--only", nargs="+", default=[""], help="conditions that begin so")
    return parser.parse_args(arguments)


def make_start(out: Path, num_letters: int, num_steps: int) -> None:
    """Write the prompts and the model that every run starts from, unless they are there."""
    out.mkdir(parents=True, exist_ok=True)
    letters = draw_letters(2064, num_letters, seed=1)
    write_prompts(out / "train.jsonl", letters[64:])
    write_prompts(out / "eval.jsonl", letters[:64])
    if not (out / "model" / "tokenizer.json").is_file():
        train_supervised(out / "model", num_letters, num_steps)


def configured(condition: Condition, seed: int, steps: int, out: Path) -> Config:
    """Return base.yaml with the condition's keys, and the places of its files."""
    places = {
        "model.path": out / "model",
        "data.train.0.path": out / "train.jsonl",
        "data.eval.0.path": out / "eval.jsonl",
        "score.rewards.0.use": f"{HERE / 'task.py'}:each_once",
    }
    keys = {**places, "seed": seed, "schedule.steps": steps}
    own = [f"--{key}={value}" for key, value in keys.items()]
    return load_config(HERE / "base.yaml", [*own, *condition.keys])


def run(condition: Condition, seed: int, steps: int, out: Path) -> tuple[Curve, str]:
    """Train, or read a run that was made; return its metrics and why it ended early, if it did."""
    folder = out / f"{condition.name}-{seed}"
    metrics, ended = folder / "metrics.jsonl", folder / "end.txt"
    if not ended.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        config = configured(condition, seed, steps, out)
        try:
            asyncio.run(train(config, condition.distortion, metrics))
            end = ""
        except LagzeroError as error:  # nothing left to learn from, or a policy out of range
            end = str(error).splitlines()[0]
        ended.write_text(end)
    return read_metrics(metrics), ended.read_text()


def line(condition: Condition, seed: int, curve: Curve) -> str:
    """Say in one line how a run went."""
    shown = " ".join(f"{value:.2f}" for value in column(curve, "policy_reward"))
    sampler, kls = column(curve, "sampler_reward"), column(curve, "kl")
    return (
        f"{condition.name:16} seed {seed}  policy {shown}  sampler {sampler[-1]:.2f}  "
        f"KL {kls[0]:.1e} {kls[len(kls) // 2]:.1e} {kls[-1]:.1e}"
    )


def column(curve: Curve, name: str) -> list[float]:
    """Return a column of ``CURVES`` at the steps that have it."""
    return [row[CURVES[name]] for row in curve if CURVES[name] in row]


def write_curves(path: Path, curves: dict[tuple[str, int], Curve]) -> None:
    """Write one line for each condition, seed and step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["condition", "seed", "step", *CURVES])
        for (name, seed), curve in curves.items():
            for row in curve:
                values = [f"{row[m]:.4g}" if m in row else "" for m in CURVES.values()]
                writer.writerow([name, seed, int(row["step"]), *values])


def summary(curves: dict[tuple[str, int], Curve]) -> dict[str, Any]:
    """Return for each condition what each seed came to: its rewards, KL at both ends."""
    out: dict[str, Any] = {}
    for (name, _), curve in curves.items():
        rewards, kls = column(curve, "policy_reward"), column(curve, "kl")
        values = {
            "steps": curve[-1]["step"],
            "reward_first": rewards[0],
            "reward_least": min(rewards),
            "reward_last": rewards[-1],
            "sampler_reward_last": mean(column(curve, "sampler_reward")[-10:]),
            "kl_first": mean(kls[:10]),
            "kl_last": mean(kls[-10:]),
        }
        for key, value in values.items():
            out.setdefault(name, {}).setdefault(key, []).append(float(f"{value:.4g}"))
    return out


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
