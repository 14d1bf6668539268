"""Write the generated vectors: ``python tests/conformance/make_vectors.py``.

Every number that is given is a multiple of 1/64, so that it is the same number in float32. Nothing
is imported from lagzero; see README.md for the layout. by_hand.json is not written here.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from advantage_cases import gae_cases, group_cases, token_cases
from naive import objective, preference, value
from step_cases import step_cases, step_groups

HERE = pathlib.Path(__file__).parent
Case = dict[str, Any]

OBJECTIVES: dict[str, Case] = {
    "clip": {},
    "clip_higher": {"clip_low": 0.2, "clip_high": 0.3},
    "dual_clip": {"dual_clip": 2.5},
    "clip_product": {"ratio": "sequence_product"},
    "gspo": {"ratio": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04},
    "cispo": {"policy": "cispo", "clip_low": 1.0, "clip_high": 0.5},
    "cispo_low": {"policy": "cispo", "clip_low": 0.25, "clip_high": 0.5},
    "band": {"policy": "band", "clip_low": 0.3, "clip_high": 0.5},
    "band_sequence": {"policy": "band", "ratio": "sequence_mean", "clip_low": 0.1},
}
REDUCTIONS: dict[str, Case] = {
    "token_mean": {"reduction": "token_mean"},
    "sequence_mean": {"reduction": "sequence_mean"},
    "constant": {"reduction": "constant", "constant": 7.0},
}
ANCHORS = ("behaviour", "recomputed", "interpolated")
LEVELS = ("token", "sequence_product", "sequence_mean")
CORRECTIONS: dict[str, Case] = {
    "none": {},
    **{f"truncate_{level}": {"kind": "truncate", "level": level, "high": 1.5} for level in LEVELS},
    **{
        f"mask_{level}": {"kind": "mask", "level": level, "low": 0.6, "high": 1.6}
        for level in LEVELS
    },
    **{
        f"band_of_ones_{level}": {
            "kind": "mask",
            "level": level,
            "low": 0.6,
            "high": 1.6,
            "weigh": False,
        }
        for level in LEVELS
    },
    "max_token_lag": {"max_token_lag": 1},
    "truncate_and_lag": {"kind": "truncate", "high": 1.5, "max_token_lag": 1},
}


def sixty_fourths(numbers: list[int | None]) -> list[float | None]:
    return [None if n is None else n / 64 for n in numbers]


def main_batch() -> Case:
    """Four sequences of 3, 2, 4 and 1 trained tokens in two groups, and one that has none."""
    behaviour = [-70, -7, None, -154, -85, None, -141, -103, None, None, -192, -84, -109, -33, None]
    gap = [15, -30, None, 1, 70, None, -12, 6, None, None, -50, 25, 19, -22, None]
    update = [11, 20, None, -29, 26, None, -48, -2, None, None, -26, 60, 8, -32, None]
    distance = [-30, 6, None, 27, -8, None, 33, -29, None, None, 38, 10, -27, -40, None]
    trained = [b is not None for b in behaviour]

    def plus(column: list[int | None]) -> list[float | None]:
        return sixty_fourths(
            [
                None if b is None or c is None else b + c
                for b, c in zip(behaviour, column, strict=True)
            ]
        )

    return {
        "sequence": [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 4],
        "group": [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        "trained": trained,
        "trainer_version": 7,
        "version": [7 if t < 4 else 4 + t % 4 if on else -1 for t, on in enumerate(trained)],
        "logprob": plus(gap),
        "behaviour": sixty_fourths(behaviour),
        "proximal": plus(
            [None if g is None else g - (u or 0) for g, u in zip(gap, update, strict=True)]
        ),
        "reference": plus(distance),
        "entropy": sixty_fourths(
            [9, 80, None, 40, 12, None, 55, 23, None, None, 47, 120, 94, 3, None]
        ),
        "advantage": sixty_fourths(
            [96, 96, None, 96, -64, None, -64, -32, None, None, 48, -128, 64, -80, None]
        ),
    }


def far_batch() -> Case:
    """Log-ratios of hundreds of nats both ways, with either sign of the advantage."""
    gap = [700, -700, 25, -25, 700, -700, 25, -25]
    return {
        "sequence": [0, 1, 2, 3, 4, 5, 6, 7],
        "group": [0, 0, 0, 0, 1, 1, 1, 1],
        "trained": [True] * 8,
        "trainer_version": 3,
        "version": [1] * 8,
        "logprob": [-0.5 + min(g, 0) for g in gap],
        "behaviour": [-0.5 - max(g, 0) for g in gap],
        "proximal": [-0.5 + min(g, 0) / 2 - max(g, 0) / 2 for g in gap],
        "reference": [-0.5 - max(g, 0) / 2 for g in gap],
        "entropy": [0.0] * 8,
        "advantage": [1.0] * 4 + [-1.0] * 4,
    }


def pair_batch() -> Case:
    """Two pairs; the first group's chosen sequence is its second one."""
    main = main_batch()
    sign = {0: -1.0, 1: 1.0, 2: 1.0, 3: -1.0}
    keep = [t for t, s in enumerate(main["sequence"]) if s in sign]
    batch = {k: [v[t] for t in keep] if isinstance(v, list) else v for k, v in main.items()}
    batch["advantage"] = [
        sign[s] if on else None for s, on in zip(batch["sequence"], batch["trained"], strict=True)
    ]
    return batch


