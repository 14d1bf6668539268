"""What follows from a configuration's numbers: sizes, lag, what the clip can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lagzero.config import Config
from lagzero.explain import advantage, ratio
from lagzero.explain.numbers import shown
from lagzero.schedule.check import lag_bound


@dataclass(frozen=True, slots=True)
class Quantity:
    """One derived number; ``key`` is its name in JSON."""

    key: str
    label: str
    value: int | float | bool | None
    how: str  # it comes about, or what it means


def quantities(config: Config) -> list[Quantity]:
    """Return everything that is worth knowing before the run; a staleness preset is written out."""
    return [*_sizes(config), *_data(config), *_lag(config), *_bounds(config)]


def _sizes(config: Config) -> Iterator[Quantity]:
    groups, size = config.schedule.groups_per_step, config.rollout.group_size
    rollouts = groups * size
    yield Quantity("rollouts_per_step", "rollouts a step", rollouts, f"{groups} groups of {size}")
    if config.loss.policy == "dpo":
        samples, how = 2 * groups, "the best and the worst of each group"
    elif config.advantage.zero_spread != "keep" and config.advantage.estimator in advantage.GROUPED:
        samples, how = rollouts, "at most: groups of equal rewards are left out"
    else:
        samples, how = rollouts, "all of them"
    yield Quantity("sequences_per_step", "sequences trained a step", samples, how)
    most = config.rollout.max_new_tokens
    tokens = samples * most
    yield Quantity("tokens_per_step", "tokens trained a step", tokens, f"at most: {most} each")
    passes, steps = config.train.passes, config.schedule.steps
    again = "on the whole batch, one after the other" if passes > 1 else "each sample trains once"
    yield Quantity("updates_per_step", "updates a step", passes, again)
    yield Quantity("updates", "updates in all", passes * steps, f"{steps} steps")


def _data(config: Config) -> Iterator[Quantity]:
    drawn = config.schedule.groups_per_step * config.schedule.steps
    sizes = [source.size for source in config.data.train]
    rows = None if None in sizes else sum(size or 0 for size in sizes)
    if rows is None:
        how = f"{drawn} prompts; a source without size is counted when it is loaded"
        epochs = None
    else:
        how = f"{drawn} prompts of {rows} rows (at most)"
        epochs = round(drawn / rows, 4)
    yield Quantity("epochs", "epochs of the data", epochs, how)


def _lag(config: Config) -> Iterator[Quantity]:
    bound, action = lag_limit(config), config.staleness.action
    if bound is None:
        how = "no bound: a group that takes long can be any age"
    elif bound == 0:
        how = "every token is sampled by the policy that its step starts from"
    elif action in ("wait", "accept"):
        how = "versions; what the schedule guarantees by itself"
    else:
        how = f"versions; above it a group is not trained ({action})"
    yield Quantity("lag_bound", "largest lag", bound, how)
    sync = config.schedule.sync_every
    if sync > 1:
        yield Quantity("sync_every", "steps between weight transfers", sync, "they are part of lag")


def lag_limit(config: Config) -> int | None:
    """Return the largest lag of anything that is trained, policy versions; None without a bound."""
    contract, proven = config.staleness, lag_bound(config)
    enforced = contract.action in ("drop", "recycle", "interrupt")
    limits = [proven, contract.bound if enforced else None]
    if ratio.corrects(config):
        limits.append(config.loss.correction.max_token_lag)
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _bounds(config: Config) -> Iterator[Quantity]:
    if ratio.has_ratio(config):
        acts, how = clip_acts(config)
        yield Quantity("clip_can_act", "the bounds on the ratio can act", acts, how)
    most = advantage.largest(config)
    if most is not None:
        how = f"of one rollout among {config.rollout.group_size}, by the normalisation alone"
        yield Quantity("advantage_limit", "largest |A|", round(most, 4), how)
    kept = ratio.needs_reference(config)
    how = "one more set of weights and one more forward pass" if kept else "nothing reads one"
    if kept and config.model.lora is not None and config.model.reference is None:
        how = "the base weights, which are in memory; one more forward pass"
    yield Quantity("keeps_reference", "a reference policy is kept", kept, how)


def clip_acts(config: Config) -> tuple[bool, str]:
    """Say whether the ratio can leave 1 by more than rounding, and why.

    In a step's first update the policy is the proximal one, so a ratio against that is exactly 1.
    """
    passes, on_policy = config.train.passes, lag_limit(config) == 0
    gap = "the gap between engine and trainer"
    match config.loss.proximal:
        case "recomputed" if passes == 1:
            return False, "the only update has ratio 1; loss.correction and lr bound the step"
        case "recomputed":
            return True, f"from the second of {passes} updates on; the first has ratio 1"
        case "interpolated" if on_policy and passes == 1:
            return False, "at lag 0 the anchor is the policy itself, so the ratio is 1"
        case "interpolated" if passes == 1:
            return True, "on tokens of earlier versions; at lag 0 the ratio is 1"
        case "behaviour" if on_policy and passes == 1:
            return True, f"only through {gap}: nothing else makes the ratio differ from 1"
        case _:
            lag = "" if on_policy else "lag, "
            later = f" and updates after the first of {passes}" if passes > 1 else ""
            return True, f"through {lag}{gap}{later}"


def as_text(quantity: Quantity) -> str:
    """Write a quantity's value as people read it."""
    value = quantity.value
    if value is None:
        return "none" if quantity.key == "lag_bound" else "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else shown(value)
