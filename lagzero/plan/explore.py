"""Fault exploration: the real loop under the virtual clock with random times, faults and orders.

    python -m lagzero.plan.explore --schedules 20000 --seed 0
    python -m lagzero.plan.explore --schedules 1000000 --workers 2
    python -m lagzero.plan.explore --replay 4711            one schedule, with its events

A schedule is a pure function of its number: configuration, stage times, one fault or none, groups
that are lost, a moment to stop or cancel, and the order of ready callbacks. After the run ends,
however it ended, a second run resumes from the last saved progress without faults and must finish
the work.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Literal

from lagzero.errors import LagzeroError
from lagzero.plan.clock import Deadlock, run_virtual
from lagzero.plan.faults import FAULTS, RAISING, Fault, InjectedFault, Setup, World
from lagzero.plan.ledger import Event, Ledger, Saved
from lagzero.schedule.staleness import Action, Clock, Contract


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one schedule came to. ``events`` is its whole history, for comparison of replays."""

    number: int
    setup: Setup
    ending: str  # finished, stopped, cancelled, failed, stuck, refused
    violations: tuple[str, ...]
    events: tuple[Event, ...]


def draw_setup(number: int) -> Setup:
    """Draw the configuration and the fault of schedule ``number``."""
    rng = random.Random(number)
    kind = rng.choice((*FAULTS, "none", "none"))
    moment = rng.choice((None, None, None, "stop", "cancel"))
    return Setup(
        seed=number,
        steps=rng.randint(1, 5),
        groups_per_step=rng.choice((1, 1, 2, 2, 3, 4)),
        group_size=rng.randint(1, 3),
        max_lag=rng.randint(0, 3),
        window=rng.choice((1, 1, 2, 3, 8, None)),
        extra_groups=rng.choice((0, 0, 0, 1, 4)),
        surplus=rng.choice(_SURPLUS),
        sync_every=rng.choice((1, 1, 1, 2, 3)),
        contract=Contract(
            rng.choice(_ACTIONS),
            rng.choice((None, 0, 1, 2)),
            rng.choice(_CLOCKS),
            rng.randint(0, 2),
        ),
        num_prompts=rng.choice((None, rng.randint(0, 16))),
        turns=rng.random() < 0.3,
        empty_share=rng.choice((0.0, 0.0, 0.3)),
        lost_share=rng.choice((0.0, 0.0, 0.1)),
        fault=Fault(kind, rng.randint(0, 12)),
        moment=moment,
        moment_s=rng.uniform(0, 40) if moment else 0.0,
        permute=rng.random() < 0.7,
        flat_share=rng.choice((0.0, 0.3, 0.3, 1.0)),
        resampled_groups=rng.choice((0, 1, 2, 5)),
    )


_SURPLUS: tuple[Literal["carry", "drop"], ...] = ("carry", "carry", "drop")
_ACTIONS: tuple[Action, ...] = ("wait", "wait", "drop", "recycle", "interrupt", "accept")
_CLOCKS: tuple[Clock, ...] = ("oldest_token", "oldest_token", "newest_token", "start")


def run_schedule(number: int) -> Outcome:
    """Run schedule ``number`` and, afterwards, its resumption; check what must hold of both."""
    setup = draw_setup(number)
    world = World(setup, Saved())
    ending, violations = _run(world, _order(setup, 0))
    violations += world.ledger.violations()
    if ending == "finished":
        violations += _complete(setup, world.ledger)
    resumed = World(setup.without_fault(), world.ledger.saved)
    again, wrong = _run(resumed, _order(setup, 1))
    wrong += resumed.ledger.violations()
    if again != "refused":
        wrong += _complete(setup, resumed.ledger)
    violations += [f"resumed: {each}" for each in wrong]
    events = (*world.ledger.events, *resumed.ledger.events)
    return Outcome(number, setup, ending, tuple(violations), events)


def _order(setup: Setup, part: int) -> random.Random | None:
    return random.Random(f"{setup.seed} {part}") if setup.permute else None


def _run(world: World, order: random.Random | None) -> tuple[str, list[str]]:
    """Run with the world's fault. Return how it ended, and what was wrong with that."""
    kind = world.setup.fault.kind
    try:
        return run_virtual(world.run(), order), []
    except InjectedFault as error:
        return "failed", [] if kind.endswith(RAISING) else [
            f"raised {error!r} without such a fault"
        ]
    except Deadlock as stuck:
        names = [name for name, _ in stuck.tasks]
        if not world.hanging:
            return "stuck", [f"deadlock: {stuck}"]
        missing = [name for name in world.hanging if name not in names]
        return "stuck", [f"the deadlock does not name {name}" for name in missing]
    except LagzeroError as error:
        return "refused", [] if world.setup.may_refuse else [f"refused to go on: {error}"]
    except Exception as error:  # whatever it is, it was not put in
        return "failed", [f"raised {error!r}"]


def _complete(setup: Setup, ledger: Ledger) -> list[str]:
    """List what a run that ended by itself should have done and has not."""
    step = ledger.saved.progress.step
    if setup.num_prompts is None:
        return [] if step == setup.steps else [f"ended at step {step} of {setup.steps}"]
    if step == setup.steps or ledger.is_over(setup.num_prompts):
        return []
    return [f"ended at step {step} of {setup.steps} with prompts left"]


def explore(first: int, count: int) -> list[Outcome]:
    """Run schedules [first, first + count); return those that violate something."""
    bad: list[Outcome] = []
    for number in range(first, first + count):
        outcome = run_schedule(number)
        if outcome.violations:
            bad.append(outcome)
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore and report; the exit code is 1 if anything was violated."""
    parser = argparse.ArgumentParser(prog="python -m lagzero.plan.explore", allow_abbrev=False)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="show one schedule")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return _replay(options.replay)
    began = time.perf_counter()
    size = 500
    starts = range(options.seed, options.seed + options.schedules, size)
    counts = [min(size, options.seed + options.schedules - start) for start in starts]
    if options.workers > 1:
        with ProcessPoolExecutor(options.workers) as pool:
            parts = list(pool.map(explore, starts, counts))
    else:
        parts = [explore(start, count) for start, count in zip(starts, counts, strict=True)]
    bad = [outcome for part in parts for outcome in part]
    spent = time.perf_counter() - began
    for outcome in bad[:10]:
        print(f"schedule {outcome.number}: {'; '.join(outcome.violations)}")
    print(
        f"{options.schedules:,} schedules from {options.seed}, {len(bad)} with violations, "
        f"{spent:.1f} s, {options.schedules / spent:,.0f} a second"
    )
    return 1 if bad else 0


def _replay(number: int) -> int:
    outcome = run_schedule(number)
    print(outcome.setup)
    for at_s, what, numbers in outcome.events:
        print(f"{at_s:.6f} {what} {' '.join(map(str, numbers))}")
    print(f"{outcome.ending}; {len(outcome.violations)} violations")
    print("\n".join(outcome.violations))
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
