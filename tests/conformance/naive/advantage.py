"""From the rewards of groups to advantages. ``None`` is the reward of an unscorable member."""

from __future__ import annotations

import math

from naive.objective import kl_term

FLOOR = 1e-6
"""Differences up to this share of the largest magnitude count as none."""


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def deviation(numbers: list[float]) -> float:
    """The sample standard deviation, divisor n - 1; 0 for a single number."""
    if len(numbers) < 2:
        return 0.0
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def has_spread(rewards: list[float]) -> bool:
    if len(rewards) < 2:
        return False
    return max(rewards) - min(rewards) > FLOOR * max(abs(r) for r in rewards)


def group_advantages(
    rewards: list[float | None], estimator: str, normalize_std: bool
) -> list[float]:
    """One group's advantages; 0 for unscorable members."""
    scored = [r for r in rewards if r is not None]
    out = []
    for member, reward in enumerate(rewards):
        if reward is None:
            out.append(0.0)
        elif estimator == "none":
            out.append(reward)
        elif not has_spread(scored):
            out.append(0.0)
        else:
            others = [r for k, r in enumerate(rewards) if r is not None and k != member]
            pool = scored if estimator == "group_mean" else others
            out.append(relative(reward, pool, scored, normalize_std))
    return out


def relative(reward: float, pool: list[float], scored: list[float], normalize_std: bool) -> float:
    """(reward - mean of the pool) / its standard deviation, where there is one to speak of."""
    difference = reward - mean(pool)
    if not normalize_std:
        return difference
    spread = deviation(pool)
    if spread > FLOOR * max(abs(r) for r in scored):
        difference /= spread
    bound = math.sqrt(len(scored))
    return max(-bound, min(bound, difference))


def penalised(
    reward: float, behaviour: list[float], reference: list[float], coefficient: float, kind: str
) -> float:
    """kl.where reward: the reward less the sum of the sequence's per-token estimates."""
    terms = [kl_term(m, ref, kind)[0] for m, ref in zip(behaviour, reference, strict=True)]
    return reward - coefficient * math.fsum(terms)


def with_token_kl(
    advantages: list[float], behaviour: list[float], reference: list[float], c: float, kind: str
) -> list[float]:
    """kl.where advantage: each token's advantage less its own estimate (distillation's signal)."""
    rows = zip(advantages, behaviour, reference, strict=True)
    return [a - c * kl_term(m, ref, kind)[0] for a, m, ref in rows]


def normalized_batch(advantages: list[float]) -> list[float]:
    """(A - mean) / standard deviation over all trained tokens of the step."""
    centre, spread = mean(advantages), deviation(advantages)
    if spread <= FLOOR * max(abs(a) for a in advantages):
        spread = 1.0
    return [(a - centre) / spread for a in advantages]
