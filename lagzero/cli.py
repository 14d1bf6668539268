"""The command line: ``lagzero train``, ``eval``, ``explain`` and ``simulate``.

Configuration errors end with code 2 before torch is imported or a model is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lagzero.errors import ConfigError, DataError, LagzeroError
from lagzero.runtime.cores import limit_spinning

if TYPE_CHECKING:
    from lagzero.config import Config

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130
_USERS_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    limit_spinning()
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    simulated = words[:1] == ["simulate"]  # its flags are its own and are read there
    known, rest = parser.parse_known_args(words[:1] if simulated else words)
    known.words = words[1:]
    overrides = [word for word in rest if word.startswith("--") and "=" in word]
    strange = [word for word in rest if word not in overrides]
    if strange:
        parser.error(_not_understood(strange))
    console = Console(stderr=False)
    try:
        return known.run(known, overrides, console)
    except ConfigError as error:
        where = "on the command line" if simulated else "in the configuration"
        _complain(f"{len(error.problems)} problem(s) {where}:", error.problems)
        return BAD_INPUT
    except DataError as error:
        _complain("the data cannot be used:", str(error).splitlines())
        return BAD_INPUT
    except LagzeroError as error:
        _complain("lagzero stopped:", str(error).splitlines())
        return FAILED
    except OSError as error:
        if error.errno not in _USERS_DISK:
            raise
        _complain("lagzero stopped:", [f"{error}"])
        return FAILED
    except KeyboardInterrupt:
        _complain("interrupted", [])
        return INTERRUPTED


def _not_understood(words: Sequence[str]) -> str:
    pairs = itertools.pairwise(words)
    joined = [f"{a}={b}" for a, b in pairs if a.startswith("--") and not b.startswith("--")]
    hint = f"did you mean {' '.join(joined)}? " if joined else ""
    return f"not understood: {' '.join(words)}; {hint}an override is written --a.b=value"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lagzero",
        description="Train language models with reinforcement learning.",
        epilog="Any key of the configuration can be set: --schedule.steps=50 "
        "--model.lora.rank=16. docs/configuration.md lists them.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a policy", allow_abbrev=False)
    train.add_argument("recipe", nargs="?", help="a YAML file, such as recipes/demo.yaml")
    train.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    train.set_defaults(run=_train)
    measure = commands.add_parser(
        "eval", help="measure a policy on held-out prompts", allow_abbrev=False
    )
    measure.add_argument("target", help="a recipe (measures its model) or a run's folder")
    measure.set_defaults(run=_eval)
    explain = commands.add_parser(
        "explain", help="say what a configuration trains, in formulas", allow_abbrev=False
    )
    explain.add_argument("target", help="a recipe or a run's folder")
    explain.add_argument("--json", action="store_true", help="as JSON")
    explain.set_defaults(run=_explain)
    simulate = commands.add_parser(
        "simulate", help="predict a run with modelled engines, in virtual time", add_help=False
    )
    simulate.set_defaults(run=_simulate)
    return parser


def _train(known: argparse.Namespace, overrides: list[str], console: Console) -> int:
    if (known.recipe is None) == (known.resume is None):
        raise ConfigError(["give either a recipe or --resume RUN"])
    if known.resume is not None:
        folder = Path(known.resume)
        config = _run_config(folder, overrides)
    else:
        config = _load(known.recipe, overrides)
        folder = _new_folder(config, Path(known.recipe).stem)
    from lagzero.numerics.quiet import quiet_libraries
    from lagzero.run import Run

    quiet_libraries()
    run = Run(config, folder, console, resume=known.resume is not None)
    finished = asyncio.run(run.train())
    return 0 if finished else INTERRUPTED


def _eval(known: argparse.Namespace, overrides: list[str], console: Console) -> int:
    target = Path(known.target)
    config = _existing(target, overrides, training=False)
    from lagzero.measure import measure_policy
    from lagzero.numerics.quiet import quiet_libraries

    quiet_libraries()
    asyncio.run(measure_policy(config, target if target.is_dir() else None, console))
    return 0


def _explain(known: argparse.Namespace, overrides: list[str], console: Console) -> int:
    from lagzero.explain.report import as_json, text

    config = _existing(Path(known.target), overrides)
    print(json.dumps(as_json(config), indent=1) if known.json else text(config))
    return 0


def _simulate(known: argparse.Namespace, overrides: list[str], console: Console) -> int:
    from lagzero.plan.command import run

    return run(known.words)


def _load(path: str | Path, overrides: Sequence[str], *, training: bool = True) -> Config:
    from lagzero import config as schema
    from lagzero.config_check import notes
    from lagzero.config_load import Rules, load_config
    from lagzero.data.source import check_source
    from lagzero.schedule.check import check_schedule
    from lagzero.score.load import check_reward

    rules = Rules(
        training,
        {
            schema.RewardConfig: check_reward,
            schema.SourceConfig: check_source,
            **({schema.Config: check_schedule} if training else {}),
        },
    )
    config = load_config(path, overrides, rules)
    for note in notes(config, training=training):
        print(f"note: {note}", file=sys.stderr)
    return config


def _existing(target: Path, overrides: Sequence[str], *, training: bool = True) -> Config:
    """Read the configuration of a recipe or of a run's folder."""
    if not target.exists():
        raise ConfigError([f"{target}: neither a recipe nor a run's folder"])
    load = _run_config if target.is_dir() else _load
    return load(target, overrides, training=training)


def _run_config(folder: Path, overrides: Sequence[str], *, training: bool = True) -> Config:
    if not (folder / "config.yaml").is_file():
        raise ConfigError([f"{folder}: not a run's folder, it has no config.yaml"])
    return _load(folder / "config.yaml", overrides, training=training)


def _new_folder(config: Config, name: str) -> Path:
    if config.run_dir is None:
        return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.run_dir)
    if any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        remedy = f"go on with --resume {folder}, or name another"
        raise ConfigError([f"run_dir: {folder} holds a run already; {remedy}"])
    return folder


def _complain(head: str, lines: Sequence[str]) -> None:
    print(head, file=sys.stderr)
    for line in lines:
        print(f"  {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
