"""The conditions: how the sampler is distorted, and what the trainer does about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Distortion:
    """How the sampler differs from the trainer.

    weight_bits: matrices are rounded to so many bits, a scale for each row, as a quantised sampler
    does. logit_bits: logits keep so many significant bits (8: bfloat16). heat: logits are divided
    by it, as by a temperature that the trainer does not know of.
    """

    weight_bits: int | None = None
    logit_bits: int | None = None
    heat: float = 1.0


UNDISTORTED = Distortion()


# Beside the objective of base.yaml, which takes the trainer's own log-probs for the old ones.
CORRECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("uncorrected", ()),
    "behaviour": ("ratio against what sampled", ("--loss.proximal=behaviour",)),
    "tis": (
        "TIS, at most 2",
        ("--loss.correction.kind=truncate", "--loss.correction.high=2"),
    ),
    "mis": (
        "masked IS, at most 2",
        ("--loss.correction.kind=mask", "--loss.correction.high=2"),
    ),
    "icepop": (
        "IcePop, 0.5 to 5",
        (
            "--loss.correction.kind=mask",
            "--loss.correction.low=0.5",
            "--loss.correction.high=5",
        ),
    ),
}


@dataclass(frozen=True)
class Condition:
    """One line of the figure: a distortion, and keys of the configuration."""

    name: str
    label: str
    distortion: Distortion = UNDISTORTED
    keys: tuple[str, ...] = ()
    panel: str = "all"
    colour: str = "exact"  # a name in plot.COLOURS


# panel -> its title
PANELS = {
    "stale": "eight versions old",
    "slow": "eight versions old, half the learning rate",
    "cold": "sampler at temperature 0.6, trainer at 1",
    "int3": "sampler's weights rounded to 3 bits",
}
SAMPLERS = {
    "stale": (UNDISTORTED, ("--schedule.max_lag=8",)),
    "slow": (UNDISTORTED, ("--schedule.max_lag=8", "--train.optimizer.lr=1e-3")),
    "cold": (Distortion(heat=0.6), ()),
    "int3": (Distortion(weight_bits=3), ()),
}
TRIED = {
    "stale": tuple(CORRECTIONS),
    "slow": ("none", "behaviour", "tis", "icepop"),
    "cold": tuple(CORRECTIONS),
    "int3": ("none", "tis", "icepop"),
}
# Samplers that differ and are left alone: label, distortion.
MILD = {
    "hot-none": ("sampler at temperature 1.5", Distortion(heat=1.5)),
    "int4-none": ("weights of 4 bits", Distortion(weight_bits=4)),
    "int8-none": ("weights of 8 bits", Distortion(weight_bits=8)),
    "bf16-none": ("logits in bfloat16", Distortion(logit_bits=8)),
}


def _all() -> Iterator[Condition]:
    """Yield the exact run, each sampler with each correction, and the mild ones."""
    yield Condition("exact", "sampler = trainer")
    yield Condition(
        "slow-exact",
        "sampler = trainer",
        keys=("--train.optimizer.lr=1e-3",),
        panel="slow",
    )
    for panel, (distortion, keys) in SAMPLERS.items():
        for name in TRIED[panel]:
            label, own = CORRECTIONS[name]
            yield Condition(f"{panel}-{name}", label, distortion, keys + own, panel, name)
    for name, (label, distortion) in MILD.items():
        yield Condition(name, label, distortion, panel="mild")


CONDITIONS = tuple(_all())
