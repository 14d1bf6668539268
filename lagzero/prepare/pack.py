"""Pack samples into rows of a token budget, without padding and without tearing a sequence.

A row holds only tokens that some trained token is predicted from. The last trained token of a
response, and whatever follows it, is a target at most and never an input; a response of one
trained token therefore adds no input at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lagzero.types import Array, MicroBatch, Sample


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples of one group that go into the same row."""

    members: tuple[int, ...]  # indices into the step's samples
    num_tokens: int


def pack(
    samples: Sequence[Sample],
    micro_batch_tokens: int,
    share_prompt: bool,
    weights: Array,
    reference_logprobs: Sequence[Array] | None = None,
    *,
    keep_groups: bool = False,
) -> tuple[MicroBatch, ...]:
    """Cut one step's samples into rows.

    With ``share_prompt`` a group's prompt is one segment and each response a segment whose parent
    it is, with positions that go on from the prompt's length; a group that does not fit one row
    repeats its prompt in each of its rows. Without, each sequence is one stand-alone segment.

    Rows are filled first-fit, longest first; ties go by sample order, so the cut is a function
    of the samples alone. A row exceeds the budget only when a single sequence does, and then holds
    only that sequence; with ``keep_groups``, only when a group does. Samples without trained tokens
    take no place.

    Args:
        samples: [S]. Samples of one ``group_index`` share one prompt.
        micro_batch_tokens: most input tokens in a row, > 0.
        share_prompt: compute a group's prompt once a row.
        weights: [S] float64, the weight of each of the sample's trained tokens.
        reference_logprobs: [S] arrays [T], read at trained tokens only, or None.
        keep_groups: put all samples of a group into one row, for a loss that compares them.

    Raises ValueError for an empty prompt, one group with two prompts, lengths that disagree, a
    critic's values on some samples only, or a trained token one of whose numbers is not finite.
    """
    _check(samples, micro_batch_tokens, weights, reference_logprobs)
    units = _units(samples, micro_batch_tokens, share_prompt, keep_groups)
    order = sorted(range(len(units)), key=lambda i: (-units[i].num_tokens, i))
    rows = _first_fit([units[i].num_tokens for i in order], micro_batch_tokens)
    return tuple(
        _row([units[order[i]] for i in row], samples, share_prompt, weights, reference_logprobs)
        for row in rows
    )


def unpack(
    values: Sequence[Array], rows: Sequence[MicroBatch], samples: Sequence[Sample]
) -> list[Array]:
    """Return per-token values of rows to their samples: the way back from ``pack``.

    ``values`` holds one array [N] for each row. The result holds one float32 array [T] for each
    sample, NaN where a token is not trained.
    """
    out = [np.full(len(s.tokens), np.nan, np.float32) for s in samples]
    for value, row in zip(values, rows, strict=True):
        if value.shape != row.targets.shape:
            raise ValueError(f"{value.shape} values for a row of {len(row.targets)} targets")
        for index in sorted({int(i) for i in row.sequences}):
            trained = samples[index].tokens["trained"]
            out[index][trained] = value[row.sequences == index]
    return out


def _check(
    samples: Sequence[Sample],
    micro_batch_tokens: int,
    weights: Array,
    reference_logprobs: Sequence[Array] | None,
) -> None:
    if micro_batch_tokens <= 0:
        raise ValueError(f"micro_batch_tokens is {micro_batch_tokens}; it must be > 0")
    if len(weights) != len(samples):
        raise ValueError(f"{len(samples)} samples and {len(weights)} weights")
    if reference_logprobs is not None and len(reference_logprobs) != len(samples):
        raise ValueError(f"{len(samples)} samples and {len(reference_logprobs)} references")
    if len({sample.values is None for sample in samples}) > 1:
        raise ValueError("some samples have a critic's values and others have none")
    prompts: dict[int, tuple[int, ...]] = {}
    for index, sample in enumerate(samples):
        name = f"sample {sample.group_index}/{sample.member}"
        if not sample.prompt_ids:
            raise ValueError(f"{name} has an empty prompt: nothing predicts its first token")
        if prompts.setdefault(sample.group_index, sample.prompt_ids) != sample.prompt_ids:
            raise ValueError(f"{name} has another prompt than its group")
        trained = sample.tokens["trained"]
        columns = {
            "behaviour log-prob": sample.tokens["logprob"][trained],
            "advantage": sample.advantages[trained],
            "weight": weights[index : index + 1],
        }
        if reference_logprobs is not None:
            if reference_logprobs[index].shape != sample.tokens.shape:
                raise ValueError(f"{name} has reference log-probs of another length")
            columns["reference log-prob"] = reference_logprobs[index][trained]
        for column, value in (("value", sample.values), ("return", sample.returns)):
            if value is not None:
                columns[column] = value[trained]
        for column, value in columns.items():
            if not np.isfinite(value).all():
                raise ValueError(f"{name} has a trained token whose {column} is not finite")


