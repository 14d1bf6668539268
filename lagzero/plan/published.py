"""The simulator against published figures: one row fitted, the others predicted.

    python -m lagzero.plan.published

Sources: verl, docs/advance/fully_async.md and recipe/fully_async_policy/shell (tables and flags);
Sheng et al. 2025, Laminar (p99 = 10 x median); Zhou et al. 2025, APRIL; Piche et al. 2025,
PipelineRL; Fu et al. 2025, AReaL.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lagzero.plan.scenario import Scenario, with_keys
from lagzero.plan.simulate import Result, simulate

SIGMA = math.log(10) / 2.3263  # of a log-normal whose 99th percentile is 10 x its median


@dataclass(frozen=True, slots=True)
class Row:
    """A published row: seconds that 512 prompts took, and the settings that it names."""

    name: str
    published_s: float
    devices: int
    staleness: float | None = None  # None: colocated, synchronous
    require_batches: int = 4  # mini-batches of 32 prompts that the trainer takes at once


FITTED = Row("async 64:64, staleness 0.5, 4 batches", 150.63, 128, 0.5)
UPDATE_S, WAIT_S = 113.16, 33.14  # of the fitted row: training, and the trainer's wait
HELD_OUT = (
    Row("colocated 32", 790.10, 32),
    Row("colocated 64", 365.28, 64),
    Row("colocated 128", 356.30, 128),
    Row("async 16:16, staleness 0.5", 294.77, 32, 0.5),
    Row("async 32:32, staleness 0.5", 189.26, 64, 0.5),
    Row("async 64:64, staleness 0", 231.34, 128, 0.0),
    Row("async 64:64, staleness 0.1", 171.30, 128, 0.1),
    Row("async 64:64, staleness 0.3", 146.11, 128, 0.3),
    Row("async 64:64, 1 batch at once", 203.47, 128, 0.5, 1),
    Row("async 64:64, 2 batches at once", 158.72, 128, 0.5, 2),
    Row("async 64:64, 4 batches, run again", 124.64, 128, 0.5, 4),
)

PROMPTS, GROUP, MINI = 512, 16, 32  # of one row; rollouts of a prompt; prompts of a mini-batch
DEVICES_AN_ENGINE = 4  # tensor-parallel size of the published script
# H20: 4.0e12 B/s, 148e12 FLOP/s and 96e9 B a device, of which 0.8 hold weights and KV cache
ENGINE = {
    "bandwidth_bytes_per_s": 4.0e12 * DEVICES_AN_ENGINE,
    "peak_flop_per_s": 148e12 * DEVICES_AN_ENGINE,
    "kv_tokens": (0.8 * 96e9 * DEVICES_AN_ENGINE - 15.2e9) // 57344,
    "max_running": 1024,
    "prefill_tok_per_s": 0.5 * 148e12 * DEVICES_AN_ENGINE / (2 * 7.6e9),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """What one row gave: lengths, and seconds of training for a token on one device."""

    median: float
    train_device_s: float
    sync_s: float
    mean: float  # tokens of a response

    @property
    def flop_share(self) -> float:
        """Share of the peak that training must have reached: 6 FLOP a parameter and token."""
        return 6 * 7.6e9 / (self.train_device_s * 148e12)


def of(**keys: Any) -> Scenario:
    """Make a scenario of keys."""
    return with_keys(Scenario(), [(name, str(value)) for name, value in keys.items()])


def scenario(row: Row, fit: Fit, cycles: int, overhead_s: float) -> Scenario:
    """State a published row as a scenario of ``cycles`` weight transfers."""
    lengths = f"lognormal:median={fit.median:.6g},sigma={SIGMA:.6g},min=16,max=28672"
    common: dict[str, Any] = {
        **ENGINE,
        "lengths": lengths,
        "group_size": GROUP,
        "overhead_s": overhead_s,
    }
    common |= {"sync_s": fit.sync_s, "prompt_tokens": 200}
    if row.staleness is None:
        # old_log_prob is one more forward pass: 2 of the 6 FLOP of training
        train = fit.train_device_s * (1 + 1 / 3) / row.devices
        engines = row.devices // DEVICES_AN_ENGINE
        return of(
            **common,
            steps=cycles,
            groups_per_step=PROMPTS,
            engines=engines,
            train_token_s=train,
            placement="colocated",
        )
    half = row.devices // 2
    sync_every = PROMPTS // (MINI * row.require_batches)
    return of(
        **common,
        steps=cycles * sync_every,
        sync_every=sync_every,
        groups_per_step=MINI * row.require_batches,
        engines=half // DEVICES_AN_ENGINE,
        train_token_s=fit.train_device_s / half,
        window="none",
        extra_groups=round(row.staleness * PROMPTS),
        sync_pauses="true",
    )


def cycle_s(result: Result, warm: int) -> float:
    """Return the seconds between two transfers once ``warm`` of them are over."""
    every = result.scenario.sync_every
    first, last = result.steps[warm * every - 1], result.steps[-1]
    return (last.at_s - first.at_s) * every / (last.step - first.step)


def fit_row(cycles: int, warm: int, overhead_s: float) -> Fit:
    """Find the median with which the fitted row takes its published time.

    Training and transfer are as published: the rate is such that training takes UPDATE_S.
    """
    sync_s = FITTED.published_s - UPDATE_S - WAIT_S

    def try_median(log_median: float) -> tuple[Fit, float]:
        median = math.exp(log_median)
        spec = of(lengths=f"lognormal:median={median:.6g},sigma={SIGMA:.6g},min=16,max=28672")
        drawn = spec.lengths.draws(0).part(0, 40_000)
        mean = sum(drawn) / len(drawn)
        rate = UPDATE_S * (FITTED.devices // 2) / (PROMPTS * GROUP * mean)
        fit = Fit(median, rate, sync_s, mean)
        return fit, cycle_s(simulate(scenario(FITTED, fit, cycles, overhead_s)), warm)

    low, high = math.log(700), math.log(3500)
    seconds = try_median(low)[1], try_median(high)[1]
    for _ in range(3):  # straight lines through the last two
        slope = (high - low) / (seconds[1] - seconds[0])
        low, high = high, high + slope * (FITTED.published_s - seconds[1])
        fit, last = try_median(high)
        seconds = seconds[1], last
        if abs(last / FITTED.published_s - 1) < 0.005:
            return fit
    return try_median(high)[0]


def verl(say: Callable[[str], None], cycles: int, warm: int, overhead_s: float = 4e-3) -> None:
    """Print the fit and every held-out row with its error."""
    fit = fit_row(cycles, warm, overhead_s)
    say("verl, fully asynchronous trainer: seconds for 512 prompts of 16 responses")
    say(f"  fitted: responses of median {fit.median:,.0f}, mean {fit.mean:,.0f} tokens;")
    say(f"  training at {100 * fit.flop_share:.0f} % of a device's peak; sync {fit.sync_s:.1f} s")
    say(f"  {'row':36}{'published':>10}{'simulated':>10}{'error':>9}{'lag':>6}")
    for row in (FITTED, *HELD_OUT):
        result = simulate(scenario(row, fit, cycles, overhead_s))
        seconds = cycle_s(result, warm)
        error = seconds / row.published_s - 1
        mark = "  fitted" if row is FITTED else f"{100 * error:+7.0f} %"
        lag = result.lag_mean / result.scenario.sync_every
        say(f"  {row.name:36}{row.published_s:10.0f}{seconds:10.0f}{mark:>9}{lag:6.2f}")


# --- ordering and mechanism -------------------------------------------------------------------

DEVICES = 32
TRAIN_DEVICE_S = 6 * 7.6e9 / (0.4 * 989e12)  # a token, at 40 % of the peak of 989e12 FLOP/s


def reasoning(engines: int, trainers: int, steps: int, **keys: Any) -> Scenario:
    """256 prompts of 16 responses a step, tails as Laminar reports them, at most 27,648 tokens."""
    lengths = f"lognormal:median=2000,sigma={SIGMA:.6g},min=16,max=27648"
    plain: dict[str, Any] = {
        "groups_per_step": 256,
        "group_size": 16,
        "engines": engines,
        "max_running": 256,
    }
    plain |= {"lengths": lengths, "train_token_s": TRAIN_DEVICE_S / trainers, "sync_s": 1}
    plain |= {"overhead_s": 4e-3, "steps": steps}
    return of(**(plain | keys))


def mechanisms(say: Callable[[str], None], steps: int) -> None:
    """Print what each published mechanism gains over synchronous, colocated training."""
    both: dict[str, Any] = {
        "engines": DEVICES,
        "trainers": DEVICES,
        "placement": "colocated",
        "steps": steps,
    }
    split: dict[str, Any] = {"engines": DEVICES // 2, "trainers": DEVICES // 2, "steps": steps}
    free: dict[str, Any] = {"window": "none"}
    cases: Sequence[tuple[str, str, Scenario]] = (
        ("synchronous, colocated", "1", reasoning(**both)),
        ("swap of two halves", "", reasoning(**_halves(steps))),
        ("APRIL: 2 x as many started", "1.22-1.44", reasoning(**both, **free, extra_groups=256)),
        ("one step ahead, halves", "", reasoning(**split, max_lag=1)),
        ("PipelineRL: in flight, halves", "about 2", reasoning(**split, **free, max_lag=4)),
        ("AReaL: 8 steps ahead, halves", "2.77", reasoning(**split, **free, max_lag=8)),
    )
    lengths = cases[0][2].lengths.draws(0).part(0, 50_000)
    ordered = sorted(lengths)
    ratio = ordered[49_500] / ordered[25_000]
    say(f"\nThroughput against synchronous, {DEVICES} devices, p99 = {ratio:.1f} x median")
    say(f"  {'':30}{'published':>11}{'simulated':>11}{'in use':>9}{'lag':>6}{'token lag':>11}")
    base = 0.0
    for name, published, case in cases:
        result = simulate(case)
        base = base or result.tok_per_s
        say(
            f"  {name:30}{published:>11}{result.tok_per_s / base:11.2f}"
            f"{100 * result.slot_use:7.0f} %{result.lag_mean:6.2f}{result.lag_token_mean:11.2f}"
        )


def _halves(steps: int) -> dict[str, Any]:
    return {
        "engines": DEVICES,
        "trainers": DEVICES // 2,
        "steps": steps,
        "placement": "swap",
        "max_lag": 1,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(prog="python -m lagzero.plan.published", allow_abbrev=False)
    parser.add_argument("--cycles", type=int, default=4, help="weight transfers of each row")
    parser.add_argument("--warm", type=int, default=2, help="of these, not measured")
    parser.add_argument("--steps", type=int, default=8, help="of each mechanism")
    options = parser.parse_args(arguments)
    verl(print, options.cycles, options.warm)
    mechanisms(print, options.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
