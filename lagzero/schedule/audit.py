"""What the staleness contract did: lags, and who was trained, given up or kept waiting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lagzero.schedule.selection import UNFINISHED, Evidence, Selection
from lagzero.schedule.staleness import Contract, lag_counts
from lagzero.types import ScoredGroup

ZERO_SPREAD = "zero_spread"  # dynamic sampling: the group teaches nothing
REASONS = ("stale", "surplus", "interrupted", "timeout", ZERO_SPREAD)  # any other failed: "lost"
LAST_LAG = 8  # from here on, lags share one figure
MANY = 3  # times in a row that make a prompt worth naming
NAMED = 5  # prompts in one alarm
REMIND = 4096  # visits after which a lasting alarm is told again

REMEDIES = {
    "stale": "a larger staleness.bound, or action accept (importance weights correct for the lag) "
    "or wait, keeps them",
    "interrupted": "a larger staleness.bound, or action accept or wait, lets them finish",
    "surplus": "schedule.surplus: carry, or fewer extra groups, keeps them",
    "timeout": "a larger rollout.timeout_s lets them finish",
    ZERO_SPREAD: "they teach nothing: prompts that the policy solves at times, or a larger "
    "rollout.max_new_tokens where they were cut off, give them rewards that differ",
}


def longest_response(scored: ScoredGroup) -> float:
    """Return the tokens of a group's longest rollout, which is what the group waits for."""
    return float(max((len(each.tokens) for each in scored.group.rollouts), default=0))


@dataclass(slots=True)
class _Visit:
    prompt_id: str
    length: float | None = None  # of the first play, tokens; later plays are already a choice