def value_batch() -> Case:
    """Values on either side of the clip, moved towards and away from their returns."""
    trained = [True, True, False, True, True, True, True, True, False, True]
    column = {
        "value": [32, 60, None, -20, 12, 64, 40, 0, None, 33],
        "old_value": [30, 20, None, 20, 50, 64, 8, 30, None, 33],
        "return": [64, 64, None, 64, 0, 48, 0, 64, None, -64],
    }
    return {
        "sequence": [0, 0, 0, 0, 1, 2, 2, 2, 2, 2],
        "trained": trained,
        **{name: sixty_fourths(numbers) for name, numbers in column.items()},
    }


def loss_case(name: str, batches: Case, batch: str, config: Case, **parts: Any) -> Case:
    solve = preference.solve if config.get("policy") == "dpo" else objective.solve
    return {
        "name": name, "batch": batch, "config": config, **parts,
        "expected": solve(batches[batch], config),
    }  # fmt: skip


def policy_vectors() -> Case:
    """Every objective x anchor x reduction, before and after the step's first update."""
    batches = {"main": main_batch(), "far": far_batch()}
    batches["first_pass"] = {**batches["main"], "proximal": None}
    cases = [
        loss_case(
            f"{name}-{anchor}-{reduction}", batches, "main", {**what, "proximal": anchor, **how}
        )
        for name, what in OBJECTIVES.items()
        for anchor in ANCHORS
        for reduction, how in REDUCTIONS.items()
    ]
    for name in ("reinforce", "cross_entropy"):
        for reduction, how in REDUCTIONS.items():
            config = {"policy": name, **how}
            cases.append(loss_case(f"{name}-{reduction}", batches, "main", config))
    for name, what in OBJECTIVES.items():
        config = {**what, "proximal": "recomputed"}
        cases.append(loss_case(f"{name}-first_pass", batches, "first_pass", config))
        for anchor in ANCHORS:
            config = {**what, "proximal": anchor}
            cases.append(loss_case(f"{name}-{anchor}-far", batches, "far", config))
    return {"defaults": objective.filled({}), "batches": batches, "cases": cases}


def correction_vectors() -> Case:
    """Every correction on every objective that takes it, with both anchors it multiplies."""
    batches = {"main": main_batch(), "far": far_batch()}
    batches["first_pass"] = {**batches["main"], "proximal": None}
    reductions = list(REDUCTIONS.values())
    cases: list[Case] = []
    for name in ("clip", "gspo", "cispo_low", "band", "reinforce"):
        what = OBJECTIVES.get(name, {"policy": name})
        for rule, correction in CORRECTIONS.items():
            multiplies = correction.get("kind") is not None and correction.get("weigh", True)
            for anchor in ANCHORS:
                if name == "reinforce" and anchor != "recomputed":
                    continue
                if anchor == "behaviour" and multiplies:
                    continue
                for batch in ("main", "first_pass") if anchor == "recomputed" else ("main",):
                    config = {**what, "correction": correction, **reductions[len(cases) % 3]}
                    if name != "reinforce":
                        config["proximal"] = anchor
                    title = f"{name}-{anchor}-{rule}-{batch}"
                    cases.append(loss_case(title, batches, batch, config))
    for rule, correction in CORRECTIONS.items():
        config = {"proximal": "recomputed", "correction": correction}
        cases.append(loss_case(f"clip-recomputed-{rule}-far", batches, "far", config))
    return {"defaults": objective.filled({}), "batches": batches, "cases": cases}


