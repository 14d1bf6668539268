"""Losses of log-probs: per token, for the step, and their gradients, derived by hand.

A batch is a dict of lists with one entry a token, trained or not; what stands in the entries of
tokens that are not trained is never read. Notation, per trained token t of sequence i::

    l policy   m behaviour   p proximal (None: the policy itself, held still)   A advantage
    a anchor of the ratio    x = l - a    r = exp(min(ell, 20))   w correction weight

Everything that the gradient does not flow through is computed first (``constants``) and then held
still, which is what lets central differences check the gradient.
"""

from __future__ import annotations

import math
from typing import Any

Batch = dict[str, Any]
Config = dict[str, Any]

BOUND = 20.0  # nats: exponents are cut off above it

DEFAULTS: Config = {
    "policy": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "ratio": "token",
    "proximal": "behaviour",
    "correction": {},
    "kl": {},
    "entropy_coefficient": 0.0,
    "dpo_beta": 0.1,
    "reduction": "token_mean",
    "constant": None,
}
CORRECTION: Config = {
    "kind": "none",
    "level": "token",
    "low": 0.0,
    "high": 2.0,
    "weigh": True,
    "max_token_lag": None,
}
KL: Config = {"coefficient": 0.0, "estimator": "k3"}


def filled(config: Config) -> Config:
    """The configuration with what a case leaves out."""
    full = {**DEFAULTS, **config}
    full["correction"] = {**CORRECTION, **full["correction"]}
    full["kl"] = {**KL, **full["kl"]}
    return full


def trained_tokens(batch: Batch) -> list[int]:
    return [t for t, on in enumerate(batch["trained"]) if on]


def reach(batch: Batch, level: str, t: int) -> dict[int, float]:
    """What token t's log-ratio is made of: {token: share}.

    A log-ratio is sum over u of share_u x_u, so share_u is its derivative by l_u too.
    """
    if level == "token":
        return {t: 1.0}
    mates = [u for u in trained_tokens(batch) if batch["sequence"][u] == batch["sequence"][t]]
    share = 1.0 if level == "sequence_product" else 1.0 / len(mates)
    return dict.fromkeys(mates, share)


def at_level(batch: Batch, level: str, x: list[float], t: int) -> float:
    return math.fsum(x[u] * share for u, share in reach(batch, level, t).items())


def weights(batch: Batch, config: Config) -> list[float]:
    """What each token counts in the step's loss; 0 where it is not trained."""
    on = trained_tokens(batch)
    lengths: dict[int, int] = {}
    for t in on:
        i = batch["sequence"][t]
        lengths[i] = lengths.get(i, 0) + 1
    out = [0.0] * len(batch["trained"])
    for t in on:
        if config["reduction"] == "token_mean":
            out[t] = 1.0 / len(on)
        elif config["reduction"] == "sequence_mean":
            out[t] = 1.0 / (len(lengths) * lengths[batch["sequence"][t]])
        else:
            out[t] = 1.0 / (len(lengths) * config["constant"])
    return out


def lag(batch: Batch, t: int) -> int:
    return batch["trainer_version"] - batch["version"][t]


def anchors(batch: Batch, config: Config) -> list[float]:
    """What the ratio is taken against; 0 where a token is not trained."""
    out = [0.0] * len(batch["trained"])
    for t in trained_tokens(batch):
        behaviour, now = batch["behaviour"][t], batch["logprob"][t]
        if config["proximal"] == "behaviour":
            out[t] = behaviour
        elif config["proximal"] == "recomputed":
            out[t] = proximal(batch, t)
        else:  # interpolated: the older the token, the nearer the present policy
            alpha = 0.0 if lag(batch, t) <= 0 else 1.0 / lag(batch, t)
            out[t] = alpha * behaviour + (1.0 - alpha) * now
    return out


def proximal(batch: Batch, t: int) -> float:
    return batch["logprob"][t] if batch.get("proximal") is None else batch["proximal"][t]


def corrections(batch: Batch, config: Config, anchor: list[float]) -> list[float]:
    """The correction weight of each token; 0 where it is not trained."""
    rule = config["correction"]
    gaps = [0.0] * len(batch["trained"])
    for t in trained_tokens(batch):
        decoupled = config["proximal"] == "interpolated" and config["policy"] != "reinforce"
        above = anchor[t] if decoupled else proximal(batch, t)
        gaps[t] = above - batch["behaviour"][t]
    out = [0.0] * len(batch["trained"])
    for t in trained_tokens(batch):
        w = math.exp(min(at_level(batch, rule["level"], gaps, t), BOUND))
        if rule["kind"] == "none":
            out[t] = 1.0
        elif rule["kind"] == "truncate":
            out[t] = min(w, rule["high"])
        elif rule["low"] <= w <= rule["high"]:
            out[t] = w if rule["weigh"] else 1.0
        if rule["max_token_lag"] is not None and lag(batch, t) > rule["max_token_lag"]:
            out[t] = 0.0
    return out