class Audit:
    """Hears of every visit from its start to its end, and reports once a step.

    ``length`` says how long a group is, in tokens. A visit has the length of its first play, which
    is as the data are; it is UNFINISHED when that play was not waited for. A visit that was lost
    (its play failed, other than by a timeout) tells nothing about its length, so it is counted but
    not compared.
    """

    def __init__(
        self, contract: Contract, length: Callable[[ScoredGroup], float] = longest_response
    ):
        self._contract = contract
        self._length = length
        self._open: dict[int, _Visit] = {}
        self._lags: list[int] = []  # of the groups handed over since the last step
        self._given_up: list[tuple[str, ScoredGroup | None]] = []  # since the last step
        self._num_restarts = 0
        self._selection = Selection()
        self._in_a_row: Counter[str] = Counter()  # prompt -> times given up since it was trained
        self._tell_at = 0  # visits from which an alarm is worth telling
        self._alarms: list[str] = []

    def started(self, index: int, prompt_id: str) -> None:
        """A visit was started for the first time."""
        self._open[index] = _Visit(prompt_id)

    def accepted(self, scored: ScoredGroup, lag: int) -> None:
        """A group was handed over to training. ``lag``: versions, by the contract's clock."""
        visit = self._open.pop(scored.group.index)
        self._lags.append(lag)
        self._in_a_row.pop(visit.prompt_id, None)
        self._selection.add(self._first_length(visit, scored), "")

    def restarted(self, index: int, scored: ScoredGroup | None, lag: int) -> None:
        """A group is played again: a finished one that was too old, or None, an interrupted one."""
        visit = self._open[index]
        visit.length = self._first_length(visit, scored)
        self._num_restarts += 1

    def given_up(self, index: int, reason: str, scored: ScoredGroup | None, age: int) -> None:
        """A visit ended untrained. ``age``: versions published since it was last started."""
        visit = self._open.pop(index)
        kind = next((each for each in REASONS if reason.startswith(each)), "lost")
        self._given_up.append((kind, scored))
        self._in_a_row[visit.prompt_id] += 1
        if kind != "lost" or visit.length is not None:
            self._selection.add(self._first_length(visit, scored), kind)

    def _first_length(self, visit: _Visit, scored: ScoredGroup | None) -> float:
        if visit.length is not None:
            return visit.length
        return UNFINISHED if scored is None else self._length(scored)

    def step(
        self, groups: Sequence[ScoredGroup], version: int, waiting: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Return the step's metrics: ``groups`` are trained, ``waiting`` are finished and held."""
        out = lag_metrics(groups, version)
        if self._lags:
            out["lag/group_mean"] = sum(self._lags) / len(self._lags)
            out["lag/group_max"] = float(max(self._lags))
        gone = len(self._given_up)
        out["staleness/given_up/count"] = float(gone)
        out["staleness/given_up/share"] = gone / max(gone + len(groups), 1)
        for kind in sorted({kind for kind, _ in self._given_up}):
            of_kind = [scored for each, scored in self._given_up if each == kind]
            out[f"staleness/given_up/{kind}/count"] = float(len(of_kind))
            out |= averages(f"staleness/given_up/{kind}", (s for s in of_kind if s is not None))
        out |= averages("staleness/trained", groups)
        out["staleness/waiting/count"] = float(len(waiting))
        out |= averages("staleness/waiting", waiting)
        out["staleness/playing/count"] = float(len(self._open) - len(waiting))
        out["staleness/restarts/count"] = float(self._num_restarts)
        out |= self._selection_metrics()
        self._lags, self._given_up, self._num_restarts = [], [], 0
        return out

    def _selection_metrics(self) -> dict[str, float]:
        out = {"staleness/alarm": float(self._selection.alarming)}
        found = self._selection.evidence
        if found is None or not found.long:
            return out
        out["staleness/long_share"] = found.long_share
        if (share := found.long_trained_share) is not None:
            out["staleness/long_trained_share"] = share
        out["staleness/long_lost_share"] = found.long_given_up / found.long
        out["staleness/selection_p"] = found.p
        if not self._selection.alarming:
            self._tell_at = 0
        elif self._selection.num_visits >= self._tell_at:
            self._alarms.append(self._text(found))
            self._tell_at = self._selection.num_visits + REMIND
        return out

    def alarms(self) -> list[str]:
        """Return the alarms that were raised since this was last asked, for people to read."""
        new, self._alarms = self._alarms, []
        return new

    def _text(self, found: Evidence) -> str:
        reasons = Counter(reason for reason in self._selection.reasons if reason)
        trained = found.long_trained_share
        lines = [
            f"long groups are being lost: {found.long_given_up} of the last {found.long} long ones "
            f"were given up ({found.long_given_up / found.long:.0%}), "
            f"{found.given_up - found.long_given_up} of {found.visits - found.long} others; by "
            f"chance this has p = {found.p:.1g}. "
            + (
                f"They are {found.long_share:.0%} of what ended and {trained:.0%} of what "
                "is trained."
                if trained is not None
                else "Nothing at all was trained."
            ),
            "Long: "
            + (
                "did not finish."
                if math.isinf(found.at_least)
                else f"{found.at_least:g} tokens or more, or did not finish."
            )
            + f" Given up: {', '.join(f'{n} {kind}' for kind, n in reasons.most_common())} (action "
            f"{self._contract.action}, bound {self._contract.bound}).",
        ]
        again = [(name, n) for name, n in self._in_a_row.most_common(NAMED) if n >= MANY]
        if again:
            names = ", ".join(f"{name} ({n} times)" for name, n in again)
            lines.append(f"Given up again and again, and not trained since: {names}.")
        main = next((kind for kind, _ in reasons.most_common() if kind in REMEDIES), "stale")
        lines.append(f"Remedy: {REMEDIES[main]}.")
        return "\n".join(lines)


def lag_metrics(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Return mean, maximum and histogram of the trained tokens' lags; empty without tokens."""
    lags = lag_counts(list(groups), version)
    total = sum(lags.values())
    if not total:
        return {}
    out = {
        "lag/token_mean": sum(lag * n for lag, n in lags.items()) / total,
        "lag/max": float(max(lags)),
    }
    for lag in range(min(max(lags) + 1, LAST_LAG)):
        out[f"lag/share/{lag}"] = lags.get(lag, 0) / total
    if max(lags) >= LAST_LAG:
        beyond = sum(n for lag, n in lags.items() if lag >= LAST_LAG)
        out[f"lag/share/{LAST_LAG}_up"] = beyond / total
    return out


def averages(name: str, groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Return mean tokens a rollout and mean reward a scored rollout; what is absent is left out."""
    lengths: list[int] = []
    rewards: list[float] = []
    for each in groups:
        lengths += [len(rollout.tokens) for rollout in each.group.rollouts]
        rewards += [score.value for score in each.scores if score.value is not None]
    out: dict[str, float] = {}
    if lengths:
        out[f"{name}/length_mean"] = sum(lengths) / len(lengths)
    if rewards:
        out[f"{name}/reward_mean"] = sum(rewards) / len(rewards)
    return out
