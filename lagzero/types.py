"""The records that cross a stage boundary, one frozen type for each boundary.

A token's history (id, behaviour log-prob, policy version, trained or not) is one record of the
structured array type ``TOKEN``. The columns cannot slip against each other, because cutting,
joining and reordering act on whole records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LOG_RATIO_BOUND = 20.0
"""Nats. Exponents are cut off above this, e^20 = 4.9e8: value and square stay finite in float32.

Past the bound the value is constant, so the token's gradient through that exponent is 0. No lower
bound is needed: e^-700 underflows to 0 with gradient 0.
"""

TOKEN = np.dtype(
    [
        ("id", np.int32),
        ("logprob", np.float32),  # behaviour log-prob, nats; NaN where nothing was sampled
        ("version", np.int32),  # policy version that sampled it; -1 where nothing was sampled
        ("trained", np.bool_),  # whether the loss sees it
    ],
    align=True,
)


def sampled_tokens(ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> Array:
    """Join what a sampler returned for T tokens into one ``TOKEN`` array [T], all trained.

    Raises ValueError when the three differ in length or a log-prob is not a finite number <= 0.
    """
    if not len(ids) == len(logprobs) == len(versions):
        raise ValueError(
            f"a sampler returned {len(ids)} ids, {len(logprobs)} log-probs and "
            f"{len(versions)} versions; the three must have one entry a token"
        )
    tokens = np.empty(len(ids), TOKEN)
    tokens["id"], tokens["logprob"], tokens["version"] = ids, logprobs, versions
    tokens["trained"] = True
    bad = ~(np.isfinite(tokens["logprob"]) & (tokens["logprob"] <= 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"token {at} has log-prob {tokens['logprob'][at]}; it must be finite, <= 0"
        )
    return tokens


def given_tokens(ids: Sequence[int]) -> Array:
    """Make a ``TOKEN`` array [T] of tokens that no policy sampled (tool output, forced text)."""
    tokens = np.empty(len(ids), TOKEN)
    tokens["id"], tokens["logprob"], tokens["version"], tokens["trained"] = ids, np.nan, -1, False
    return tokens


class Finish(Enum):
    """Why a rollout ended."""

    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # its own limit on new tokens
    CONTEXT = "context"  # the model's context was full
    ABORT = "abort"  # taken back by the caller; the tokens so far are valid


class Outcome(Enum):
    """What scoring came to. Only SCORED carries a number."""

    SCORED = "scored"
    UNSCORABLE = "unscorable"  # the reward says that this sample has no score
    INFRASTRUCTURE = "infrastructure"  # the machinery failed; the sample is not to blame


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, rendered and tokenised.

    ``columns`` holds the row's other fields (answer, ...), which rewards read.
    """

    id: str
    token_ids: tuple[int, ...]
    content: str | tuple[Mapping[str, str], ...]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the policy wrote for one member of a group: ``tokens`` is a ``TOKEN`` array [T]."""

    member: int
    tokens: Array
    text: str
    finish: Finish

    def __post_init__(self) -> None:
        if self.tokens.dtype != TOKEN or self.tokens.ndim != 1:
            raise ValueError(f"a rollout holds a TOKEN array [T], not {self.tokens.dtype}")


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one visit to one prompt. ``index`` counts visits in start order from 0.

    Two visits to one prompt, or two prompts with the same text, are two groups.
    """

    index: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one rollout. ``parts`` holds each reward's own unweighted value."""

    outcome: Outcome
    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.SCORED) != (self.value is not None):
            raise ValueError(f"a {self.outcome.value} rollout with value {self.value}")
        if self.value is not None and not np.isfinite(self.value):
            raise ValueError(f"a reward must be finite, got {self.value}")


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one score for each rollout, in the same order."""

    group: Group
    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.group.rollouts):
            raise ValueError(
                f"group {self.group.index} has {len(self.group.rollouts)} rollouts "
                f"and {len(self.scores)} scores"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable sequence: a prompt, a ``TOKEN`` array [T] and its per-token advantage [T].

    With a critic it also has, for each trained token, the value [T] of what stood before it, as
    the critic saw it before the step, and the return [T] that this value should have been.
    """

    group_index: int
    member: int
    prompt_ids: tuple[int, ...]
    tokens: Array
    advantages: Array
    reward: float
    values: Array | None = None
    returns: Array | None = None

    def __post_init__(self) -> None:
        name = f"sample {self.group_index}/{self.member}"
        columns = {"advantages": self.advantages, "values": self.values, "returns": self.returns}
        for column, array in columns.items():
            if array is not None and array.shape != self.tokens.shape:
                raise ValueError(f"{name}: {len(self.tokens)} tokens and {len(array)} {column}")
        if (self.values is None) != (self.returns is None):
            raise ValueError(f"{name} has values and returns, or neither")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T tokens, of which N positions are trained.

    The row is a sequence of segments. A segment's tokens attend to the earlier tokens of the same
    segment and to every token of its parent segment (a prompt shared by a group is the parent of
    the responses); ``parents`` holds -1 for a segment that stands alone.
    """

    token_ids: Array  # [T] int32
    position_ids: Array  # [T] int32, counted from the start of the prompt
    segment_ids: Array  # [T] int32, non-decreasing from 0
    parents: Array  # [S] int32, index of the parent segment or -1
    predictors: Array  # [N] int32, place in the row whose hidden state predicts the n-th target
    targets: Array  # [N] int32, token ids
    behaviour_logprobs: Array  # [N] float32
    reference_logprobs: Array | None  # [N] float32
    advantages: Array  # [N] float32
    weights: Array  # [N] float64; the step's loss is the sum of weight * per-token loss
    versions: Array  # [N] int32
    sequences: Array  # [N] int32, index into the step's samples
    groups: Array  # [N] int32, number of the token's group in the step, by its first sample
    returns: Array | None = None  # [N] float32, what a critic's value should be
    old_values: Array | None = None  # [N] float32, a critic's values before the step

    def __post_init__(self) -> None:
        rows = {a.shape for a in (self.token_ids, self.position_ids, self.segment_ids)}
        trained = {
            a.shape
            for a in (
                self.predictors,
                self.targets,
                self.behaviour_logprobs,
                self.advantages,
                self.weights,
                self.versions,
                self.sequences,
                self.groups,
            )
        }
        extras = (self.reference_logprobs, self.returns, self.old_values)
        trained |= {a.shape for a in extras if a is not None}
        if len(rows) != 1 or len(trained) != 1:
            raise ValueError(f"a packed row whose columns differ in length: {rows}, {trained}")
        if (self.returns is None) != (self.old_values is None):
            raise ValueError("a packed row has returns and old values, or neither")


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one optimiser step trains on, cut into packed rows."""

    micro_batches: tuple[MicroBatch, ...]
    num_sequences: int
    num_trained_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimiser step reports. ``version`` is the policy version that it produced."""

    version: int
    metrics: Mapping[str, float]
