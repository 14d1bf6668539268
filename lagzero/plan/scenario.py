"""What to simulate: every number of a modelled run, readable from text with clear refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lagzero.errors import ConfigError
from lagzero.nearest import nearest
from lagzero.plan.lengths import LengthSpec, parse_lengths
from lagzero.plan.pace import Measured, parse_measured


def _whole(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number >= {low}, not '{text}'") from None
        if value < low:
            raise ValueError(f"must be a whole number >= {low}, not {value}")
        return value

    return read


def _number(low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    valid = f"must be a number {'>' if above else '>='} {low:g}"
    valid += "" if high == math.inf else f" and <= {high:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{valid}, not '{text}'") from None
        if not (low < value if above else low <= value) or not value <= high or value == math.inf:
            raise ValueError(f"{valid}, not {text}")
        return value

    return read


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_or_none(text: str) -> Any:
        if text.lower() == "none":
            return None
        try:
            return read(text)
        except ValueError as error:
            raise ValueError(f"{error}; or 'none'") from None

    return read_or_none


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            near = nearest(text, choices, 0.0)
            raise ValueError(
                f"must be one of {', '.join(choices)}, not '{text}'; did you mean '{near}'?"
            )
        return text

    return read


def _truth(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


def _key(read: Callable[[str], Any], default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"read": read, "help": meaning})


_LONG_TAIL = parse_lengths("lognormal:median=1500,sigma=0.9,min=64,max=16384")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One modelled run. Times in seconds, lengths in tokens (units of length with ``lanes``)."""

    steps: int = _key(_whole(1), 20, "optimiser steps")
    groups_per_step: int = _key(_whole(1), 32, "groups that one step trains on")
    group_size: int = _key(_whole(1), 8, "rollouts of one prompt")
    max_lag: int = _key(_whole(0), 0, "k: policy versions that generation may run ahead")
    window: int | None = _key(
        _or_none(_whole(1)), 1, "of start order at hand-over; none: first finished"
    )
    extra_groups: int = _key(_whole(0), 0, "over-sampling: groups started beyond need")
    surplus: str = _key(
        _one_of("carry", "drop"), "carry", "what becomes of groups that a full step did not take"
    )
    sync_every: int = _key(_whole(1), 1, "optimiser steps from one weight transfer to the next")
    action: str = _key(
        _one_of("wait", "drop", "recycle", "interrupt", "accept"),
        "wait",
        "of the staleness contract, on groups whose lag is above the bound",
    )
    bound: int | None = _key(
        _or_none(_whole(0)), None, "of the staleness contract, policy versions"
    )
    clock: str = _key(
        _one_of("oldest_token", "newest_token", "start"),
        "oldest_token",
        "which version the lag is counted from",
    )
    max_restarts: int = _key(
        _whole(0), 2, "times that a group is played again before it is dropped"
    )
    prompts: int | None = _key(_or_none(_whole(1)), None, "prompts in the data; none: endless")
    lengths: LengthSpec = _key(  # noqa: RUF009
        parse_lengths, _LONG_TAIL, "of responses: a distribution"
    )
    prompt_tokens: int = _key(_whole(0), 512, "context before the response")
    partial_cap: float | None = _key(
        _or_none(_number(0, above=True)), None, "tokens a rollout writes a round, then it waits"
    )
    lanes: int | None = _key(
        _or_none(_whole(1)), None, "lanes of constant pace instead of engines; none: engines"
    )
    unit_s: float = _key(_number(0, above=True), 1.0, "time of one unit of length in a lane")
    engines: int = _key(_whole(1), 4, "engines, one device each")
    max_running: int = _key(_whole(1), 64, "rollouts that one engine decodes together")
    kv_tokens: float | None = _key(
        _or_none(_number(0, above=True)), None, "context that one engine can hold; none: no limit"
    )
    prefill_tok_per_s: float | None = _key(
        _or_none(_number(0, above=True)), None, "prompt tokens an engine reads; none: at no cost"
    )
    router: str = _key(
        _one_of("least_loaded", "round_robin"), "least_loaded", "which engine a group goes to"
    )
    repack_below: int | None = _key(
        _or_none(_whole(2)),
        None,
        "an engine with fewer unfinished rollouts hands them to another; none: they stay",
    )
    params: float = _key(_number(0), 7.6e9, "parameters of the model")
    weight_bytes: float = _key(_number(0, above=True), 15.2e9, "bytes that a decode step reads")
    kv_bytes_per_token: float = _key(_number(0), 57344, "bytes of KV cache a token")
    bandwidth_bytes_per_s: float = _key(_number(0, above=True), 3.35e12, "of an engine's memory")
    peak_flop_per_s: float = _key(_number(0, above=True), 989e12, "of an engine")
    efficiency: float = _key(_number(0, 1, above=True), 0.5, "share of the peak in decoding")
    overhead_s: float = _key(_number(0), 0.4e-3, "of a decode step")
    decode_steps: Measured | None = _key(  # noqa: RUF009
        _or_none(parse_measured), None, "timed steps, sequences:seconds,..., instead of the above"
    )
    train_s: float = _key(_number(0), 0.0, "of an optimiser step, whatever its size")
    train_token_s: float = _key(_number(0), 3e-5, "of an optimiser step for each token")
    sync_s: float = _key(_number(0), 0.3, "to carry weights to the engines")
    sync_pauses: bool = _key(_truth, False, "whether engines stand still meanwhile")
    score: LengthSpec | None = _key(  # noqa: RUF009
        _or_none(parse_lengths), None, "seconds that scoring a group takes: a distribution"
    )
    empty_share: float = _key(
        _number(0, 1), 0.0, "share of groups with nothing to learn from, dropped when consumed"
    )
    resample_limit: int = _key(
        _whole(0), 0, "of those, played anew in a step, times groups_per_step (dynamic sampling)"
    )
    placement: str = _key(
        _one_of("disaggregated", "colocated", "swap"),
        "disaggregated",
        "colocated: engines stand still while a step trains; swap: two halves take turns in it",
    )
    seed: int = _key(_whole(0), 0, "of lengths and scoring times")


