"""One whole step: groups of judged rollouts in, advantages, weights, loss and gradient out.

A group is a list of members; a member is a dict of ``reward`` (None: unscorable), ``truncated`` and
lists with one entry a token: ``trained``, ``behaviour``, ``reference``, ``value``, ``logprob``.
"""

from __future__ import annotations

import math
from typing import Any

from naive import advantage, objective, preference, value

Member = dict[str, Any]

ADVANTAGE: dict[str, Any] = {
    "estimator": "group_mean",
    "normalize_std": True,
    "normalize_batch": False,
    "gamma": 1.0,
    "lam": 1.0,
    "zero_spread": "drop",
    "truncated": "keep",
    "short_group": "keep",
}


def trained_places(member: Member) -> list[int]:
    return [t for t, on in enumerate(member["trained"]) if on]


def penalties(member: Member, kl: dict[str, Any]) -> list[float]:
    """Each token's own estimate, before the coefficient; 0 where it is not trained."""
    out = [0.0] * len(member["trained"])
    for t in trained_places(member):
        k, _ = objective.kl_term(member["behaviour"][t], member["reference"][t], kl["estimator"])
        out[t] = k
    return out


def rewards_of(group: list[Member], how: dict[str, Any], kl: dict[str, Any]) -> list[float | None]:
    """What the group's statistics are of; None: not usable (no score, or nothing was sampled)."""
    out: list[float | None] = []
    for member in group:
        reward = member["reward"] if trained_places(member) else None
        if reward is not None and kl["where"] == "reward" and how["estimator"] != "gae":
            reward -= kl["coefficient"] * math.fsum(penalties(member, kl))
        out.append(reward)
    return out


def judged(
    group: list[Member], how: dict[str, Any], kl: dict[str, Any], pairs: bool
) -> list[float | None]:
    """Each member's advantage; None: it is not trained."""
    rewards = rewards_of(group, how, kl)
    scored = [r for r in rewards if r is not None]
    may = [
        r is not None and not (how["truncated"] == "mask" and m["truncated"])
        for r, m in zip(rewards, group, strict=True)
    ]
    if len(scored) < len(group) and how["short_group"] == "drop":
        return [None] * len(group)
    if pairs:
        return paired([r if ok else None for r, ok in zip(rewards, may, strict=True)])
    if how["estimator"] in ("none", "gae"):
        flat, advantages = False, [0.0 if r is None else r for r in rewards]
    else:
        flat = not advantage.has_spread(scored)
        advantages = advantage.group_advantages(rewards, how["estimator"], how["normalize_std"])
    if flat and how["zero_spread"] == "drop":
        return [None] * len(group)
    return [a if ok else None for a, ok in zip(advantages, may, strict=True)]


def paired(rewards: list[float | None]) -> list[float | None]:
    """+1 for the best, -1 for the worst, the first of those that are equal; the rest is out."""
    scored = [r for r in rewards if r is not None]
    if not advantage.has_spread(scored):
        return [None] * len(rewards)
    best, worst = rewards.index(max(scored)), rewards.index(min(scored))
    return [{best: 1.0, worst: -1.0}.get(member) for member in range(len(rewards))]


def token_advantages(
    member: Member, verdict: float | None, how: dict[str, Any], kl: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one member's tokens; returns are 0 without a critic."""
    nothing = [0.0] * len(member["trained"])
    if verdict is None:
        return nothing, nothing
    returns = nothing
    if how["estimator"] == "gae":
        coefficient = kl["coefficient"] if kl["where"] == "reward" else 0.0
        rewards = [-coefficient * k for k in penalties(member, kl)]
        rewards[trained_places(member)[-1]] += member["reward"]
        advantages, returns = value.gae(
            member["trained"], rewards, member["value"], how["gamma"], how["lam"]
        )
    else:
        advantages = [verdict if on else 0.0 for on in member["trained"]]
    if kl["where"] == "advantage":
        own = penalties(member, kl)
        advantages = [a - kl["coefficient"] * k for a, k in zip(advantages, own, strict=True)]
    return advantages, returns


def flattened(groups: list[list[Member]], config: dict[str, Any]) -> dict[str, Any]:
    """The step's batch, as ``objective`` reads it; members that are left out are not trained."""
    how = {**ADVANTAGE, **config["advantage"]}
    loss = config["loss"]
    kl = {**objective.KL, "where": "loss", **loss.get("kl", {})}
    batch: dict[str, Any] = {"trainer_version": 0, "proximal": None, "version": []}
    names = ("sequence", "group", "trained", "logprob", "behaviour", "reference", "advantage")
    batch |= {name: [] for name in (*names, "return", "old_value")}
    sequence = 0
    for number, group in enumerate(groups):
        verdicts = judged(group, how, kl, loss.get("policy") == "dpo")
        for member, verdict in zip(group, verdicts, strict=True):
            length = len(member["trained"])
            advantages, returns = token_advantages(member, verdict, how, kl)
            batch["sequence"] += [sequence] * length
            batch["group"] += [number] * length
            batch["trained"] += [on and verdict is not None for on in member["trained"]]
            batch["version"] += [0] * length
            for name in ("logprob", "behaviour", "reference"):
                batch[name] += member[name]
            batch["old_value"] += member["value"]
            batch["advantage"] += advantages
            batch["return"] += returns
            sequence += 1
    if how["normalize_batch"]:
        on = objective.trained_tokens(batch)
        normal = advantage.normalized_batch([batch["advantage"][t] for t in on])
        for t, a in zip(on, normal, strict=True):
            batch["advantage"][t] = a
    return batch


def solve(groups: list[list[Member]], config: dict[str, Any]) -> dict[str, Any]:
    """Lists over all tokens of all members, in order; 0 where a token is not trained."""
    batch = flattened(groups, config)
    loss = {**config["loss"]}
    kl = loss.pop("kl", {})
    if kl.get("where", "loss") == "loss":
        loss["kl"] = {k: v for k, v in kl.items() if k != "where"}
    parts = (preference if loss.get("policy") == "dpo" else objective).solve(batch, loss)
    kept = {"trained": batch["trained"], "advantage": batch["advantage"]}
    if config["advantage"].get("estimator") == "gae":
        kept["return"] = batch["return"]
    return {**kept, **{name: parts[name] for name in ("weight", "per_token", "loss", "gradient")}}
