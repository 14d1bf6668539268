"""The losses and advantages against vectors that a naive program wrote (float64)."""

import json
import math
import pathlib
import runpy
from typing import Any

import numpy as np
import pytest
import torch

from lagzero.config import KLConfig, LossConfig
from lagzero.losses.inputs import LossInputs
from lagzero.losses.objective import make_loss
from lagzero.losses.reduce import reduce
from lagzero.prepare.advantage import group_advantages
from lagzero.prepare.weights import token_weights

HERE = pathlib.Path(__file__).parent
POLICY = json.loads((HERE / "policy.json").read_text())
ADVANTAGE = json.loads((HERE / "advantage.json").read_text())


def name_of(case: dict[str, Any]) -> str:
    dual = "dual" if case["dual_clip"] else "plain"
    return f"{dual}-{case['ratio']}-{case['reduction']}-{case['kl']}"


@pytest.mark.parametrize("case", POLICY["cases"], ids=name_of)
def test_loss_scalar_and_gradient_match(case: dict[str, Any]) -> None:
    """LN1, LN2, LN11, LN14, LP10: per-token loss, step loss and gradient to 1e-9."""
    given = {k: torch.tensor(v, dtype=torch.float64) for k, v in POLICY["inputs"].items()}
    sequences = given["sequences"].long()
    kl = KLConfig()
    if case["kl"] is not None:
        kl = KLConfig(coefficient=POLICY["kl_coefficient"], estimator=case["kl"])
    config = LossConfig(
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["dual_clip"],
        ratio=case["ratio"],
        entropy_coefficient=case["entropy_coefficient"],
        kl=kl,
    )
    inputs = LossInputs(
        given["behaviour"], given["reference"], given["advantages"], sequences * 0, sequences, 3
    )
    lengths = np.bincount(sequences.numpy())
    weights = torch.tensor(token_weights(lengths, case["reduction"], POLICY["constant"]))
    logprobs = given["logprobs"].requires_grad_()
    loss, _ = make_loss(config)(logprobs, given["entropies"], inputs)
    scalar = reduce(loss, weights[sequences])
    scalar.backward()
    assert loss.tolist() == pytest.approx(case["loss"], rel=1e-9, abs=1e-12)
    assert scalar.item() == pytest.approx(case["scalar"], rel=1e-9, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(case["gradient"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("case", ADVANTAGE["cases"])
def test_advantages_match(case: dict[str, Any]) -> None:
    """LN5, LN7"""
    rewards = np.array([math.nan if r is None else r for r in case["rewards"]])
    got = group_advantages(rewards, case["estimator"], case["normalize_std"])
    assert got.tolist() == pytest.approx(case["advantages"], rel=1e-9, abs=1e-12)


def test_the_vectors_reach_every_branch_of_the_clip() -> None:
    """A vector set without clipped and dual-clipped tokens would prove little."""
    by_name = {name_of(c): c for c in POLICY["cases"]}
    plain = by_name["plain-token-token_mean-None"]
    zero = [g == 0 for g in plain["gradient"]]
    dual = [g == 0 for g in by_name["dual-token-token_mean-None"]["gradient"]]
    assert 0 < sum(zero) < len(zero)
    assert any(d and not z for d, z in zip(dual, zero, strict=True))


def test_the_committed_vectors_are_what_the_script_writes() -> None:
    script = runpy.run_path(str(HERE / "make_vectors.py"))
    for name, make in script["VECTORS"].items():
        fresh, kept = make(), json.loads((HERE / name).read_text())
        assert len(fresh["cases"]) == len(kept["cases"])
        for a, b in zip(fresh["cases"], kept["cases"], strict=True):
            assert a.keys() == b.keys()
            for key, value in a.items():
                # libm's exp may differ in its last place between platforms
                numeric = isinstance(value, float) or (value and key in ("loss", "gradient"))
                assert b[key] == (pytest.approx(value, rel=1e-12, abs=1e-14) if numeric else value)