NAMES: Mapping[str, Any] = {each.name: each for each in fields(Scenario)}


def as_text(value: object) -> str:
    """Return a value as it would be written on the command line."""
    if isinstance(value, LengthSpec | Measured):
        return value.text
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).replace("None", "none")


def read_keys(keys: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Read the values of keys, and list the problems of those that cannot be read."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in keys:
        try:
            values[name] = NAMES[name].metadata["read"](text)
        except ValueError as error:
            problems.append(f"--{name.replace('_', '-')}: {error}")
    return values, problems


def with_keys(scenario: Scenario, keys: Sequence[tuple[str, str]]) -> Scenario:
    """Return a scenario with keys changed. Raises ConfigError with all that is wrong."""
    values, problems = read_keys(keys)
    changed = replace(scenario, **values)
    problems += _conflicts(changed)
    if problems:
        raise ConfigError(problems)
    return changed


def _conflicts(scenario: Scenario) -> list[str]:
    """List the keys that cannot work together."""
    problems: list[str] = []
    if scenario.window == 1 and scenario.extra_groups:
        problems.append(
            "--extra-groups: with --window 1 every started group is waited for, so that extra ones "
            "only add lag; give --window none (or a number above 1), or --extra-groups 0"
        )
    cap = scenario.partial_cap
    if cap is not None and scenario.lanes is None and cap != int(cap):
        problems.append(
            f"--partial-cap: engines write whole tokens; give {math.ceil(cap)}, not {cap:g}"
        )
    if scenario.bound is None and scenario.action in ("drop", "recycle", "interrupt"):
        problems.append(
            f"--bound: --action {scenario.action} is for groups above a bound; give one, such as "
            f"--bound {scenario.max_lag}"
        )
    if scenario.surplus == "drop" and not scenario.extra_groups and not scenario.max_lag:
        problems.append(
            "--surplus: nothing is started that a step does not take; give --extra-groups above 0"
        )
    if scenario.resample_limit and not scenario.empty_share:
        problems.append(
            "--resample-limit: every group has something to learn from; give --empty-share above 0"
        )
    problems += _swap_conflicts(scenario) if scenario.placement == "swap" else []
    problems += _repack_conflicts(scenario) if scenario.repack_below is not None else []
    return problems


def _repack_conflicts(scenario: Scenario) -> list[str]:
    """Rollouts move between engines that work on the same groups, to make room for other groups."""
    problems: list[str] = []
    apart = scenario.placement == "disaggregated"
    if not apart or scenario.lanes is not None or scenario.engines == 1:
        problems.append(
            "--repack-below: there are no two engines at work on one step's groups; give "
            "--placement disaggregated, --lanes none and --engines above 1, or leave it out"
        )
    carried = scenario.extra_groups > 0 and scenario.surplus == "carry"
    if not (scenario.max_lag or scenario.sync_every > 1 or carried):
        problems.append(
            "--repack-below: a step without lag waits for all of its rollouts, so a free engine "
            "has nothing to begin; give --max-lag (or --extra-groups) above 0, or leave it out"
        )
    return problems


def _swap_conflicts(scenario: Scenario) -> list[str]:
    """Each half generates the step that it trains next, so steps take groups in start order."""
    fixed = {
        "max_lag": 1,
        "window": 1,
        "extra_groups": 0,
        "sync_every": 1,
        "lanes": None,
        "resample_limit": 0,
    }
    problems = [
        f"--{name.replace('_', '-')}: --placement swap needs {as_text(value)}"
        for name, value in fixed.items()
        if getattr(scenario, name) != value
    ]
    if scenario.action not in ("wait", "accept"):
        problems.append("--action: --placement swap needs wait or accept")
    if scenario.engines % 2:
        problems.append("--engines: --placement swap halves them; give an even number")
    return problems
