"""``staleness.preset``: a preset's rule written out into the keys that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lagzero.config import Block, Config, EngineConfig, ScheduleConfig, StalenessConfig
from lagzero.errors import ConfigError
from lagzero.nearest import nearest
from lagzero.schedule import presets
from lagzero.schedule.presets import Preset

_GROUPS = ("groups_per_step", "ppo_mini_batch_size")  # filled from schedule.groups_per_step
_MEMBERS = ("attempts", "num_generations")  # filled from rollout.group_size
_STANDS_FOR = {
    "schedule": ("max_lag", "window", "extra_groups", "surplus", "sync_every"),
    "staleness": ("action", "bound", "clock", "max_restarts"),
    "engine": ("kv_on_update",),
}

_UNTOUCHED: Mapping[str, Block] = {
    "schedule": ScheduleConfig(),
    "staleness": StalenessConfig(),
    "engine": EngineConfig(),
}


def preset_named(name: str) -> Callable[..., Preset]:
    """Return a preset by its name. Raises KeyError."""
    match name:
        case "sync":
            return presets.sync
        case "one_step_off":
            return presets.one_step_off
        case "areal":
            return presets.areal
        case "skyrl":
            return presets.skyrl
        case "pipelinerl":
            return presets.pipelinerl
        case "prime_rl":
            return presets.prime_rl
        case "trl":
            return presets.trl
        case "verl":
            return presets.verl
        case _:
            raise KeyError(name)


def written_out(config: Config) -> Config:
    """Return the configuration with the preset's values in place of its name.

    Raises ConfigError that lists keys set beside the preset, options that it does not have or
    lacks, and values that it refuses.
    """
    name = config.staleness.preset
    if name is None:
        if config.staleness.preset_options:
            raise ConfigError(["staleness.preset_options: given without staleness.preset"])
        return config
    make, given = preset_named(name), config.staleness.preset_options
    problems = [*_also_set(config, name), *_wrong_options(make, name, given)]
    if problems:
        raise ConfigError(problems)
    try:
        preset = make(**_from_config(make, config), **given)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"staleness.preset_options: {name}: {error}"]) from error
    return _with(config, preset)


def _also_set(config: Config, name: str) -> list[str]:
    return [
        f"{block}.{key}: the preset {name} decides it; remove it, or the preset"
        for block, default in _UNTOUCHED.items()
        for key in _STANDS_FOR[block]
        if getattr(getattr(config, block), key) != getattr(default, key)
    ]


def _wrong_options(make: Callable[..., Preset], name: str, given: Mapping[str, Any]) -> list[str]:
    parameters = inspect.signature(make).parameters
    own = [each for each in parameters if each not in (*_GROUPS, *_MEMBERS)]
    problems = [
        f"staleness.preset_options.{key}: {name} has no such option; the nearest is "
        f"{nearest(key, own, 0.0)}"
        if own
        else f"staleness.preset_options.{key}: {name} has no options"
        for key in given
        if key not in own
    ]
    problems += [
        f"staleness.preset_options.{key}: missing; {name} needs it"
        for key in own
        if key not in given and parameters[key].default is inspect.Parameter.empty
    ]
    return problems


def _from_config(make: Callable[..., Preset], config: Config) -> dict[str, int]:
    parameters = inspect.signature(make).parameters
    sizes = dict.fromkeys(_GROUPS, config.schedule.groups_per_step)
    sizes |= dict.fromkeys(_MEMBERS, config.rollout.group_size)
    return {name: size for name, size in sizes.items() if name in parameters}


def _with(config: Config, preset: Preset) -> Config:
    schedule: dict[str, Any] = {
        "groups_per_step": preset.groups_per_step,
        "max_lag": preset.max_lag,
        "window": preset.window,
        "extra_groups": preset.extra_groups,
        "surplus": preset.surplus,
        "sync_every": preset.sync_every,
    }
    contract = preset.contract
    staleness: dict[str, Any] = {
        "preset": None,
        "preset_options": {},
        "action": contract.action,
        "bound": contract.bound,
        "clock": contract.clock,
        "max_restarts": contract.max_restarts,
    }
    engine: dict[str, Any] = {}
    if preset.kv_on_update is not None:
        engine["kv_on_update"] = preset.kv_on_update
    if preset.max_playing is not None:
        playing = preset.max_playing * config.rollout.group_size
        engine["max_running"] = max(1, min(config.engine.max_running, playing))
    changed = {"schedule": schedule, "staleness": staleness, "engine": engine}
    return config.model_copy(
        update={
            block: getattr(config, block).model_copy(update=values)
            for block, values in changed.items()
        }
    )
