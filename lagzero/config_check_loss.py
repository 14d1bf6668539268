"""Settings of the objective that cannot work together, each with its remedy.

The half of ``config_check`` that concerns ``loss``; the same rules hold for its lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from lagzero.config import Config, CorrectionConfig, KLConfig, LossConfig

_WITH_RATIO = ("clip", "cispo", "band")


def loss_problems(config: Config) -> Iterator[str]:
    """Yield every combination of the objective's settings that cannot work."""
    yield from _reduction(config)
    yield from _policy(config)
    yield from _correction(config.loss)
    yield from _signal(config)


def loss_notes(config: Config) -> Iterator[str]:
    """Yield what is allowed but has no effect, or another one than it seems."""
    yield from _ratio_notes(config)
    yield from _correction_notes(config.loss)
    kl, untouched = config.loss.kl, KLConfig()
    for name in ("where", "estimator"):
        if kl.coefficient == 0 and getattr(kl, name) != getattr(untouched, name):
            yield f"loss.kl.{name}: not used while loss.kl.coefficient is 0"
    types = (config.model.dtype, config.engine.dtype)
    if config.model.fp32_head and types in (("float32", "same"), ("float32", "float32")):
        yield "model.fp32_head: changes nothing; the whole model computes in float32"
    if config.model.reference is not None:
        if kl.coefficient == 0 and config.loss.policy != "dpo":
            yield (
                "model.reference: not loaded; nothing is measured against it while "
                "loss.kl.coefficient is 0 and loss.policy is not dpo"
            )
        elif config.model.lora is not None and config.model.lora.start is not None:
            yield "model.lora.reference: not used; model.reference is the reference"


def _reduction(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.reduction == "constant" and loss.constant is None:
        yield (
            "loss.constant: missing; reduction constant divides each sequence by it; give a number "
            f"of tokens, for example {config.rollout.max_new_tokens} (rollout.max_new_tokens)"
        )
    if loss.reduction != "constant" and loss.constant is not None:
        yield (
            f"loss.constant: only reduction constant reads it, and loss.reduction is "
            f"{loss.reduction}; remove it, or set loss.reduction: constant"
        )


def _policy(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.dual_clip is not None and loss.policy != "clip":
        yield (
            f"loss.dual_clip: only policy clip has such a bound, and loss.policy is {loss.policy}; "
            "set it to null, or loss.policy: clip"
        )
    if loss.policy == "dpo":
        if config.rollout.group_size < 2:
            yield (
                "rollout.group_size: 1 leaves loss.policy dpo no pair to compare; use at least 2"
            )
    elif loss.dpo_beta != LossConfig().dpo_beta:
        yield (
            f"loss.dpo_beta: only policy dpo reads it, and loss.policy is {loss.policy}; remove "
            "it, or set loss.policy: dpo"
        )


def _correction(loss: LossConfig) -> Iterator[str]:
    correction = loss.correction
    acts = correction.kind != "none" or correction.max_token_lag is not None
    if acts and loss.policy in ("dpo", "cross_entropy"):
        key = "kind" if correction.kind != "none" else "max_token_lag"
        yield (
            f"loss.correction.{key}: policy {loss.policy} learns from the samples as they are and "
            "takes no importance weights; set kind: none and max_token_lag: null"
        )
    elif loss.policy in _WITH_RATIO and loss.proximal == "behaviour":
        multiplies = correction.kind == "truncate" or (
            correction.kind == "mask" and correction.weigh
        )
        if multiplies:
            yield (
                f"loss.correction.kind: {correction.kind} multiplies by proximal / behaviour, "
                f"which the ratio of policy {loss.policy} already holds with loss.proximal "
                "behaviour; set loss.proximal: recomputed, or kind: mask with weigh: false"
            )
    if correction.kind == "mask" and correction.low > correction.high:
        yield (
            f"loss.correction.low: {correction.low:g} is above high {correction.high:g}, so every "
            "token would be masked; use a smaller one"
        )
    if correction.kind == "truncate" and not correction.weigh:
        yield (
            "loss.correction.weigh: false leaves truncate nothing to do, because a truncated "
            "weight is all that it is; set weigh: true, or kind: mask"
        )


def _signal(config: Config) -> Iterator[str]:
    """Refuse advantages that the objective does not learn from."""
    loss, estimator = config.loss, config.advantage.estimator
    if loss.policy == "cross_entropy":
        if estimator != "none":
            yield (
                f"advantage.estimator: {estimator}, but loss.policy cross_entropy weighs tokens "
                "with the reward itself; set estimator: none and normalize_std: false, or "
                "loss.policy: reinforce"
            )
        if config.advantage.normalize_batch:
            yield (
                "advantage.normalize_batch: true, but loss.policy cross_entropy weighs tokens with "
                "the reward itself; set it to false"
            )
    if loss.policy == "dpo":
        if estimator == "gae":
            yield (
                "advantage.estimator: gae, but loss.policy dpo compares the rewards of a group and "
                "has no use for values; set estimator: group_mean"
            )
        if config.advantage.normalize_batch:
            yield (
                "advantage.normalize_batch: true, but loss.policy dpo reads which rollout is the "
                "better one and nothing else; set it to false"
            )
    has_none = loss.policy in ("cross_entropy", "dpo")
    if has_none and loss.kl.coefficient > 0 and loss.kl.where == "advantage":
        yield (
            f"loss.kl.where: advantage, but policy {loss.policy} has none to change; set where: "
            "loss, or coefficient: 0"
        )


def _ratio_notes(config: Config) -> Iterator[str]:
    loss, untouched, passes = config.loss, LossConfig(), config.train.passes
    if loss.policy not in _WITH_RATIO:
        for name in ("clip_low", "clip_high", "ratio", "proximal"):
            if getattr(loss, name) != getattr(untouched, name):
                yield f"loss.{name}: not used; policy {loss.policy} has no ratio"
        if loss.policy == "reinforce" and passes > 1:
            yield (
                f"train.passes: {passes}, but policy reinforce has no ratio, so nothing accounts "
                "for the updates before a later pass"
            )
    elif loss.proximal == "recomputed" and passes == 1:
        yield (
            "loss.proximal: recomputed makes every ratio 1 with train.passes 1, so that the bounds "
            "clip_low and clip_high never act"
        )
    elif loss.proximal == "interpolated" and passes == 1 and config.schedule.max_lag == 0:
        yield (
            "loss.proximal: interpolated is the current policy itself at lag 0, which "
            "schedule.max_lag 0 allows alone; every ratio is 1"
        )
    if loss.policy == "dpo" and loss.reduction != "sequence_mean":
        yield (
            f"loss.reduction: {loss.reduction} weighs each pair of policy dpo by its tokens; "
            "sequence_mean is the mean over pairs"
        )


def _correction_notes(loss: LossConfig) -> Iterator[str]:
    correction, untouched = loss.correction, CorrectionConfig()
    unused = {
        "none": ("level", "low", "high", "weigh"),
        "truncate": ("low",),
        "mask": (),
    }
    for name in unused[correction.kind]:
        if getattr(correction, name) != getattr(untouched, name):
            yield f"loss.correction.{name}: not used while kind is {correction.kind}"
