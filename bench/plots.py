"""The plots of docs/asynchrony.md, made by the simulator.

python bench/plots.py                 write docs/img/*.png (needs matplotlib)
python bench/plots.py --numbers       print what they show, as tables, without matplotlib
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lagzero.plan.scenario import Scenario, with_keys
from lagzero.plan.simulate import Result, simulate

IMAGES = Path(__file__).parent.parent / "docs" / "img"
KS = (0, 1, 2, 3, 4, 6, 8)
TAILS = {
    "p99 = 2 x median": "lognormal:median=1500,sigma=0.3,min=64,max=16384",
    "p99 = 8 x median": "lognormal:median=1500,sigma=0.9,min=64,max=16384",
    "p99 = 16 x median": "lognormal:median=1500,sigma=1.2,min=64,max=32768",
}
WINDOWS = ("1", "32", "none")
BOUNDS = (0, 1, 2, 3, 4)
COLOURS = ("#3b6fb6", "#d1793b", "#4d9a63", "#8a63b0", "#b0b0b0", "#c2504f")


def run(**keys: Any) -> Result:
    """Simulate the default scenario with some keys changed."""
    return simulate(with_keys(Scenario(), [(name, str(value)) for name, value in keys.items()]))


# --- numbers ----------------------------------------------------------------------------------


def by_k() -> dict[str, list[Result]]:
    """Return the runs of each tail, one a value of k."""
    return {name: [run(lengths=lengths, max_lag=k) for k in KS] for name, lengths in TAILS.items()}


def by_window() -> dict[str, Result]:
    """Return a run of each window, two steps ahead."""
    return {window: run(max_lag=2, window=window, steps=60) for window in WINDOWS}


def by_bound() -> dict[str, list[Result]]:
    """Return runs of each action, one a bound, where first-finished hand-over makes groups old."""
    keys: dict[str, Any] = {"max_lag": 4, "window": "none", "steps": 40}
    return {
        action: [run(**keys, action=action, bound=bound) for bound in BOUNDS]
        for action in ("drop", "recycle", "interrupt")
    }


def everything() -> Result:
    """Return the same run where everything is trained."""
    return run(max_lag=4, window="none", steps=40)


def placements() -> dict[str, Result]:
    """Return runs on 8 devices; a token takes 24e-5 s of training on one of them."""
    token = 24e-5
    both: dict[str, Any] = {"engines": 8, "train_token_s": token / 8, "placement": "colocated"}
    split: dict[str, Any] = {"engines": 4, "train_token_s": token / 4}
    return {
        "colocated\nk = 0": run(**both),
        "colocated\nk = 1": run(**both, max_lag=1),
        "colocated\nk = 4": run(**both, max_lag=4),
        "swap\n4 + 4": run(engines=8, train_token_s=token / 4, placement="swap", max_lag=1),
        "apart 4 + 4\nk = 0": run(**split),
        "apart 4 + 4\nk = 1": run(**split, max_lag=1),
        "apart 4 + 4\nk = 4": run(**split, max_lag=4),
    }


def print_numbers(what: str) -> None:
    """Print what a plot shows."""
    {
        "k": _print_k,
        "window": _print_windows,
        "bound": _print_bounds,
        "placement": _print_placements,
    }[what]()


def _print_k() -> None:
    print(f"{'':36}" + "".join(f"{f'k={k}':>8}" for k in KS))
    for name, results in by_k().items():
        base = results[0].time_s
        rows = {
            "slots in use": [f"{100 * r.slot_use:.0f} %" for r in results],
            "trainer in use": [f"{100 * r.trainer_use:.0f} %" for r in results],
            "time": [f"{r.time_s / base:.2f}" for r in results],
        }
        for title, cells in rows.items():
            print(f"{name:20}{title:16}" + "".join(f"{cell:>8}" for cell in cells))


def _print_windows() -> None:
    for window, result in by_window().items():
        total = sum(result.lag_groups.values())
        shares = [f"{lag}: {100 * n / total:.1f} %" for lag, n in result.lag_groups.items()]
        print(f"window {window:5} lag {', '.join(shares)}")


def _print_bounds() -> None:
    print("action     bound  mean length  given up  written for nothing     time")
    for action, results in by_bound().items():
        for bound, r in zip(BOUNDS, results, strict=True):
            gone = sum(r.num_given_up.values()) / r.num_started
            print(
                f"{action:10} {bound:5}  {r.length_mean:11.0f}  {100 * gone:6.1f} %"
                f"  {100 * r.lost_share:17.1f} %  {r.time_s:5.0f} s"
            )
    r = everything()
    nothing = "     0.0 %                0.0 %"
    print(f"{'accept':10}   any  {r.length_mean:11.0f}{nothing}  {r.time_s:5.0f} s")


def _print_placements() -> None:
    print("8 devices, 20 steps        time  slots in use  trainer in use  lag of rollouts")
    for name, r in placements().items():
        title = name.replace("\n", ", ")
        shares = f"{100 * r.slot_use:10.0f} %  {100 * r.trainer_use:12.0f} %"
        print(f"{title:23} {r.time_s:5.0f} s  {shares}  {r.lag_mean:15.2f}")


# --- plots ------------------------------------------------------------------------------------


def draw_all() -> None:
    """Write the four images."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    IMAGES.mkdir(parents=True, exist_ok=True)
    _draw_k()
    _draw_windows()
    _draw_bounds()
    _draw_placements()


