"""The naive implementation itself: against arithmetic done by hand and against differences."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
from naive import advantage, objective, preference, value

HERE = pathlib.Path(__file__).parent
HAND = json.loads((HERE / "by_hand.json").read_text(encoding="utf-8"))
FILES = ("policy.json", "correction.json", "kl.json", "preference.json", "value.json")
VECTORS = {name: json.loads((HERE / name).read_text(encoding="utf-8")) for name in FILES}


def solved(case: dict[str, Any]) -> dict[str, Any]:
    """What the naive implementation makes of one case worked out by hand."""
    config = case.get("config", {})
    match case["kind"]:
        case "loss" if config.get("policy") == "dpo":
            return preference.solve(case["batch"], config)
        case "loss":
            return objective.solve(case["batch"], config)
        case "value":
            return value.solve_value(case["batch"], config)
        case "group":
            return {"advantages": advantage.group_advantages(case["rewards"], **config)}
        case "normalize_batch":
            return {"advantages": advantage.normalized_batch(case["advantages"])}
        case "kl_in_advantage":
            columns = case["advantages"], case["behaviour"], case["reference"]
            return {"advantages": advantage.with_token_kl(*columns, *config.values())}
        case "kl_in_reward":
            columns = case["reward"], case["behaviour"], case["reference"]
            return {"reward": advantage.penalised(*columns, *config.values())}
        case "gae":
            rewards = value.token_rewards(case["trained"], case["reward"])
            out = value.gae(case["trained"], rewards, case["values"], **config)
            return {"advantages": out[0], "returns": out[1]}
        case "logprob":
            return value_of_logits(case["logits"], case["temperature"], case["token"])
    raise AssertionError(case["kind"])


def value_of_logits(logits: list[float], temperature: float, token: int) -> dict[str, float]:
    z = [x / temperature for x in logits]
    total = math.log(math.fsum(math.exp(x) for x in z))
    logprobs = [x - total for x in z]
    entropy = -math.fsum(math.exp(x) * x for x in logprobs)
    return {"logprob": logprobs[token], "entropy": entropy}


@pytest.mark.parametrize("case", HAND["cases"], ids=[case["name"] for case in HAND["cases"]])
def test_by_hand(case: dict[str, Any]) -> None:
    got = solved(case)
    for key, expected in case["expected"].items():
        assert got[key] == pytest.approx(expected, abs=HAND["tolerance"]), key


STEP = 2.0**-16  # nats; the third derivative's share of the error is STEP^2 / 6 of it


def differences(batch: dict[str, Any], config: dict[str, Any]) -> list[float]:
    """Central differences of the step's loss, with everything held still that should be."""
    full = objective.filled(config)
    held, weight = objective.constants(batch, full), objective.weights(batch, full)

    def loss(logprobs: list[float | None]) -> float:
        moved = {**batch, "logprob": logprobs}
        if full["policy"] == "dpo":
            per_token = preference.per_token_losses(moved, full)
        else:
            per_token = objective.per_token_losses(moved, full, held)
        return math.fsum(w * x for w, x in zip(weight, per_token, strict=True))

    out = [0.0] * len(weight)
    for u in objective.trained_tokens(batch):
        at = batch["logprob"]
        up, down = ([*at[:u], at[u] + sign * STEP, *at[u + 1 :]] for sign in (1, -1))
        out[u] = (loss(up) - loss(down)) / (2 * STEP)
    return out


NEAR = [
    (file, case)
    for file in FILES[:-1]
    for case in VECTORS[file]["cases"]
    if case["batch"] != "far" and case["name"] != "dpo-500.0"  # curved, or flat, beyond a step
]


@pytest.mark.parametrize("file", FILES[:-1])
def test_gradients_are_central_differences(file: str) -> None:
    """Error of the differences: 1e-16 / STEP = 1e-11 from rounding, STEP^2 = 2e-10 from curvature,
    both relative to the case's largest numbers (below 20)."""
    cases = [case for name, case in NEAR if name == file]
    assert cases
    for case in cases:
        batch = VECTORS[file]["batches"][case["batch"]]
        assert case["expected"]["gradient"] == pytest.approx(
            differences(batch, case["config"]), rel=1e-7, abs=1e-8
        ), case["name"]


@pytest.mark.parametrize("clip", [None, 0.25])
def test_value_gradients_are_central_differences(clip: float | None) -> None:
    grid = [-0.88, -0.41, -0.1, 0.05, 0.33, 0.7]  # none at a kink
    for v, old, target in ((v, o, t) for v in grid for o in grid for t in grid):
        up, down = (value.value_loss(v + s * STEP, old, target, clip)[0] for s in (1, -1))
        slope = value.value_loss(v, old, target, clip)[1]
        assert slope == pytest.approx((up - down) / (2 * STEP), abs=1e-9)


def test_gae_is_the_recursion() -> None:
    """A_t = delta_t + gamma lam A_(t + 1), by hand over three tokens."""
    advantages, returns = value.gae([True] * 3, [0.0, 0.5, 1.0], [0.5, -0.25, 1.5], 0.5, 0.5)
    last = 1.0 - 1.5
    middle = 0.5 + 0.5 * 1.5 + 0.25 + 0.25 * last
    first = 0.0 + 0.5 * -0.25 - 0.5 + 0.25 * middle
    assert advantages == [first, middle, last]
    assert returns == [first + 0.5, middle - 0.25, last + 1.5]


def test_one_return_is_the_sum_of_discounted_rewards() -> None:
    """With lam 1 the values cancel out of the returns, whatever they are."""
    rewards = value.token_rewards([True] * 3, 1.0, [-1.0] * 3, [-1.5, -0.5, -1.0], 0.5, "k1")
    assert rewards == [-0.25, 0.25, 1.0]
    _, returns = value.gae([True] * 3, rewards, [7.0, -3.0, 11.0], 0.5, 1.0)
    assert returns == pytest.approx([-0.25 + 0.5 * (0.25 + 0.5 * 1.0), 0.75, 1.0], abs=1e-12)
