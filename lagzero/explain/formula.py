"""The objective of a configuration as a formula, with its numbers filled in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lagzero.config import Config
from lagzero.explain import advantage, ratio
from lagzero.explain.numbers import num


@dataclass(frozen=True, slots=True)
class Formula:
    """One line of loss, and what its symbols stand for, in the order of reading."""

    loss: str
    symbols: dict[str, str]


def objective(config: Config) -> Formula:
    """Return the loss that the step minimises.

    Plain text: ``sum_i`` runs over the step's sequences, ``sum_t`` over the trained tokens of one,
    ``sg`` is a value without gradient. Every number is the configuration's.
    """
    loss = config.loss
    if loss.policy == "dpo":
        policy = _pairs(config)
    else:
        policy = f"{_over_tokens(config)} {_bracketed(_per_token(config))}"
    return Formula(f"L = {policy}", dict(_symbols(config)))


def policy_term(config: Config) -> str:
    """Return one token's policy term, weight included: ``w_t * -min(r_t A_i, ...)``."""
    loss = config.loss
    low, high = num(1 - loss.clip_low), num(1 + loss.clip_high)
    r, a = ratio.symbol(config), advantage.symbol(config)
    match loss.policy:
        case "clip":
            term = f"-min({r} {a}, clamp({r}, {low}, {high}) {a})"
        case "cispo":
            term = f"-sg(clamp({r}, {low}, {high})) {a} log pi_t"
        case "band":
            term = f"-{r} {a} [{low} <= {r} <= {high}]"
        case "reinforce" | "cross_entropy":
            term = f"-{a} log pi_t"
        case "dpo":
            raise ValueError("a preference has no term of one token")
    weight = ratio.weight_symbol(config)
    return f"{weight} * {term}" if weight else term


def _per_token(config: Config) -> list[str]:
    loss = config.loss
    terms = [policy_term(config)]
    if loss.kl.coefficient > 0 and loss.kl.where == "loss":
        terms.append(f"+ {num(loss.kl.coefficient)} KL_t")
    if loss.entropy_coefficient:
        sign = "-" if loss.entropy_coefficient > 0 else "+"
        terms.append(f"{sign} {num(abs(loss.entropy_coefficient))} H_t")
    return terms


def _bracketed(terms: list[str]) -> str:
    return f"[ {' '.join(terms)} ]" if len(terms) > 1 else terms[0]


def _over_tokens(config: Config) -> str:
    match config.loss.reduction:
        case "token_mean":
            return "1/(sum_j L_j) sum_i sum_t"
        case "sequence_mean":
            return "1/S sum_i 1/L_i sum_t"
        case "constant":
            constant = config.loss.constant
            return "1/S sum_i sum_t" if constant == 1 else f"1/({num(constant)} S) sum_i sum_t"


def _pairs(config: Config) -> str:
    """A pair's loss stands at each token of both its sequences: the reduction weighs it."""
    pair = f"-log sigmoid({num(config.loss.dpo_beta)} (D_c - D_r))"
    match config.loss.reduction:
        case "token_mean":
            return f"1/(sum_j L_j) sum_pairs (L_c + L_r) * {pair}"
        case "sequence_mean":
            return f"1/P sum_pairs {pair}"
        case "constant":
            return f"1/({num(config.loss.constant)} S) sum_pairs (L_c + L_r) * {pair}"


def _symbols(config: Config) -> Iterator[tuple[str, str]]:
    loss = config.loss
    yield from _indices(config)
    yield from ratio.policies(config)
    if loss.policy == "dpo":
        yield "D", "log pi - log ref, summed over a sequence's trained tokens"
        yield (
            "c, r",
            (
                f"of the {config.rollout.group_size} rollouts of one prompt, the one with the "
                "highest and the one with the lowest reward"
            ),
        )
    yield from ratio.definitions(config)
    if loss.policy != "dpo":
        yield from advantage.definitions(config)
    if loss.kl.coefficient > 0:
        yield "KL_t", kl_estimate(config)
    if loss.entropy_coefficient:
        yield "H_t", "entropy of the policy at token t over the whole vocabulary, nats"
    if config.advantage.estimator == "gae":
        yield from advantage.critic(config)


def _indices(config: Config) -> Iterator[tuple[str, str]]:
    most = config.rollout.max_new_tokens
    yield "i, t", f"a sequence of the step, a trained token of it (at most {most} each)"
    if config.loss.policy == "dpo":
        by_pair = config.loss.reduction == "sequence_mean"
        yield ("P", "pairs of the step") if by_pair else ("L_c", "trained tokens of c")
        return
    names = {"token_mean": "L_j", "sequence_mean": "S, L_i", "constant": "S"}
    texts = {
        "token_mean": "trained tokens of sequence j, over the whole step",
        "sequence_mean": "sequences of the step, trained tokens of sequence i",
        "constant": "sequences of the step",
    }
    yield names[config.loss.reduction], texts[config.loss.reduction]


def kl_estimate(config: Config) -> str:
    """Return the per-token estimate of the distance to the reference, and where it acts."""
    kl = config.loss.kl
    by = "pi" if kl.where == "loss" else "mu"
    forms = {
        "k1": f"log {by}_t - log ref_t",
        "k2": f"(log {by}_t - log ref_t)^2 / 2",
        "k3": f"ref_t / {by}_t - 1 - log(ref_t / {by}_t)",
    }
    return f"{forms[kl.estimator]} ({kl.estimator})"