def _figure(columns: int, width: float = 9.0, height: float = 3.6) -> Any:
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def _save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / name, dpi=110)
    print(IMAGES / name)


def _draw_k() -> None:
    figure, (use, time) = _figure(2)
    lines = zip(by_k().items(), COLOURS, ("o-", "s-", "^--"), strict=False)
    for (name, results), colour, style in lines:
        use.plot(KS, [100 * r.slot_use for r in results], style, color=colour, label=name)
        time.plot(KS, [r.time_s / results[0].time_s for r in results], style, color=colour)
    use.set(xlabel="k, steps ahead", ylabel="generation slots in use, %", ylim=(0, 104))
    time.set(xlabel="k, steps ahead", ylabel="time of 20 steps, against k = 0", ylim=(0, 1.05))
    use.legend(frameon=False)
    _save(figure, "lag_and_time.png")


def _draw_windows() -> None:
    figure, axes = _figure(len(WINDOWS), height=3.0)
    for axis, (window, result), colour in zip(axes, by_window().items(), COLOURS, strict=False):
        total = sum(result.lag_groups.values())
        lags = list(result.lag_groups)
        axis.bar(lags, [100 * n / total for n in result.lag_groups.values()], color=colour)
        name = {"1": "1: start order", "none": "none: first finished"}.get(window, window)
        axis.set(title=f"window {name}", xlabel="lag, versions", ylim=(0, 100), xlim=(-0.6, 8.6))
        axis.set_xticks(range(9))
    axes[0].set_ylabel("share of trained groups, %")
    _save(figure, "lag_by_window.png")


def _draw_bounds() -> None:
    figure, (length, lost) = _figure(2)
    data = everything().length_mean
    for (action, results), colour in zip(by_bound().items(), COLOURS, strict=False):
        length.plot(BOUNDS, [r.length_mean for r in results], "o-", color=colour, label=action)
        lost.plot(BOUNDS, [100 * r.lost_share for r in results], "o-", color=colour)
    length.axhline(data, color=COLOURS[4], linestyle="--", label="all are trained")
    length.set(xlabel="bound, versions", ylabel="mean length trained, tokens", ylim=(1500, 2300))
    lost.set(xlabel="bound, versions", ylabel="tokens written for nothing, %", ylim=(0, None))
    for axis in (length, lost):
        axis.set_xticks(BOUNDS)
    length.legend(frameon=False, loc="lower right")
    _save(figure, "dropping_and_length.png")


def _draw_placements() -> None:
    figure, (slots, time) = _figure(2, height=4.3)
    results = placements()
    names = list(results)
    parts = (
        ("in use", [r.slot_use for r in results.values()]),
        ("tail", [r.slot_idle["tail"] for r in results.values()]),
        ("waiting for weights", [r.slot_idle["weights"] for r in results.values()]),
        ("the trainer's turn", [r.slot_idle["turn"] for r in results.values()]),
        ("sync, queued elsewhere", [_rest(r) for r in results.values()]),
    )
    below = [0.0] * len(names)
    for (name, shares), colour in zip(parts, COLOURS, strict=False):
        slots.barh(names, [100 * s for s in shares], left=below, color=colour, label=name)
        below = [b + 100 * s for b, s in zip(below, shares, strict=True)]
    slots.invert_yaxis()
    slots.set(xlabel="time of the generation slots, %", xlim=(0, 100))
    slots.tick_params(axis="y", pad=6)
    figure.legend(frameon=False, ncols=5, loc="outside upper center", fontsize=9)
    time.barh(names, [r.time_s for r in results.values()], color=COLOURS[0])
    time.invert_yaxis()
    time.set(xlabel="seconds of 20 steps on 8 devices")
    time.tick_params(labelleft=False)
    time.set_xlim(0, 1.15 * max(r.time_s for r in results.values()))
    for at, r in enumerate(results.values()):
        time.text(r.time_s, at, f"  {r.time_s:,.0f}", va="center", fontsize=9)
    _save(figure, "placements.png")


def _rest(result: Result) -> float:
    idle = result.slot_idle
    return idle["sync"] + idle["routing"] + idle["reward"] + idle["data"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shown = ("k", "window", "bound", "placement")
    parser.add_argument("--numbers", choices=shown, help="print a table instead")
    options = parser.parse_args()
    if options.numbers is None:
        draw_all()
    else:
        print_numbers(options.numbers)


if __name__ == "__main__":
    main()
