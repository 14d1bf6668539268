"""From a reward's configuration to the function: a built-in name, a file or a package."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from lagzero.config import RewardConfig
from lagzero.data.reasoning_gym_source import extract_answer, reasoning_gym_score
from lagzero.errors import ConfigError
from lagzero.score.extract import NoAnswer, has_box, unwrap, without_reasoning
from lagzero.score.math_answer import MathAnswer
from lagzero.score.number_answer import NumberAnswer
from lagzero.score.text_rewards import ExactMatch, Format

BUILT_IN = ("math_answer", "number_answer", "exact_match", "format", "reasoning_gym")

Reward = Callable[..., Any]


def load_reward(
    config: RewardConfig,
    *,
    timeout_s: float = 10.0,
    workers: int = 1,
    folder: Path | None = None,
) -> Reward:
    """Return the reward that a configuration names, its options applied.

    ``use`` is a built-in name, ``file.py:function`` (relative to ``folder``, by default the
    current one) or ``package.module:function``. Raises ConfigError, with what would be valid, for
    an unknown name or option, a module that does not load, or a thing that is no reward.
    """
    where = f"score.rewards ({config.use})"
    limits: dict[str, Any] = {}
    match config.use:
        case "math_answer":
            made: Any = MathAnswer
            limits = {"timeout_s": timeout_s, "workers": workers}
        case "number_answer":
            made = NumberAnswer
        case "exact_match":
            made = ExactMatch
        case "format":
            made = Format
        case "reasoning_gym":
            made = _reasoning_gym
        case _:
            made = _imported(config.use, folder or Path.cwd(), where)
    options = {**limits, **config.options}
    _check_options(made, config.options, where)
    if inspect.isclass(made) or made is _reasoning_gym:
        try:
            made = made(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError([f"{where}: {error}"]) from error
    elif options:
        made = partial(made, **options)
    _check_signature(made, where)
    return made


def _reasoning_gym(name: str) -> Reward:
    """Score by a reasoning-gym dataset's own rule, on the answer outside the reasoning."""

    def read(reply: str) -> str:
        said = without_reasoning(reply)
        if isinstance(said, NoAnswer):
            return ""
        return unwrap(said) if has_box(said) else extract_answer(said)

    return reasoning_gym_score(name, read)


def reward_name(config: RewardConfig) -> str:
    """Return the name under which a reward's figures are reported."""
    return config.use.rpartition(":")[2]


def _imported(use: str, folder: Path, where: str) -> Any:
    module_name, colon, name = use.rpartition(":")
    if not colon or not module_name or not name:
        near = get_close_matches(use, BUILT_IN, n=1, cutoff=0.0)[0]
        raise ConfigError(
            [
                f"{where}: no such reward; the nearest built-in is {near!r} "
                f"(built in: {', '.join(BUILT_IN)}; your own: file.py:function or "
                "package.module:function)"
            ]
        )
    module = _module(module_name, folder, where)
    if not hasattr(module, name):
        names = [key for key in dir(module) if callable(getattr(module, key))]
        near = get_close_matches(name, names, n=1, cutoff=0.0)
        hint = f"; the nearest name there is {near[0]!r}" if near else ""
        raise ConfigError([f"{where}: {module_name} has no {name!r}{hint}"])
    return getattr(module, name)


def _module(name: str, folder: Path, where: str) -> Any:
    # Whatever a user's module raises while it loads is for the user to read.
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = (folder / name).resolve()
        if not path.is_file():
            raise ConfigError([f"{where}: no file {path}"])
        spec = importlib.util.spec_from_file_location(f"lagzero_reward_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ConfigError([f"{where}: {path} cannot be loaded"])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            [f"{where}: {name} does not load: {type(error).__name__}: {error}"]
        ) from error


def _check_options(made: Any, options: Mapping[str, Any], where: str) -> None:
    if not callable(made):
        raise ConfigError([f"{where}: is a {type(made).__name__}, not a function"])
    parameters = inspect.signature(made).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and name not in ("prompts", "completions", "completion_ids", "timeout_s", "workers")
    ]
    problems: list[str] = []
    for option in options:
        if option in parameters:
            continue
        near = get_close_matches(option, known, n=1, cutoff=0.0)
        hint = f"the nearest option is {near[0]!r}" if near else "it takes none"
        problems.append(f"{where}.options.{option}: no such option; {hint}")
    if problems:
        raise ConfigError(problems)


def _check_signature(reward: Any, where: str) -> None:
    if not callable(reward):
        raise ConfigError([f"{where}: makes a {type(reward).__name__}, not a function"])
    parameters = inspect.signature(reward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [
        name
        for name in ("prompts", "completions")
        if not takes_any
        and (name not in parameters or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY)
    ]
    if missing:
        raise ConfigError(
            [
                f"{where}: does not accept {' and '.join(missing)}; a reward is "
                "f(prompts, completions, **columns) -> list of numbers or None"
            ]
        )
