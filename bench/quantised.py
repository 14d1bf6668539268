"""What an engine of fewer bits costs in time and in mismatch, as a Markdown table.

    python bench/quantised.py   float32 against int16 products, int8 and fp8 weights, in one process

Each engine samples the same chat prompts at temperature 1, in turn; seconds are medians over the
repeats. The trainer scores what was sampled as it is and, with ``alike``, as the engine computes:
by train.rounded_weights, or model.products: int16. d = log p (trainer) - log p (sampler) of each
sampled token, and KL is the mean of e^d - 1 - d.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import exact
import numpy as np

KINDS = ("int8", "fp8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=exact.DTYPES)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.set_defaults(decoder="torch")  # of exact.rollout; here each engine has its own
    options = parser.parse_args()
    from lagzero.native.decoder import make_native
    from lagzero.numerics.allocator import keep_freed_memory
    from lagzero.numerics.quiet import quiet_libraries
    from lagzero.train.quantised import quantised_copy

    keep_freed_memory()
    quiet_libraries()
    policy = exact.load(options, options.dtype)
    engines = {kind: quantised_copy(policy, kind, None) for kind in KINDS}
    copy = policy.cast_copy(policy.dtype)
    engines = {"same": policy, "same (torch)": copy, "int16": of_integers(copy), **engines}
    decoders = dict.fromkeys(engines, "torch")
    for name, engine in engines.items():
        if not name.endswith("(torch)") and make_native(engine) is None:
            decoders[name] = "C"
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    samples: dict[str, list[Any]] = {}
    for _ in range(options.repeats):
        for name, engine in engines.items():
            samples[name], spent = exact.rollout(engine, options)
            seconds[name].append(spent)
    print("| weights | decoded in | rollout | trainer | mean gap | largest gap | KL | tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sampled in samples.items():
        start = f"| {name} | {decoders[name]} | {statistics.median(seconds[name]):.1f} s |"
        print(start, cells("as it is", gaps_of(policy, sampled)), flush=True)
        if name in KINDS or name == "int16":
            print(start, cells("alike", gaps_of(alike(policy, name), sampled)), flush=True)


def cells(trainer: str, gaps: np.ndarray) -> str:
    """Return the rest of a row, about one trainer."""
    size, kl = np.abs(gaps), float((np.expm1(gaps) - gaps).mean())
    return f"{trainer} | {size.mean():.2g} | {size.max():.2g} | {kl:.1g} | {len(gaps)} |"


def of_integers(policy: Any) -> Any:
    """Return a policy with model.products: int16, of the same module."""
    return dataclasses.replace(policy, products="int16", native=None)


def alike(policy: Any, kind: Any) -> Any:
    """Return a copy that computes as a trainer does that rounds as its engine does."""
    from lagzero.train.exactness import make_exact
    from lagzero.train.quantised import compute_with_rounded

    trainer = policy.cast_copy(policy.dtype)
    if kind == "int16":
        return make_exact(of_integers(trainer))
    compute_with_rounded(trainer, kind)
    return trainer


def gaps_of(trainer: Any, samples: list[Any]) -> np.ndarray:
    """Return d of every sampled token."""
    return exact.step(trainer, samples, backward=False)[0]


if __name__ == "__main__":
    main()
