"""Write the conformance vectors: naive loops, the standard library, gradients derived by hand.

Run ``python tests/conformance/make_vectors.py`` to write the JSON files beside this script. It
imports nothing of lagzero, so a mistake there cannot repeat itself here.

Per trained token t of sequence i, with L_i trained tokens and S sequences::

    x_t    = logprob_t - behaviour_t
    ell_t  = x_t | sum of x over i | that sum / L_i        (token | sequence_product | _mean)
    rho_t  = exp(ell_t)
    loss_t = policy_t + kl_coefficient * k_t - entropy_coefficient * H_t

The policy's gradient: d policy_t / d ell_t = -rho_t A_t where neither clip is in force, else 0; and
d ell_t / d logprob_u = [t = u] | [same sequence] | [same sequence] / L_i.
"""

from __future__ import annotations

import json
import math
import pathlib
import random
from typing import Any

HERE = pathlib.Path(__file__).parent
RATIOS = ("token", "sequence_product", "sequence_mean")
REDUCTIONS = ("token_mean", "sequence_mean", "constant")
KLS = (None, "k1", "k2", "k3")
CLIPS = (
    {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 2.0},
)
CONSTANT = 7.0
KL_COEFFICIENT = 0.25
ENTROPY_COEFFICIENT = 0.5


def make_inputs() -> dict[str, Any]:
    """Three interleaved sequences of 2, 3 and 5 tokens with gaps on both sides of every clip."""
    rng = random.Random(20240229)
    sequences = [0, 1, 2, 2, 1, 0, 2, 1, 2, 2]
    behaviour = [-0.05 - 3.0 * rng.random() for _ in sequences]
    gaps = [0.1, -0.5, 0.02, 1.2, -0.3, 0.05, -0.9, 0.4, 0.3, -1.0]
    return {
        "sequences": sequences,
        "behaviour": behaviour,
        "logprobs": [b + g for b, g in zip(behaviour, gaps, strict=True)],
        "reference": [b + rng.uniform(-0.8, 0.8) for b in behaviour],
        "entropies": [rng.uniform(0.1, 2.0) for _ in sequences],
        "advantages": [1.5, -1.0, -0.5, -2.0, 0.75, 1.5, 0.5, -1.0, 1.0, 0.0],
    }


def weight(sequence: int, inputs: dict[str, Any], reduction: str) -> float:
    """The weight of one trained token of a sequence."""
    lengths: dict[int, int] = {}
    for s in inputs["sequences"]:
        lengths[s] = lengths.get(s, 0) + 1
    if reduction == "token_mean":
        return 1.0 / sum(lengths.values())
    if reduction == "sequence_mean":
        return 1.0 / (len(lengths) * lengths[sequence])
    return 1.0 / (len(lengths) * CONSTANT)


def policy_term(rho: float, advantage: float, clip: dict[str, Any]) -> tuple[float, float]:
    """(loss, d loss / d ell) of one token."""
    clipped = min(max(rho, 1.0 - clip["clip_low"]), 1.0 + clip["clip_high"])
    if rho * advantage <= clipped * advantage:
        loss, slope = -rho * advantage, -rho * advantage
    else:
        loss, slope = -clipped * advantage, 0.0
    dual = clip["dual_clip"]
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, slope = -dual * advantage, 0.0
    return loss, slope


def kl_term(logprob: float, reference: float, kind: str | None) -> tuple[float, float]:
    """(k, d k / d logprob) of one token."""
    if kind is None:
        return 0.0, 0.0
    d = reference - logprob
    if kind == "k1":
        return -d, 1.0
    if kind == "k2":
        return d * d / 2.0, -d
    return math.exp(d) - 1.0 - d, 1.0 - math.exp(d)


