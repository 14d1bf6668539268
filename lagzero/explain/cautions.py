"""Combinations that are allowed and known to bias or to surprise, each with its source.

What cannot work at all is refused by ``config_check``; these are choices that a published result
speaks against, or whose effect is easily overlooked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lagzero.config import Config
from lagzero.explain import ratio
from lagzero.explain.advantage import GROUPED
from lagzero.explain.derived import lag_limit

_DR_GRPO = "Liu et al. 2025, arXiv:2503.20783, Sec. 3.1"


@dataclass(frozen=True, slots=True)
class Caution:
    """One line for the reader: the key that causes it, what happens, who found it."""

    path: str
    text: str
    source: str


def cautions(config: Config) -> list[Caution]:
    """Return those that hold, in the order of the keys."""
    return [
        *_normalisation(config),
        *_selection(config),
        *_ratios(config),
        *_lag(config),
        *_weights(config),
        *_kl(config),
    ]


def _normalisation(config: Config) -> Iterator[Caution]:
    advantage, loss = config.advantage, config.loss
    if advantage.normalize_std and advantage.estimator in GROUPED and loss.policy != "dpo":
        yield Caution(
            "advantage.normalize_std",
            "prompts that are nearly always or nearly never solved weigh more, because their "
            "standard deviation is small",
            f"{_DR_GRPO} (difficulty bias); Hu et al. 2025, arXiv:2501.03262, App. A",
        )
    if loss.reduction == "sequence_mean" and loss.ratio == "token" and loss.policy != "dpo":
        yield Caution(
            "loss.reduction",
            "a token of a long response weighs less than one of a short response, so a long wrong "
            "one is punished less",
            f"{_DR_GRPO} (length bias)",
        )


def _selection(config: Config) -> Iterator[Caution]:
    advantage, staleness = config.advantage, config.staleness
    if advantage.truncated == "mask":
        yield Caution(
            "advantage.truncated",
            "responses that are cut off teach nothing, so nothing here keeps them from growing; a "
            "penalty on length is a reward of its own",
            "Yu et al. 2025, arXiv:2503.14476, Sec. 3.4, has both",
        )
    gives_up = staleness.action in ("drop", "recycle", "interrupt")
    if gives_up or config.schedule.surplus == "drop":
        yield Caution(
            "staleness.action" if gives_up else "schedule.surplus",
            "what is given up for its age is what took long, so long responses go missing",
            "docs/staleness.md, with a test of significance in every run",
        )


def _ratios(config: Config) -> Iterator[Caution]:
    loss = config.loss
    if not ratio.has_ratio(config):
        return
    if loss.ratio != "token" and loss.reduction == "token_mean":
        yield Caution(
            "loss.reduction",
            "every token repeats its sequence's ratio, so a sequence weighs by its length; "
            "sequence_mean gives each one the same weight",
            "Zheng et al. 2025, arXiv:2507.18071, eq. 5 is a mean over sequences",
        )
    narrow = max(loss.clip_low, loss.clip_high) < 1e-3
    if loss.ratio == "sequence_mean" and loss.proximal == "behaviour" and narrow:
        yield Caution(
            "loss.clip_high",
            "bounds of this size are as narrow as the gap between engine and trainer can be; watch "
            "policy/clipped_high_share and behaviour/ratio_mean",
            "Khatri et al. 2025, arXiv:2510.13786, App. A.17.3: 4e-3 worked where 1e-4 did not",
        )


def _lag(config: Config) -> Iterator[Caution]:
    loss = config.loss
    stale = lag_limit(config) != 0
    anchored = ratio.has_ratio(config) and loss.proximal == "recomputed"
    if (anchored or loss.policy == "reinforce") and loss.correction.kind == "none":
        age = "tokens of earlier versions and the" if stale else "the"
        yield Caution(
            "loss.correction.kind",
            f"nothing corrects for {age} gap between engine and trainer: samples of mu count as if "
            "the trainer's own policy had drawn them; truncate and mask correct",
            "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL "
            "Training",
        )
    if loss.policy == "cross_entropy" and stale:
        yield Caution(
            "loss.policy",
            "cross_entropy has no importance weight: samples of earlier versions are fitted as "
            "they are",
            "by its definition, docs/objectives.md",
        )


def _weights(config: Config) -> Iterator[Caution]:
    correction = config.loss.correction
    if not ratio.corrects(config) or correction.kind == "none":
        return
    if correction.level != "sequence_product":
        yield Caution(
            "loss.correction.level",
            "a weight for each token leaves out how the prefix came about: less variance than the "
            "product over the sequence, and a bias that grows with length",
            "Liu, Li et al. 2025, When Speed Kills Stability",
        )
    else:
        yield Caution(
            "loss.correction.level",
            "the product is the exact weight, and its variance grows with length: gaps of 0.01 nat "
            "a token are e^1 either way over 10,000 tokens; watch correction/ess_share",
            "sqrt(10,000) x 0.01 = 1",
        )
    if correction.kind == "mask" and not correction.weigh:
        yield Caution(
            "loss.correction.weigh",
            "false leaves the tokens within the band without a weight, so only what is outside it "
            "is corrected for",
            "by its definition, docs/objectives.md",
        )


def _kl(config: Config) -> Iterator[Caution]:
    kl = config.loss.kl
    if kl.coefficient == 0 or kl.where != "loss":
        return
    if kl.estimator == "k1":
        yield Caution(
            "loss.kl.estimator",
            "k1 in the loss has an expected gradient of 0: noise, and no pull to the reference; "
            "k2 has the gradient of KL(policy || reference)",
            "Hu et al. 2025, arXiv:2501.03262, App. B.1; tested in tests/unit/losses/test_kl.py",
        )
    if kl.estimator == "k3":
        yield Caution(
            "loss.kl.estimator",
            "k3 in the loss has the gradient of KL(reference || policy), not of the KL that its "
            "value estimates; k2 has the other one",
            "Hu et al. 2025, arXiv:2501.03262, App. B.1; tested in tests/unit/losses/test_kl.py",
        )
    if lag_limit(config) != 0 or config.train.passes > 1:
        yield Caution(
            "loss.kl.coefficient",
            "tokens that another policy sampled count as if the policy itself had: the estimate "
            "has no importance weight here",
            "DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556 (unbiased KL estimate)",
        )
