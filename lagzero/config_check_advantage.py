"""Settings of advantages and critic that cannot work together, each with its remedy.

The part of ``config_check`` that concerns ``advantage`` and ``critic``; the same rules hold for its
lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lagzero.config import AdvantageConfig, Config, CriticConfig, OptimizerConfig
from lagzero.config_files import looks_like_path


def advantage_problems(config: Config) -> Iterator[str]:
    """Yield every combination of these settings that cannot work."""
    yield from _estimator(config)
    yield from _resampling(config)
    critic, estimator = config.critic, config.advantage.estimator
    if critic is None:
        if estimator == "gae":
            yield (
                "critic: missing; advantage.estimator gae compares with a critic's values; add "
                "critic: {} (it starts from the policy's weights), or use another estimator"
            )
    elif estimator != "gae":
        yield (
            f"critic: only advantage.estimator gae reads its values, and advantage.estimator is "
            f"{estimator}; set critic: null, or advantage.estimator: gae"
        )
    else:
        yield from _critic(config, critic)


def advantage_notes(config: Config) -> Iterator[str]:
    """Yield what is allowed but may surprise, one line each."""
    critic, steps = config.critic, config.schedule.steps
    if critic is not None:
        yield from optimizer_notes("critic.optimizer", critic.optimizer, steps)


def optimizer_problems(path: str, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield what an optimiser cannot do."""
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            yield f"{path}.betas.{index}: found {beta:g}; valid: a number >= 0 and < 1"
    if optimizer.decay_steps is not None and optimizer.schedule == "constant":
        yield (
            f"{path}.decay_steps: only schedules linear and cosine fall, and {path}.schedule is "
            "constant; remove it, or set one of them"
        )


def optimizer_notes(path: str, optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    """Yield where an optimiser's schedule does not fit into ``steps``."""
    warmup, decay = optimizer.warmup_steps, optimizer.decay_steps
    if warmup >= steps:
        yield (
            f"{path}.warmup_steps: {warmup} never ends within schedule.steps {steps}; the "
            "learning rate stays below lr"
        )
    elif decay is not None and decay > steps - warmup:
        yield (
            f"{path}.decay_steps: {decay} is more than the {steps - warmup} of schedule.steps "
            f"{steps} after warm-up; the learning rate falls in all of them"
        )


def _estimator(config: Config) -> Iterator[str]:
    advantage, untouched = config.advantage, AdvantageConfig()
    estimator = advantage.estimator
    compares = estimator in ("group_mean", "leave_one_out")
    if config.rollout.group_size == 1 and compares and config.loss.policy != "dpo":
        yield (
            f"rollout.group_size: 1 leaves advantage.estimator {estimator} nothing to compare "
            "with, so every advantage would be 0; use at least 2, or advantage.estimator: none"
        )
    if advantage.normalize_std and not compares:
        yield (
            "advantage.normalize_std: true needs a group baseline, and advantage.estimator "
            f"{estimator} has none; set normalize_std: false, or another estimator"
        )
    for name in ("gamma", "lam"):
        value = getattr(advantage, name)
        if estimator != "gae" and value != getattr(untouched, name):
            yield (
                f"advantage.{name}: {value:g}, but only estimator gae reads it, and "
                f"advantage.estimator is {estimator}; remove it, or set advantage.estimator: gae"
            )


def _critic(config: Config, critic: CriticConfig) -> Iterator[str]:
    untouched, steps = CriticConfig(), config.schedule.steps
    if critic.shared:
        for name, instead in (
            ("path", "the policy's weights are the critic's"),
            ("optimizer", "train.optimizer trains both"),
        ):
            if getattr(critic, name) != getattr(untouched, name):
                yield f"critic.{name}: not used with shared true: {instead}; remove it"
    elif critic.coefficient != untouched.coefficient:
        yield (
            f"critic.coefficient: {critic.coefficient:g} weighs the value loss in a shared trunk, "
            "but shared is false; remove it, or set shared: true (critic.optimizer.lr acts here)"
        )
    if critic.path is not None and looks_like_path(critic.path) and not Path(critic.path).is_dir():
        yield f"critic.path: there is no folder {critic.path}; give a model folder or a hub id"
    if critic.warmup_steps >= steps:
        yield (
            f"critic.warmup_steps: {critic.warmup_steps} leaves the policy none of schedule.steps "
            f"{steps}; use at most {steps - 1}"
        )
    yield from optimizer_problems("critic.optimizer", critic.optimizer)


def _resampling(config: Config) -> Iterator[str]:
    advantage, untouched = config.advantage, AdvantageConfig()
    if advantage.zero_spread != "resample":
        if advantage.resample_limit != untouched.resample_limit:
            yield (
                "advantage.resample_limit: only zero_spread resample reads it, and "
                f"advantage.zero_spread is {advantage.zero_spread}; remove it, or set resample"
            )
        return
    if advantage.estimator not in ("group_mean", "leave_one_out"):
        yield (
            f"advantage.zero_spread: resample gives up groups whose rewards are all equal, but "
            f"advantage.estimator {advantage.estimator} learns from them; set keep or drop, or "
            "an estimator that compares a group's members (group_mean, leave_one_out)"
        )
    if config.loss.kl.coefficient > 0 and config.loss.kl.where == "reward":
        yield (
            "advantage.zero_spread: resample looks at rewards before loss.kl.where reward makes "
            "them differ; set loss.kl.where: loss, or zero_spread: drop"
        )