def kl_vectors() -> Case:
    """KL terms in the loss, alone and beside a policy term, a correction and an entropy term."""
    batches = {"main": main_batch(), "far": far_batch()}
    alone = {"policy": "cross_entropy"}
    cases: list[Case] = []
    for kind in ("k1", "k2", "k3"):
        kl = {"coefficient": 0.25, "estimator": kind}
        for reduction, how in REDUCTIONS.items():
            config = {"kl": kl, **how}
            cases.append(loss_case(f"clip-{kind}-{reduction}", batches, "main", config))
        config = {**alone, "kl": kl, "entropy_coefficient": 0.5}
        cases.append(loss_case(f"entropy-{kind}", batches, "main", config))
        truncate = {"correction": CORRECTIONS["truncate_token"], "proximal": "recomputed"}
        cases.append(loss_case(f"not_corrected-{kind}", batches, "main", {"kl": kl, **truncate}))
        cases.append(loss_case(f"clip-{kind}-far", batches, "far", {"kl": kl}))
    for coefficient in (0.5, -0.5):
        config = {"entropy_coefficient": coefficient}
        cases.append(loss_case(f"entropy-{coefficient}", batches, "main", config))
    return {"defaults": objective.filled({}), "batches": batches, "cases": cases}


def preference_vectors() -> Case:
    """Direct preferences, gentle and saturated."""
    batches = {"pairs": pair_batch()}
    cases = [
        loss_case(
            f"dpo-{beta}", batches, "pairs",
            {"policy": "dpo", "dpo_beta": beta, "reduction": "sequence_mean"},
        )
        for beta in (0.1, 1.0, 500.0)
    ]  # fmt: skip
    return {"defaults": objective.filled({}), "batches": batches, "cases": cases}


def value_vectors() -> Case:
    """A critic's loss, with and without its clip, under every reduction."""
    batches = {"values": value_batch()}
    cases: list[Case] = []
    for clip in (None, 0.2):
        for reduction, how in REDUCTIONS.items():
            config = {"value_clip": clip, **how}
            cases.append(
                {
                    "name": f"{'free' if clip is None else 'clipped'}-{reduction}",
                    "batch": "values",
                    "config": config,
                    "expected": value.solve_value(batches["values"], config),
                }
            )
    return {"batches": batches, "cases": cases}


def advantage_vectors() -> Case:
    """Of groups, of a step's tokens, and of a critic's values."""
    return {"cases": [*group_cases(), *token_cases(), *gae_cases()]}


def step_vectors() -> Case:
    """Whole steps, from rewards to the gradient."""
    return {"groups": step_groups(), "cases": step_cases()}


VECTORS = {
    "policy.json": policy_vectors,
    "correction.json": correction_vectors,
    "kl.json": kl_vectors,
    "preference.json": preference_vectors,
    "value.json": value_vectors,
    "advantage.json": advantage_vectors,
    "step.json": step_vectors,
}


def text_of(vectors: Case) -> str:
    """The file's text: one batch and one case a line, numbers with all their digits."""
    parts = [f'"defaults": {json.dumps(vectors["defaults"])}'] if "defaults" in vectors else []
    if "groups" in vectors:
        parts.append(f'"groups": {json.dumps(vectors["groups"])}')
    if "batches" in vectors:
        rows = ",\n".join(
            f"{json.dumps(k)}: {json.dumps(v)}" for k, v in vectors["batches"].items()
        )
        parts.append(f'"batches": {{\n{rows}\n}}')
    cases = ",\n".join(json.dumps(case) for case in vectors["cases"])
    return "{" + ",\n".join([*parts, f'"cases": [\n{cases}\n]']) + "}\n"


if __name__ == "__main__":
    for name, make in VECTORS.items():
        (HERE / name).write_text(text_of(make()), encoding="utf-8")
