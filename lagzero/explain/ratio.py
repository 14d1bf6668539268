"""The policies of an objective, its importance ratio and its correction's weight, in words."""

from __future__ import annotations

from collections.abc import Iterator

from lagzero.config import Config
from lagzero.explain.numbers import num

RATIO_POLICIES = ("clip", "cispo", "band")


def has_ratio(config: Config) -> bool:
    """Say whether the policy term holds an importance ratio."""
    return config.loss.policy in RATIO_POLICIES


def symbol(config: Config) -> str:
    """Return the ratio's symbol: one a token or one a sequence."""
    return "r_t" if config.loss.ratio == "token" else "r_i"


def weight_symbol(config: Config) -> str:
    """Return the correction's symbol; empty text without one."""
    correction = config.loss.correction
    if not corrects(config):
        return ""
    by_token = correction.level == "token" or correction.max_token_lag is not None
    return "w_t" if by_token or correction.kind == "none" else "w_i"


def corrects(config: Config) -> bool:
    """Say whether a correction acts on the policy term."""
    if config.loss.policy in ("dpo", "cross_entropy"):
        return False
    correction = config.loss.correction
    return correction.kind != "none" or correction.max_token_lag is not None


def anchor(config: Config) -> str:
    """Return what the ratio is taken against: ``mu``, ``prox`` or ``a``."""
    return {"behaviour": "mu", "recomputed": "prox", "interpolated": "a"}[config.loss.proximal]


def uses_proximal(config: Config) -> bool:
    """Say whether the policy just before the step plays a part."""
    ratio_does = has_ratio(config) and config.loss.proximal == "recomputed"
    weight_does = config.loss.correction.kind != "none" and _corrected(config) == "prox"
    return ratio_does or (corrects(config) and weight_does)


def needs_reference(config: Config) -> bool:
    """Say whether a reference policy is kept."""
    return config.loss.kl.coefficient > 0 or config.loss.policy == "dpo"


def policies(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the policies that the formula speaks of."""
    temperature = config.rollout.temperature
    logits = "float32 logits" if config.model.fp32_head else "logits"
    yield "pi", f"the policy being trained, softmax({logits} / {num(temperature)})"
    kl = config.loss.kl
    outside_loss = kl.coefficient > 0 and kl.where != "loss"
    ratio_does = has_ratio(config) and config.loss.proximal != "recomputed"
    weight_does = corrects(config) and config.loss.correction.kind != "none"
    if ratio_does or weight_does or outside_loss:
        yield "mu", "behaviour: what sampled the token, as the engine recorded it then"
    if uses_proximal(config):
        yield (
            "prox",
            (
                "proximal: the policy just before the step's first update, a constant; what its "
                "first pass computes anyway"
            ),
        )
    if needs_reference(config):
        yield "ref", f"reference: {_reference(config)}, frozen"


def _reference(config: Config) -> str:
    model = config.model
    if model.reference is not None:
        return model.reference
    if model.lora is None:
        return "the policy as it started"
    return {"start": "the adapter as it started", "base": "the base model"}[model.lora.reference]


def definitions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the ratio and the correction's weight."""
    loss = config.loss
    if has_ratio(config):
        yield symbol(config), at_level("pi", anchor(config), loss.ratio)
        if loss.proximal == "interpolated":
            yield (
                "a_t",
                (
                    "mu_t^alpha pi_t^(1 - alpha) without gradient, alpha = 1 / lag of the token, "
                    "0 at lag 0"
                ),
            )
        if loss.policy == "clip" and loss.dual_clip is not None:
            yield "dual clip", f"where A < 0 the term is at most {num(loss.dual_clip)} |A|"
    if corrects(config):
        yield weight_symbol(config), _weight(config)


def at_level(above: str, below: str, level: str) -> str:
    """Write a ratio of two policies: of a token, of a sequence, or its geometric mean."""
    quotient = f"{above}_t / {below}_t"
    return {
        "token": quotient,
        "sequence_product": f"prod_t {quotient}",
        "sequence_mean": f"(prod_t {quotient})^(1 / L_i)",
    }[level]


def _corrected(config: Config) -> str:
    """The policy that the weight corrects to: the anchor where that stands in for prox."""
    stands_in = config.loss.proximal == "interpolated" and has_ratio(config)
    return "a" if stands_in else "prox"


def _weight(config: Config) -> str:
    correction = config.loss.correction
    inside = at_level(_corrected(config), "mu", correction.level)
    low, high = num(correction.low), num(correction.high)
    match correction.kind:
        case "none":
            text = "1"
        case "truncate":
            text = f"min({inside}, {high})"
        case "mask":
            value = inside if correction.weigh else "1"
            text = f"{value} where {low} <= {inside} <= {high}, else 0"
    if correction.max_token_lag is not None:
        text += f"; 0 where the token is more than {correction.max_token_lag} version(s) old"
    return f"{text}; a constant"
