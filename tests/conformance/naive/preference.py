"""Pairs of a chosen and a rejected sequence: the direct preference loss.

Per pair, with L and R a sequence's sums of policy and reference log-probs over trained tokens::

    x = beta ((L_chosen - R_chosen) - (L_rejected - R_rejected))
    loss = -log sigmoid(x) = log(1 + exp(-x))        d loss / d x = -sigmoid(-x)

The chosen one has advantage +1, the rejected one -1; every token of both repeats the pair's loss.
"""

from __future__ import annotations

import math
from typing import Any

from naive.objective import Batch, Config, filled, trained_tokens, weights


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def softplus(x: float) -> float:
    """log(1 + exp(x)), for any x."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def margin(batch: Batch, config: Config, pair: int) -> float:
    """x of one pair: the chosen one's advantage is +1 and the rejected one's -1."""
    total = 0.0
    for t in trained_tokens(batch):
        if batch["group"][t] == pair:
            total += batch["advantage"][t] * (batch["logprob"][t] - batch["reference"][t])
    return config["dpo_beta"] * total


def per_token_losses(batch: Batch, config: Config) -> list[float]:
    out = [0.0] * len(batch["trained"])
    for t in trained_tokens(batch):
        out[t] = softplus(-margin(batch, config, batch["group"][t]))
    return out


def solve(batch: Batch, config: Config) -> dict[str, Any]:
    """Per-token loss, step loss and gradient; 0 where a token is not trained."""
    config = filled(config)
    per_token, weight = per_token_losses(batch, config), weights(batch, config)
    gradient = [0.0] * len(per_token)
    for u in trained_tokens(batch):
        pair = batch["group"][u]
        slope = -sigmoid(-margin(batch, config, pair))
        repeats = math.fsum(weight[t] for t in trained_tokens(batch) if batch["group"][t] == pair)
        gradient[u] = repeats * slope * config["dpo_beta"] * batch["advantage"][u]
    return {
        "per_token": per_token,
        "weight": weight,
        "loss": math.fsum(w * x for w, x in zip(weight, per_token, strict=True)),
        "gradient": gradient,
    }