def _num_inputs(sample: Sample) -> int:
    """Response tokens that something is predicted from: those before the last trained one."""
    return int(np.flatnonzero(sample.tokens["trained"])[-1])


def _units(
    samples: Sequence[Sample], budget: int, share_prompt: bool, keep_groups: bool
) -> list[_Unit]:
    groups: dict[int, list[int]] = {}
    by_group = share_prompt or keep_groups
    for index, sample in enumerate(samples):
        if sample.tokens["trained"].any():
            groups.setdefault(sample.group_index if by_group else index, []).append(index)
    units: list[_Unit] = []
    for members in groups.values():
        prompt = len(samples[members[0]].prompt_ids)
        sizes = {m: _num_inputs(samples[m]) for m in members}
        longest_first = sorted(members, key=lambda m: (-sizes[m], m))
        # First fit keeps order when everything fits, so a whole group stays in one unit.
        parts = _first_fit([sizes[m] for m in longest_first], budget - prompt)
        for part in [range(len(members))] if keep_groups else parts:
            chosen = tuple(sorted(longest_first[i] for i in part))
            prompts = prompt * (1 if share_prompt else len(chosen))
            units.append(_Unit(chosen, prompts + sum(sizes[m] for m in chosen)))
    return units


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each size, in turn, into the first bin with room; an oversized one gets its own bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index, size in enumerate(sizes):
        place = next((b for b, free in enumerate(room) if size <= free), None)
        if place is None:
            bins.append([index])
            room.append(capacity - size if size <= capacity else -1)
        else:
            bins[place].append(index)
            room[place] -= size
    return bins


@dataclass(frozen=True, slots=True)
class _Segment:
    token_ids: Array  # [t]
    first_position: int
    parent: int


def _row(
    units: Sequence[_Unit],
    samples: Sequence[Sample],
    share_prompt: bool,
    weights: Array,
    references: Sequence[Array] | None,
) -> MicroBatch:
    segments: list[_Segment] = []
    predictors: list[Array] = []
    order: list[int] = []
    length = 0
    for unit in units:
        prompt = np.array(samples[unit.members[0]].prompt_ids, np.int32)
        parent, prompt_end = len(segments), length + len(prompt)
        if share_prompt:
            segments.append(_Segment(prompt, 0, -1))
            length = prompt_end
        for member in unit.members:
            sample = samples[member]
            inputs = sample.tokens["id"][: _num_inputs(sample)]
            if not share_prompt:
                segments.append(_Segment(np.concatenate([prompt, inputs]), 0, -1))
                length += len(prompt)
            elif len(inputs) > 0:
                segments.append(_Segment(inputs, len(prompt), parent))
            # Response token j is predicted by token j - 1; the first by the prompt's last.
            trained = np.flatnonzero(sample.tokens["trained"])
            predictors.append(np.where(trained > 0, length + trained - 1, prompt_end - 1))
            order.append(member)
            length += len(inputs)
    return _micro_batch(segments, predictors, order, samples, weights, references)


def _micro_batch(
    segments: Sequence[_Segment],
    predictors: Sequence[Array],
    order: Sequence[int],
    samples: Sequence[Sample],
    weights: Array,
    references: Sequence[Array] | None,
) -> MicroBatch:
    lengths = [len(s.token_ids) for s in segments]
    starts = [s.first_position for s in segments]
    masks = [samples[m].tokens["trained"] for m in order]
    trained = np.concatenate([samples[m].tokens[k] for m, k in zip(order, masks, strict=True)])
    sequences = np.repeat(np.array(order, np.int32), [int(mask.sum()) for mask in masks])
    advantages = [samples[m].advantages[k] for m, k in zip(order, masks, strict=True)]
    numbers = {index: n for n, index in enumerate(dict.fromkeys(s.group_index for s in samples))}
    group_of = np.array([numbers[s.group_index] for s in samples], np.int32)

    def column(of: Sequence[Array | None]) -> Array | None:
        chosen = [a[k] for m, k in zip(order, masks, strict=True) if (a := of[m]) is not None]
        return np.concatenate(chosen).astype(np.float32) if chosen else None

    return MicroBatch(
        token_ids=np.concatenate([s.token_ids for s in segments]).astype(np.int32),
        position_ids=np.concatenate(
            [np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=True)]
        ),
        segment_ids=np.repeat(np.arange(len(segments), dtype=np.int32), lengths),
        parents=np.array([s.parent for s in segments], np.int32),
        predictors=np.concatenate(predictors).astype(np.int32),
        targets=trained["id"].astype(np.int32),
        behaviour_logprobs=trained["logprob"].astype(np.float32),
        reference_logprobs=None if references is None else column(references),
        advantages=np.concatenate(advantages).astype(np.float32),
        weights=weights[sequences].astype(np.float64),
        versions=trained["version"].astype(np.int32),
        sequences=sequences,
        groups=group_of[sequences],
        returns=column([s.returns for s in samples]),
        old_values=column([s.values for s in samples]),
    )
