"""Speed of the simulator: a million rollouts on 1,024 modelled devices, and the bare clock.

    python bench/simulate.py                 once with k = 1 and strict start order
    python bench/simulate.py --max-lag 4 --window none --steps 4

The loop, the schedule and the router are the real ones; engines, trainer, weights and scoring are
models. One core. Times are of this process alone (CPU) and of the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time

from lagzero.plan.clock import VirtualLoop, run_virtual
from lagzero.plan.scenario import Scenario, with_keys
from lagzero.plan.simulate import simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-lag", default="1")
    parser.add_argument("--window", default="1")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--groups-per-step", type=int, default=4096)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--max-running", type=int, default=64)
    options = parser.parse_args()
    print(f"clock: {clock_per_s():,.0f} callbacks a second of CPU")
    keys = [(name, str(value)) for name, value in vars(options).items()]
    # 1,024 devices train: 6 FLOP a parameter and token at 40 % of 989e12 FLOP/s
    keys += [
        ("train_token_s", str(6 * 7.6e9 / (0.4 * 989e12 * 1024))),
        ("score", "exponential:mean=2"),
    ]
    began, cpu = time.perf_counter(), time.process_time()
    result = simulate(with_keys(Scenario(), keys))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    rollouts = result.num_trained * options.group_size
    started = result.num_started * options.group_size
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{rollouts:,} rollouts trained ({started:,} started) in {len(result.steps)} steps on "
        f"{options.engines:,} engines of {options.max_running} slots, k = {options.max_lag}, "
        f"window {options.window}"
    )
    print(f"  {wall:.1f} s of wall clock, {cpu:.1f} s of CPU, {peak_mb:.0f} MB at the peak")
    print(
        f"  {1e6 * cpu / started:.1f} us of CPU a rollout; {result.num_callbacks:,} callbacks; "
        f"{result.tokens / cpu:,.0f} trained tokens a second of CPU"
    )
    print(
        f"  simulated: {result.time_s:,.0f} s, {100 * result.slot_use:.1f} % of slots in use, "
        f"lag mean {result.lag_mean:.2f} max {result.lag_max}"
    )


def clock_per_s(number: int = 300_000) -> float:
    """Fifty chains of callbacks that each set a timer."""
    loop = VirtualLoop()
    left = number

    def again() -> None:
        nonlocal left
        left -= 1
        if left > 0:
            loop.call_later(left % 3, again)

    async def start() -> None:
        for _ in range(50):
            loop.call_soon(again)
        while left > 0:
            await asyncio.sleep(1)

    began = time.process_time()
    run_virtual(start(), loop=loop)
    return loop.num_callbacks / (time.process_time() - began)


if __name__ == "__main__":
    main()