def solve(
    inputs: dict[str, Any], ratio: str, reduction: str, kl: str | None, clip: dict[str, Any]
) -> dict[str, Any]:
    """Loss [N], scalar and gradient [N] by log-prob of one choice."""
    n = len(inputs["sequences"])
    gaps = [inputs["logprobs"][t] - inputs["behaviour"][t] for t in range(n)]
    entropy_coefficient = ENTROPY_COEFFICIENT if clip["dual_clip"] is not None else 0.0
    losses, scalar, gradient = [], 0.0, [0.0] * n
    for t in range(n):
        mates = [u for u in range(n) if inputs["sequences"][u] == inputs["sequences"][t]]
        if ratio == "token":
            reach = {t: 1.0}
        elif ratio == "sequence_product":
            reach = dict.fromkeys(mates, 1.0)
        else:
            reach = {u: 1.0 / len(mates) for u in mates}
        rho = math.exp(math.fsum(gaps[u] * share for u, share in reach.items()))
        policy, slope = policy_term(rho, inputs["advantages"][t], clip)
        k, k_slope = kl_term(inputs["logprobs"][t], inputs["reference"][t], kl)
        loss = policy + KL_COEFFICIENT * k - entropy_coefficient * inputs["entropies"][t]
        w = weight(inputs["sequences"][t], inputs, reduction)
        losses.append(loss)
        scalar += w * loss
        gradient[t] += w * KL_COEFFICIENT * k_slope
        for u, share in reach.items():
            gradient[u] += w * slope * share
    return {
        "ratio": ratio,
        "reduction": reduction,
        "kl": kl,
        **clip,
        "entropy_coefficient": entropy_coefficient,
        "loss": losses,
        "scalar": scalar,
        "gradient": gradient,
    }


def policy_vectors() -> dict[str, Any]:
    """Every clip x reduction x ratio x KL estimator on one set of inputs."""
    inputs = make_inputs()
    cases = [
        solve(inputs, ratio, reduction, kl, clip)
        for clip in CLIPS
        for ratio in RATIOS
        for reduction in REDUCTIONS
        for kl in KLS
    ]
    return {
        "constant": CONSTANT,
        "kl_coefficient": KL_COEFFICIENT,
        "inputs": inputs,
        "cases": cases,
    }


def advantage_vectors() -> dict[str, Any]:
    """Advantages of a few groups; null is an unscorable member."""
    groups: list[list[float | None]] = [
        [1.0, 0.0, 0.0, 1.0],
        [0.25, 0.5, None, 1.0, -0.5],
        [3.0, -1.0],
        [None, 2.0, None],
        [0.5, 0.5, 0.5],
        [0.1, 0.4, 0.9, 1.6, 2.5, 3.6],
    ]
    cases: list[dict[str, Any]] = []
    for rewards in groups:
        scored = [r for r in rewards if r is not None]
        flat = len(scored) < 2 or max(scored) == min(scored)
        for estimator in ("group_mean", "leave_one_out"):
            for normalize in (False, True):
                out: list[float] = []
                for member, reward in enumerate(rewards):
                    if reward is None or flat:
                        out.append(0.0)
                        continue
                    pool = [
                        r
                        for other, r in enumerate(rewards)
                        if r is not None and (estimator == "group_mean" or other != member)
                    ]
                    mean = math.fsum(pool) / len(pool)
                    value = reward - mean
                    squares = math.fsum((r - mean) ** 2 for r in pool)
                    if normalize and squares > 0:
                        value /= math.sqrt(squares / (len(pool) - 1))
                    bound = math.sqrt(len(scored)) if normalize else math.inf
                    out.append(max(-bound, min(bound, value)))
                cases.append(
                    {
                        "rewards": rewards,
                        "estimator": estimator,
                        "normalize_std": normalize,
                        "advantages": out,
                    }
                )
    return {"cases": cases}


VECTORS = {"policy.json": policy_vectors, "advantage.json": advantage_vectors}


def text_of(vectors: dict[str, Any]) -> str:
    """The file's text: one case a line, numbers with all their digits."""
    shared = {k: v for k, v in vectors.items() if k != "cases"}
    lines = ",\n".join(json.dumps(case) for case in vectors["cases"])
    return json.dumps({**shared, "cases": []})[: -len("]}")] + "\n" + lines + "\n]}\n"


if __name__ == "__main__":
    for name, make in VECTORS.items():
        (HERE / name).write_text(text_of(make()))
