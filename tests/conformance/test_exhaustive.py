"""Every combination that the configuration allows, against the naive implementation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import lagzero_side as side
import make_vectors
import pytest
import torch
from naive import objective

from lagzero.config import Config, LossConfig
from lagzero.config_check import check

LATER = make_vectors.main_batch()
BATCHES = ({**LATER, "proximal": None}, LATER)  # the first update on a batch, and a later one
EXACT = {"rel": 1e-12, "abs": 1e-14}

POLICIES: dict[str, dict[str, Any]] = {
    "clip": {"policy": "clip"},
    "dual_clip": {"policy": "clip", "clip_high": 0.3, "dual_clip": 2.5},
    "cispo": {"policy": "cispo", "clip_low": 0.5, "clip_high": 0.5},
    "band": {"policy": "band", "clip_low": 0.3, "clip_high": 0.5},
    "reinforce": {"policy": "reinforce"},
    "cross_entropy": {"policy": "cross_entropy"},
}
LEVELS = ("token", "sequence_product", "sequence_mean")
ANCHORS = ("behaviour", "recomputed", "interpolated")
KINDS: list[dict[str, Any]] = [
    {},
    {"kind": "truncate", "high": 1.5},
    {"kind": "mask", "low": 0.6, "high": 1.6},
    {"kind": "mask", "low": 0.6, "high": 1.6, "weigh": False},
]
REDUCTIONS = list(make_vectors.REDUCTIONS.values())
KLS: list[dict[str, Any]] = [
    {},
    *({"coefficient": 0.25, "estimator": kind} for kind in ("k1", "k2", "k3")),
]

# 20 corrections, of which a ratio against the behaviour takes the 8 that do not multiply
NUM_ALLOWED = {"with a ratio": 3 * (8 + 20 + 20), "reinforce": 20, "cross_entropy": 1}


def corrections() -> Iterator[dict[str, Any]]:
    for kind, level, lag in itertools.product(KINDS, LEVELS, (None, 1)):
        if kind or level == "token":
            yield {**kind, **({"level": level} if kind else {}), "max_token_lag": lag}


def objectives(policy: str) -> Iterator[dict[str, Any]]:
    """The policy with every ratio and anchor; those without a ratio only once."""
    what = POLICIES[policy]
    if what["policy"] in ("reinforce", "cross_entropy"):
        yield what
        return
    for level, anchor in itertools.product(LEVELS, ANCHORS):
        yield {**what, "ratio": level, "proximal": anchor}


def allowed(config: dict[str, Any]) -> bool:
    """Whether a run may be configured so."""
    base: dict[str, Any] = {
        "data": {"train": [{"kind": "arithmetic"}], "eval": [{"kind": "arithmetic", "seed": 1}]},
        "score": {"rewards": [{"use": "number"}]},
    }
    loss = LossConfig.model_validate(config)
    return not any(p.startswith("loss.") for p in check(Config(**base, loss=loss)))


def agree(config: dict[str, Any], batch: dict[str, Any]) -> None:
    expected = objective.solve(batch, config)
    got = side.solve(batch, config, torch.float64)
    assert got.per_token == pytest.approx(expected["per_token"], **EXACT), config
    assert got.loss == pytest.approx(expected["loss"], **EXACT), config
    assert got.gradient == pytest.approx(expected["gradient"], **EXACT), config


@pytest.mark.parametrize("policy", POLICIES)
def test_every_objective_with_every_correction(policy: str) -> None:
    """KL terms and reductions take turns here, since both act on what is compared from outside:
    the one is added and the other multiplies. They meet each other and every objective below."""
    turn = itertools.cycle(itertools.product(KLS, REDUCTIONS))
    chosen = list(itertools.product(objectives(policy), corrections()))
    compared = [c for c in chosen if allowed({**c[0], "correction": c[1]})]
    assert len(compared) == NUM_ALLOWED.get(policy, NUM_ALLOWED["with a ratio"])
    for what, correction in compared:
        for batch in BATCHES:
            kl, reduction = next(turn)
            agree({**what, "correction": correction, "kl": kl, **reduction}, batch)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_objective_with_every_kl_term_and_reduction(policy: str) -> None:
    for what, kl, reduction in itertools.product(objectives(policy), KLS, REDUCTIONS):
        agree({**what, "kl": kl, **reduction}, LATER)
