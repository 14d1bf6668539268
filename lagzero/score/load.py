"""From a reward's configuration to the function: a built-in name, a file or a package."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lagzero.config import RewardConfig
from lagzero.data.reasoning_gym_source import extract_answer, reasoning_gym_score
from lagzero.errors import ConfigError, LagzeroError
from lagzero.nearest import nearest, unknown_name
from lagzero.score.extract import NoAnswer, has_box, unwrap, without_reasoning
from lagzero.score.judge import ModelJudge
from lagzero.score.math_answer import MathAnswer
from lagzero.score.number_answer import NumberAnswer
from lagzero.score.overlong import Overlong
from lagzero.score.reward_model import RewardModel
from lagzero.score.text_rewards import ExactMatch, Format

BUILT_IN = (
    "math_answer",
    "number_answer",
    "exact_match",
    "format",
    "reasoning_gym",
    "overlong",
    "reward_model",
    "judge",
)

# by the scorer, so no option sets them
_GIVEN = ("prompts", "completions", "completion_ids", "sampled_tokens")

Reward = Callable[..., Any]


def check_reward(at: str, config: RewardConfig) -> list[str]:
    """Return every problem of one reward, each with the path to change below ``at``.

    A function of the user's own is loaded, and so its file is run.
    """
    try:
        load_reward(config, at=at)
    except ConfigError as error:
        return list(error.problems)
    return []


def load_reward(
    config: RewardConfig,
    *,
    timeout_s: float = 10.0,
    workers: int = 1,
    folder: Path | None = None,
    at: str = "reward",
) -> Reward:
    """Return the reward that a configuration names, its options applied.

    ``use`` is a built-in name, ``file.py:function`` (relative to ``folder``, by default the
    current one) or ``package.module:function``. Raises ConfigError, with the path below ``at`` and
    what would be valid, for an unknown name or option, a module that does not load, or a thing that
    is no reward.
    """
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
        case "overlong":
            made = Overlong
        case "reward_model":
            made = RewardModel
        case "judge":
            made = ModelJudge
        case _:
            made = _imported(config.use, folder or Path.cwd(), f"{at}.use")
    _check_options(made, config.options, at, hidden=(*_GIVEN, *limits))
    options = {**limits, **config.options}
    if inspect.isclass(made) or made is _reasoning_gym:
        made = _made(made, options, f"{at}.options")
    elif options:
        made = partial(made, **options)
    _check_signature(made, f"{at}.use")
    return made


def _made(make: Callable[..., Any], options: Mapping[str, Any], where: str) -> Any:
    try:
        return make(**options)
    except ConfigError as error:  # its paths are relative to the options
        raise ConfigError([f"{where}.{problem}" for problem in error.problems]) from error
    except LagzeroError as error:
        raise ConfigError([f"{where}: {error}"]) from error
    except (Exception, SystemExit) as error:  # what a user's class raises is for the user to read
        raise ConfigError([f"{where}: {type(error).__name__}: {error}"]) from error


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
        said = unknown_name(use, BUILT_IN)
        own = "or your own: file.py:function, package.module:function"
        raise ConfigError([f"{where}: {said}; {own}"])
    module = _module(module_name, folder, where)
    if not hasattr(module, name):
        names = [key for key in dir(module) if callable(getattr(module, key))]
        near = nearest(name, names)
        hint = f"; did you mean '{near}'?" if near else ""
        raise ConfigError([f"{where}: {module_name} has no '{name}'{hint}"])
    return getattr(module, name)


def _module(name: str, folder: Path, where: str) -> Any:
    path = (folder / name).resolve()
    if name.endswith(".py") and not path.is_file():
        raise ConfigError([f"{where}: there is no file {path}"])
    # Whatever a user's module raises while it loads is for the user to read.
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"lagzero_reward_{path.stem}", path)
        assert spec is not None  # it has a loader for every name that ends with .py
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        problem = f"{where}: {name} does not load: {type(error).__name__}: {error}"
        raise ConfigError([problem]) from error


def _check_options(made: Any, options: Mapping[str, Any], at: str, hidden: Collection[str]) -> None:
    if not callable(made):
        raise ConfigError([f"{at}.use: is a {type(made).__name__}, not a function"])
    parameters = inspect.signature(made).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = {
        name: p.default is p.empty and (inspect.isclass(made) or made is _reasoning_gym)
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in hidden
    }
    problems = [f"{at}.options.{o}: {unknown_name(o, known)}" for o in options if o not in known]
    problems += [
        f"{at}.options.{name}: missing; the reward needs it"
        for name, is_needed in known.items()
        if is_needed and name not in options
    ]
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
