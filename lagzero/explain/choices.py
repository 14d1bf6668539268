"""Each choice of a configuration beside the defaults of other libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lagzero.config import Block, Config
from lagzero.explain import ratio
from lagzero.explain.advantage import GROUPED
from lagzero.explain.peers import PEERS, known_paths


@dataclass(frozen=True, slots=True)
class Choice:
    """One key, its value here, and whose default it is."""

    path: str
    value: Any
    same: tuple[str, ...]  # peers whose default this is
    others: tuple[tuple[str, Any], ...]  # the other peers that are known here, with theirs


def value_at(config: Config, path: str) -> Any:
    """Return the value at a dotted path; None where a block on the way is not there."""
    place: Any = config
    for part in path.split("."):
        place = getattr(place, part) if isinstance(place, Block) else None
    return place


def choices(config: Config) -> list[Choice]:
    """Return the choices that play a part in this configuration and that some peer's default is
    known of."""
    return [_choice(config, path) for path in known_paths() if _matters(config, path)]


def _choice(config: Config, path: str) -> Choice:
    value = value_at(config, path)
    known = [(peer.name, peer.defaults[path].value) for peer in PEERS if path in peer.defaults]
    same = tuple(name for name, default in known if default == value)
    others = tuple((name, default) for name, default in known if default != value)
    return Choice(path, value, same, others)


def _matters(config: Config, path: str) -> bool:
    loss, advantage = config.loss, config.advantage
    match path:
        case "loss.clip_low" | "loss.clip_high" | "loss.ratio" | "loss.proximal":
            return ratio.has_ratio(config)
        case "loss.dual_clip":
            return loss.policy == "clip"
        case "loss.correction.kind":
            return loss.policy not in ("dpo", "cross_entropy")
        case "loss.correction.high":
            return ratio.corrects(config) and loss.correction.kind != "none"
        case "loss.kl.estimator" | "loss.kl.where":
            return loss.kl.coefficient > 0
        case "advantage.normalize_std" | "advantage.zero_spread":
            return advantage.estimator in GROUPED and loss.policy != "cross_entropy"
        case "advantage.gamma" | "advantage.lam" | "critic.clip":
            return advantage.estimator == "gae"
        case _:
            return True