def constants(batch: Batch, config: Config) -> dict[str, list[float]]:
    """What the gradient does not flow through: anchors, corrections, and cispo's factors."""
    anchor = anchors(batch, config)
    factor = [0.0] * len(anchor)
    for t in trained_tokens(batch):
        r = ratio(batch, config, anchor, t)[0]
        factor[t] = min(max(r, 1.0 - config["clip_low"]), 1.0 + config["clip_high"])
    return {"anchor": anchor, "correction": corrections(batch, config, anchor), "factor": factor}


def ratio(batch: Batch, config: Config, anchor: list[float], t: int) -> tuple[float, float]:
    """(r, d r / d ell) of one token."""
    x = [0.0] * len(anchor)
    for u in trained_tokens(batch):
        x[u] = batch["logprob"][u] - anchor[u]
    ell = at_level(batch, config["ratio"], x, t)
    return (math.exp(ell), math.exp(ell)) if ell <= BOUND else (math.exp(BOUND), 0.0)


def surrogate(r: float, advantage: float, config: Config) -> tuple[float, bool]:
    """(loss, whether it moves with r) of clip or band; where it moves, its slope is -A."""
    low, high = 1.0 - config["clip_low"], 1.0 + config["clip_high"]
    if config["policy"] == "band":
        inside = low <= r <= high
        return (-r * advantage if inside else 0.0), inside
    clipped = min(max(r, low), high)
    loss, moves = -r * advantage, True
    if clipped * advantage < r * advantage:
        loss, moves = -clipped * advantage, False
    dual = config["dual_clip"]
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, moves = -dual * advantage, False
    return loss, moves


def kl_term(logprob: float, reference: float, estimator: str) -> tuple[float, float]:
    """(k, d k / d logprob) of one token, with d = reference - logprob."""
    d = reference - logprob
    if estimator == "k1":
        return -d, 1.0
    if estimator == "k2":
        return d * d / 2.0, -d
    if d > BOUND:
        return math.exp(BOUND) - 1.0 - BOUND, 0.0
    return math.expm1(d) - d, -math.expm1(d)


def policy_loss(batch: Batch, config: Config, held: dict[str, list[float]], t: int) -> float:
    """The policy's term of one token, before its correction weight."""
    advantage, logprob = batch["advantage"][t], batch["logprob"][t]
    if config["policy"] in ("reinforce", "cross_entropy"):
        return -advantage * logprob
    if config["policy"] == "cispo":
        return -held["factor"][t] * advantage * logprob
    return surrogate(ratio(batch, config, held["anchor"], t)[0], advantage, config)[0]


def policy_slopes(
    batch: Batch, config: Config, held: dict[str, list[float]], t: int
) -> dict[int, float]:
    """d policy_loss_t / d l_u for every u that it depends on."""
    advantage = batch["advantage"][t]
    if config["policy"] in ("reinforce", "cross_entropy"):
        return {t: -advantage}
    if config["policy"] == "cispo":
        return {t: -held["factor"][t] * advantage}
    r, slope = ratio(batch, config, held["anchor"], t)
    moves = surrogate(r, advantage, config)[1]
    by_ell = -advantage * slope if moves else 0.0
    return {u: by_ell * share for u, share in reach(batch, config["ratio"], t).items()}


def per_token_losses(batch: Batch, config: Config, held: dict[str, list[float]]) -> list[float]:
    out = [0.0] * len(batch["trained"])
    for t in trained_tokens(batch):
        out[t] = held["correction"][t] * policy_loss(batch, config, held, t)
        if config["kl"]["coefficient"] > 0:
            k, _ = kl_term(batch["logprob"][t], batch["reference"][t], config["kl"]["estimator"])
            out[t] += config["kl"]["coefficient"] * k
        if config["entropy_coefficient"] != 0:
            out[t] -= config["entropy_coefficient"] * batch["entropy"][t]
    return out


def gradient(batch: Batch, config: Config, held: dict[str, list[float]]) -> list[float]:
    """d step loss / d l_u = sum over t of weight_t * d loss_t / d l_u."""
    weight = weights(batch, config)
    out = [0.0] * len(batch["trained"])
    for t in trained_tokens(batch):
        for u, slope in policy_slopes(batch, config, held, t).items():
            out[u] += weight[t] * held["correction"][t] * slope
        if config["kl"]["coefficient"] > 0:
            _, slope = kl_term(
                batch["logprob"][t], batch["reference"][t], config["kl"]["estimator"]
            )
            out[t] += weight[t] * config["kl"]["coefficient"] * slope
    return out


def solve(batch: Batch, config: Config) -> dict[str, Any]:
    """All that a case states; every list has one entry a token, 0 where it is not trained."""
    config = filled(config)
    held = constants(batch, config)
    per_token, weight = per_token_losses(batch, config, held), weights(batch, config)
    ratios = [0.0] * len(weight)
    for t in trained_tokens(batch):
        ratios[t] = ratio(batch, config, held["anchor"], t)[0]
    return {
        "ratio": ratios,
        "correction": held["correction"],
        "per_token": per_token,
        "weight": weight,
        "loss": math.fsum(w * x for w, x in zip(weight, per_token, strict=True)),
        "gradient": gradient(batch, config, held),
    }
