"""What a critic adds: its loss, and the advantages and returns that its values give."""

from __future__ import annotations

import math
from typing import Any

from naive.objective import Batch, Config, filled, kl_term, trained_tokens, weights


def value_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """(loss, d loss / d value): 0.5 max((V - G)^2, (V_old + clamp(V - V_old, -c, c) - G)^2)."""
    plain = 0.5 * (value - target) ** 2
    if clip is None:
        return plain, value - target
    near = min(max(value, old - clip), old + clip)
    clipped = 0.5 * (near - target) ** 2
    if plain >= clipped:
        return plain, value - target
    return clipped, 0.0  # beyond the clip, or both losses would be the same


def solve_value(batch: Batch, config: Config) -> dict[str, Any]:
    """Per-token value loss, the step's, and its gradient by value."""
    weight = weights(batch, filled({k: v for k, v in config.items() if k != "value_clip"}))
    per_token, gradient = [0.0] * len(weight), [0.0] * len(weight)
    for t in trained_tokens(batch):
        per_token[t], slope = value_loss(
            batch["value"][t], batch["old_value"][t], batch["return"][t], config["value_clip"]
        )
        gradient[t] = weight[t] * slope
    return {
        "per_token": per_token,
        "weight": weight,
        "loss": math.fsum(w * x for w, x in zip(weight, per_token, strict=True)),
        "gradient": gradient,
    }


def gae(
    trained: list[bool], rewards: list[float], values: list[Any], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one sequence, over its trained tokens as if the others were not.

    delta_t = r_t + gamma V_next - V_t with V after the last token 0, summed forward (the recursion
    written out): A_t = sum over k >= 0 of (gamma lam)^k delta_(t + k); the return is A + V.
    """
    on = [t for t, flag in enumerate(trained) if flag]
    deltas = []
    for place, t in enumerate(on):
        following = values[on[place + 1]] if place + 1 < len(on) else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    advantages, returns = [0.0] * len(trained), [0.0] * len(trained)
    for place, t in enumerate(on):
        terms = [(gamma * lam) ** k * delta for k, delta in enumerate(deltas[place:])]
        advantages[t] = math.fsum(terms)
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def token_rewards(
    trained: list[bool],
    reward: float,
    behaviour: list[Any] | None = None,
    reference: list[Any] | None = None,
    coefficient: float = 0.0,
    estimator: str = "k1",
) -> list[float]:
    """The reward at the last trained token, less each token's penalty."""
    out = [0.0] * len(trained)
    on = [t for t, flag in enumerate(trained) if flag]
    if coefficient > 0 and behaviour is not None and reference is not None:
        for t in on:
            out[t] -= coefficient * kl_term(behaviour[t], reference[t], estimator)[0]
    out[on[-1]] += reward
    return out
