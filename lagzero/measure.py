"""``lagzero eval``: measure one policy on held-out prompts, greedy and sampled."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lagzero import build
from lagzero.build_serving import build_serving
from lagzero.config import Config, PlacementConfig
from lagzero.errors import LagzeroError
from lagzero.evaluate import EvalResult
from lagzero.observe.summary import Tally, accuracy_text
from lagzero.run import measure, reward_failure
from lagzero.runtime.local_runtime import ComputeThread


async def measure_policy(config: Config, run: Path | None, console: Console) -> None:
    """Measure the configured model or, with ``run``, the last policy that the run saved."""
    config = build.prepare_process(config)
    config = config.model_copy(update={"placement": PlacementConfig()})  # nothing else runs
    if run is not None:
        config = _of_run(config, run)
    scorer = build.build_scorer(config, reward_failure(console))
    data = build.build_data(config)
    for note in (*build.machine_notes(config), *data.notes):
        console.print(note, highlight=False)
    if data.eval is None:
        raise LagzeroError("data.eval: there are no held-out prompts to measure with")
    policy = build.build_policy(config)
    compute = ComputeThread()
    serving = build_serving(config, policy, compute, console.print)
    try:
        results = await measure(config, data.eval, serving, scorer)
    finally:
        scorer.close()
        compute.close()
    console.print(_table(config.model.path if run is None else str(run), results))


def _of_run(config: Config, run: Path) -> Config:
    folder = build.newest_policy_folder(run)
    if folder is None:
        raise LagzeroError(f"{run} has no saved policy and no complete checkpoint")
    if config.model.lora is None:
        model = config.model.model_copy(update={"path": str(folder)})
    else:
        lora = config.model.lora.model_copy(update={"start": str(folder)})
        model = config.model.model_copy(update={"lora": lora})
    return config.model_copy(update={"model": model})


def _table(name: str, results: dict[str, EvalResult]) -> Table:
    table = Table(title=f"Held-out accuracy of {name} (95 % interval)")
    for column in ("", "accuracy", "mean reward", "rollouts", "not scored", "tokens", "cut off"):
        table.add_column(column, justify="left" if not column else "right")
    for kind, result in results.items():
        reward = "-" if result.mean_reward is None else f"{result.mean_reward:.3f}"
        table.add_row(
            kind,
            accuracy_text(Tally(result.num_right, result.num_scored)),
            reward,
            str(result.num_scored),
            str(result.num_unscored),
            f"{result.mean_tokens:.1f}",
            f"{result.truncated_share:.0%}",
        )
    return table
