"""The advantage of an objective, in words: baseline, scale, rewards, penalties, the critic."""

from __future__ import annotations

from collections.abc import Iterator

from lagzero.config import Config, RewardConfig
from lagzero.explain.numbers import num

GROUPED = ("group_mean", "leave_one_out")


def symbol(config: Config) -> str:
    """Return the advantage's symbol: one a token or one a sequence."""
    return "A_t" if _by_token(config) else "A_i"


def _by_token(config: Config) -> bool:
    kl = config.loss.kl
    return config.advantage.estimator == "gae" or (kl.coefficient > 0 and kl.where == "advantage")


def definitions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the advantage, the reward that it is made of, and what happens to equal rewards."""
    if config.loss.policy == "cross_entropy":
        yield symbol(config), "R_i: the reward is the token's weight"
    else:
        yield symbol(config), _advantage(config)
    yield "R_i", _reward(config)
    advantage = config.advantage
    if advantage.estimator in GROUPED and config.loss.policy != "cross_entropy":
        limit = advantage.resample_limit * config.schedule.groups_per_step
        yield (
            "equal R",
            {
                "keep": "a group of equal rewards has A = 0 and counts in the denominators",
                "drop": "a group of equal rewards is left out of the step",
                "resample": "a group of equal rewards is given up and another prompt played, at "
                f"most {limit} a step",
            }[advantage.zero_spread],
        )
    if advantage.truncated == "mask":
        yield "cut off", "responses that did not end by themselves count in the baseline only"


def _advantage(config: Config) -> str:
    advantage = config.advantage
    if advantage.estimator == "gae":
        text = (
            f"d_t + {num(advantage.gamma * advantage.lam)} A_(t+1), with d_t = R_i [t is last] + "
            f"{num(advantage.gamma)} V_(t+1) - V_t, over trained tokens, V = 0 after the last"
        )
    else:
        text = _of_sequence(config)
    kl = config.loss.kl
    if kl.coefficient > 0 and kl.where == "advantage":
        text += f", minus {num(kl.coefficient)} KL_t"
    if advantage.normalize_batch:
        text += "; then to mean 0 and standard deviation 1 over the step's trained tokens"
    return text


def _of_sequence(config: Config) -> str:
    size = config.rollout.group_size
    divided = config.advantage.normalize_std
    match config.advantage.estimator:
        case "group_mean":
            form = "(R_i - mean R) / std R" if divided else "R_i - mean R"
            text = f"{form}, over the {size} rollouts of its prompt"
            return f"{text}, std with divisor {size - 1}" if divided else text
        case "leave_one_out":
            others = f"over the other {size - 1} rollouts of its prompt"
            form = "(R_i - mean R) / std R" if divided else "R_i - mean R"
            return f"{form}, {others}"
        case _:
            return "R_i"


def _reward(config: Config) -> str:
    text = " + ".join(_weighed(reward) for reward in config.score.rewards)
    kl = config.loss.kl
    if kl.coefficient > 0 and kl.where == "reward":
        spread = "KL_t at each token" if config.advantage.estimator == "gae" else "sum_t KL_t"
        text += f", minus {num(kl.coefficient)} {spread}"
    return text


def _weighed(reward: RewardConfig) -> str:
    return reward.use if reward.weight == 1 else f"{num(reward.weight)} {reward.use}"


def critic(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the value function and its loss."""
    if config.critic is None:
        return
    shared = "a value head on the policy's trunk" if config.critic.shared else "a critic of its own"
    yield "V", f"{shared}, trained towards G_t = A_t + V_t (before any normalisation)"
    squared = "(V_t - G_t)^2"
    bound = config.critic.clip
    if bound is not None:
        old = f"Vold_t + clamp(V_t - Vold_t, -{num(bound)}, {num(bound)})"
        squared = f"max({squared}, ({old} - G_t)^2)"
    weight = num(0.5 * config.critic.coefficient) if config.critic.shared else "0.5"
    yield "L_V", f"{weight} {squared} for each trained token"


def largest(config: Config) -> float | None:
    """Return the largest |A| that a group's normalisation allows; None where there is no bound.

    With n members: (n - 1) / sqrt(n) under group_mean, sqrt(n) under leave_one_out.
    """
    advantage, n = config.advantage, config.rollout.group_size
    if not advantage.normalize_std or advantage.normalize_batch or _by_token(config):
        return None
    match advantage.estimator:
        case "group_mean":
            return (n - 1) / n**0.5
        case "leave_one_out":
            return n**0.5
        case _:
            return None
