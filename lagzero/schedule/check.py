"""Combinations of schedule, staleness and placement that cannot work, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator

from lagzero.config import Config
from lagzero.errors import ConfigError
from lagzero.schedule.named import written_out
from lagzero.schedule.staleness import provable_bound


def check_schedule(path: str, config: Config) -> Iterator[str]:
    """Yield every such problem, one line each; ``path`` is empty, because it is the whole."""
    try:
        config = written_out(config)
    except ConfigError as error:
        yield from error.problems
        return
    yield from _over_sampling(config)
    yield from _contract(config)
    yield from _placement(config)
    yield from _syncing(config)


def lag_bound(config: Config) -> int | None:
    """Return the lag, policy versions, that the schedule alone guarantees; None without one."""
    of = config.schedule
    return provable_bound(of.max_lag, of.groups_per_step, of.window, of.extra_groups, of.sync_every)


def runs_on(config: Config) -> bool:
    """Whether groups are still being played while a step trains."""
    schedule = config.schedule
    carried = schedule.extra_groups > 0 and schedule.surplus == "carry"
    return schedule.max_lag > 0 or schedule.sync_every > 1 or carried


def _over_sampling(config: Config) -> Iterator[str]:
    schedule = config.schedule
    if schedule.extra_groups and schedule.window == 1:
        yield (
            f"schedule.extra_groups: {schedule.extra_groups} with window 1, where every started "
            "group is waited for; set schedule.window to null (first finished) or above 1"
        )
    if schedule.surplus == "drop" and not schedule.extra_groups:
        yield "schedule.surplus: drop without extra groups; set schedule.extra_groups above 0"
    if schedule.surplus == "drop" and schedule.max_lag:
        yield (
            f"schedule.surplus: drop with max_lag {schedule.max_lag} would give up the groups of "
            "the next steps, too; set schedule.max_lag to 0, or surplus to carry"
        )
    if config.rollout.tokens_per_round is not None and not runs_on(config):
        yield (
            "rollout.tokens_per_round: a step without lag waits for whole responses, so nothing "
            "is carried; set schedule.max_lag (or extra_groups) above 0, or remove it"
        )


def _contract(config: Config) -> Iterator[str]:
    contract, proven = config.staleness, lag_bound(config)
    action, bound = contract.action, contract.bound
    if action in ("drop", "recycle", "interrupt") and bound is None:
        yield (
            f"staleness.bound: missing; action {action} needs one, in policy versions, for "
            f"example {config.schedule.max_lag}"
        )
    if action == "wait" and bound is not None and (proven is None or proven > bound):
        found = "none at all" if proven is None else f"a lag of up to {proven}"
        yield (
            f"staleness.bound: action wait keeps {bound} only through the schedule, which allows "
            f"{found}; lower schedule.max_lag, window or extra_groups, or choose an action"
        )
    if bound is not None and action in ("recycle", "interrupt", "drop"):
        least = config.schedule.sync_every - 1
        if bound < least:
            yield (
                f"staleness.bound: {bound} is below the lag of a group that has just started, "
                f"which is up to {least} with schedule.sync_every {config.schedule.sync_every}"
            )


def _placement(config: Config) -> Iterator[str]:
    placement = config.placement
    if placement.kind == "colocated" and placement.engines > 1:
        yield (
            f"placement.engines: {placement.engines}, but colocated has one; set it to 1, or "
            "placement.kind to disaggregated"
        )
    if placement.kind != "colocated" and placement.release_kv:
        yield (
            "placement.release_kv: engines in processes of their own keep their memory; set it to "
            "false, or placement.kind to colocated"
        )
    if placement.kind == "swap":
        yield from _swapping(config)
    if placement.repack_below is not None:
        yield from _repacking(config)


def _swapping(config: Config) -> Iterator[str]:
    """Each half generates the step that it trains next, so steps take groups in start order."""
    schedule, num_engines = config.schedule, config.placement.engines
    if num_engines % 2:
        yield (
            f"placement.engines: {num_engines} cannot be halved for placement.kind swap; use an "
            "even number"
        )
    if schedule.max_lag > 1:
        yield (
            f"schedule.max_lag: {schedule.max_lag}, but with placement.kind swap one half trains "
            "while the other is one step ahead; set it to 1 (or to 0, where a half is always idle)"
        )
    for name, valid in (("window", 1), ("extra_groups", 0), ("sync_every", 1)):
        if (found := getattr(schedule, name)) != valid:
            text = "null" if found is None else found
            yield (
                f"schedule.{name}: {text}, but placement.kind swap trains each step where its "
                f"groups were played, in start order; set it to {valid}"
            )
    if (action := config.staleness.action) not in ("wait", "accept"):
        yield (
            f"staleness.action: {action} plays groups out of turn, which placement.kind swap "
            "cannot place; set it to wait or accept"
        )
    if config.advantage.zero_spread == "resample":
        yield (
            "advantage.zero_spread: resample gives up groups that were played, after which "
            "placement.kind swap would train others where the next are played; set it to drop"
        )


def _repacking(config: Config) -> Iterator[str]:
    key, placement = "placement.repack_below", config.placement
    if placement.kind != "disaggregated" or placement.engines == 1:
        yield (
            f"{key}: there are no two engines at work on one step's groups; set placement.kind to "
            "disaggregated and placement.engines above 1, or remove it"
        )
    elif not runs_on(config):
        yield (
            f"{key}: a step without lag waits for all of its responses, so a free engine has "
            "nothing to begin; set schedule.max_lag (or extra_groups) above 0, or remove it"
        )
    if config.engine.kv_on_update == "keep":
        yield (
            f"{key}: a response that moves has its keys and values computed anew, by the present "
            "weights, but engine.kv_on_update is keep; set that to recompute, or remove this"
        )


def _syncing(config: Config) -> Iterator[str]:
    every = config.schedule.sync_every
    if every == 1:
        return
    if config.placement.kind == "colocated" and config.engine.dtype == "same":
        yield (
            f"schedule.sync_every: {every}, but a colocated engine reads the trainer's own tensors "
            "and has each update at once; set placement.kind to disaggregated, or sync_every to 1"
        )
    if config.eval.every % every:
        yield (
            f"eval.every: {config.eval.every} measures between two weight transfers; use a "
            f"multiple of schedule.sync_every ({every})"
        )
