"""What one step's rollouts, selection and packing looked like, as named numbers.

The last word of a name is its statistic: ``mean``, ``std``, ``max``, ``min``, ``share`` (a mean of
0/1) or ``count``. A mean over nothing is left out rather than reported as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lagzero.prepare.advantage import is_zero_spread
from lagzero.prepare.keep import Fate, Selection, usable_rewards
from lagzero.types import Array, Batch, Finish, MicroBatch, Sample, ScoredGroup


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Measure rewards, lengths and endings over all rollouts of a step, trained or not.

    Rewards are the scorer's own, before any penalty, over scored rollouts. Lengths count the
    tokens that the policy sampled. ``reward/std`` is the population standard deviation over the
    step; ``groups/mixed_share`` is the share of groups with two or more usable members whose
    rewards differ.
    """
    rollouts = [r for g in groups for r in g.group.rollouts]
    scores = [s for g in groups for s in g.scores]
    values = np.array([s.value for s in scores if s.value is not None], np.float64)
    out = {"rollouts/count": float(len(rollouts)), "groups/count": float(len(groups))}
    if len(values):
        out["reward/mean"] = float(values.mean())
        out["reward/std"] = float(values.std())
        out["reward/max"] = float(values.max())
        out["reward/min"] = float(values.min())
        out["reward/positive_share"] = float((values > 0).mean())
    for name in sorted({name for s in scores for name in s.parts}):
        parts = [s.parts[name] for s in scores if name in s.parts]
        out[f"reward/part/{name}/mean"] = float(np.mean(parts))
    if rollouts:
        lengths = np.array([int(r.tokens["trained"].sum()) for r in rollouts])
        out["length/mean"] = float(lengths.mean())
        out["length/max"] = float(lengths.max())
        for finish in Finish:
            ended = [r.finish is finish for r in rollouts]
            out[f"finish/{finish.value}/share"] = float(np.mean(ended))
    if groups:
        mixed = [not is_zero_spread(usable_rewards(g)) for g in groups]
        out["groups/mixed_share"] = float(np.mean(mixed))
    return out


def selection_metrics(selections: Sequence[Selection]) -> dict[str, float]:
    """Count what became of every rollout (the counts add up to all of them) and of groups."""
    fates = [fate for s in selections for fate in s.fates]
    out = {f"rollouts/{fate.value}/count": float(fates.count(fate)) for fate in Fate}
    out["groups/short/count"] = float(sum(s.short for s in selections))
    out["groups/lone/count"] = float(sum(s.lone for s in selections))
    out["groups/zero_spread/count"] = float(sum(s.zero_spread for s in selections))
    return out


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Measure what is trained: advantages of samples, policy versions of trained tokens."""
    if not samples:
        return {}
    peaks = np.array([np.abs(s.advantages).max() for s in samples])
    versions = np.concatenate([s.tokens["version"][s.tokens["trained"]] for s in samples])
    return {
        "advantage/zero_share": float((peaks == 0).mean()),
        "advantage/abs_max": float(peaks.max()),
        "version/min": float(versions.min()),
        "version/max": float(versions.max()),
    }


def penalty_metrics(
    samples: Sequence[Sample], distances: Sequence[Array], coefficient: float
) -> dict[str, float]:
    """Measure a KL penalty in the reward: ``distances`` [T] a sample, before the coefficient."""
    sums = np.array([d.sum() for d in distances])
    rewards = np.array([s.reward for s in samples])
    num_tokens = sum(int(s.tokens["trained"].sum()) for s in samples)
    return {
        "reward/kl_per_sequence/mean": float(sums.mean()),
        "reward/kl_per_token/mean": float(sums.sum()) / num_tokens,
        "reward/penalised/mean": float((rewards - coefficient * sums).mean()),
    }


def pack_metrics(rows: Sequence[MicroBatch], samples: Sequence[Sample]) -> dict[str, float]:
    """Measure the packing. ``pack/saved_share``: input tokens that prompt sharing and leaving out
    last tokens saved, of prompt + response computed for each sample by itself."""
    row_tokens = [len(row.token_ids) for row in rows]
    alone = sum(len(s.prompt_ids) + len(s.tokens) for s in samples)
    out = {"pack/rows/count": float(len(rows)), "pack/tokens/count": float(sum(row_tokens))}
    if rows:
        out["pack/row_tokens/max"] = float(max(row_tokens))
        out["pack/saved_share"] = 1.0 - sum(row_tokens) / alone
    return out


def empty_batch(metrics: dict[str, float]) -> Batch:
    """Return the batch of a step in which nothing can be trained."""
    return Batch((), 0, 0, {**metrics, "tokens/trained/count": 0.0})
