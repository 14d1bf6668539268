"""One step's scored groups in, one packed batch out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lagzero.config import AdvantageConfig, LossConfig, TrainConfig
from lagzero.prepare.keep import Selection, first_fates, select, usable_rewards
from lagzero.prepare.measure import (
    empty_batch,
    pack_metrics,
    rollout_metrics,
    sample_metrics,
    selection_metrics,
)
from lagzero.prepare.pack import pack
from lagzero.prepare.penalty import sequence_kl
from lagzero.prepare.samples import make_samples, num_trained
from lagzero.prepare.weights import token_weights
from lagzero.types import Array, Batch, Sample, ScoredGroup

ReferenceLogprobs = Callable[[Sequence[Sample]], Awaitable[Sequence[Array]]]
"""Scores samples under the reference policy: one array [T] a sample, read at trained tokens,
under the temperature that the behaviour log-probs were recorded at. Advantages may still be 0."""


@dataclass(frozen=True, slots=True)
class GroupPreparer:
    """Advantages, selection, weights and packing, as configured; satisfies ``Preparer``.

    With ``kl.where: reward`` the reward that enters the group's statistics (and that decides
    whether a group has spread) is, over the T trained tokens of rollout i::

        r_i' = r_i - kl.coefficient * sum_t k(behaviour_it, reference_it)

    with k from ``penalty.sequence_kl``. With ``kl.where: loss`` the reference log-probs travel in
    the micro-batches instead.

    Settings that cannot work together are refused by ``config_check``. Raises ValueError when a KL
    term has no reference policy to be measured against.
    """

    advantage: AdvantageConfig
    loss: LossConfig
    train: TrainConfig
    group_size: int | None = None  # members of a full group; None: as many as arrive
    reference_logprobs: ReferenceLogprobs | None = None

    def __post_init__(self) -> None:
        if self.loss.kl.coefficient > 0 and self.reference_logprobs is None:
            raise ValueError("a KL term needs a reference policy")

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        """Return the batch of one step. Nothing to train gives a batch without rows.

        Raises ValueError when two groups have one index: they are two visits or a repeat.
        """
        if len({group.group.index for group in groups}) != len(groups):
            raise ValueError("two groups of one step have the same index")
        metrics = rollout_metrics(groups)
        rewards = [usable_rewards(group) for group in groups]
        if self.loss.kl.coefficient > 0 and self.loss.kl.where == "reward":
            rewards, penalty_metrics = await self._penalised(groups, rewards)
            metrics |= penalty_metrics
        selections = [
            select(group, reward, self.advantage, self.group_size)
            for group, reward in zip(groups, rewards, strict=True)
        ]
        metrics |= selection_metrics(selections)
        samples = _samples(groups, selections)
        if not samples:
            return empty_batch(metrics)
        references = None
        if self.loss.kl.coefficient > 0 and self.loss.kl.where == "loss":
            references = await self._references(samples)
        lengths = num_trained(samples)
        rows = pack(
            samples,
            self.train.micro_batch_tokens,
            self.train.share_prompt,
            token_weights(lengths, self.loss.reduction, self.loss.constant),
            references,
        )
        metrics |= sample_metrics(samples) | pack_metrics(rows, samples)
        num_tokens = int(lengths.sum())
        metrics["tokens/trained/count"] = float(num_tokens)
        return Batch(rows, len(samples), num_tokens, metrics)

    async def _penalised(
        self, groups: Sequence[ScoredGroup], rewards: Sequence[Array]
    ) -> tuple[list[Array], dict[str, float]]:
        """Subtract each usable rollout's KL to the reference from its reward."""
        nothing = [np.zeros(len(r)) for r in rewards]
        candidates = [
            make_samples(group, first_fates(group), reward, zeros)
            for group, reward, zeros in zip(groups, rewards, nothing, strict=True)
        ]
        samples = [sample for group in candidates for sample in group]
        if not samples:
            return list(rewards), {}
        references = await self._references(samples)
        divergences = [
            sequence_kl(
                sample.tokens["logprob"][sample.tokens["trained"]],
                reference[sample.tokens["trained"]],
                self.loss.kl.estimator,
            )
            for sample, reference in zip(samples, references, strict=True)
        ]
        left = iter(divergences)
        out: list[Array] = []
        for reward in rewards:
            # Usable rollouts are the ones with a reward, and candidates keep their order.
            kl = np.array([np.nan if np.isnan(r) else next(left) for r in reward], np.float64)
            out.append(reward - self.loss.kl.coefficient * kl)
        num_tokens = float(num_trained(samples).sum())
        return out, {
            "reward/kl_per_sequence/mean": float(np.mean(divergences)),
            "reward/kl_per_token/mean": float(np.sum(divergences)) / num_tokens,
            "reward/penalised/mean": float(np.nanmean(np.concatenate(out))),
        }

    async def _references(self, samples: Sequence[Sample]) -> list[Array]:
        assert self.reference_logprobs is not None  # refused when the preparer was made
        references = list(await self.reference_logprobs(samples))
        if [len(r) for r in references] != [len(s.tokens) for s in samples]:
            raise ValueError("the reference policy must return one log-prob for every token")
        return references


def _samples(groups: Sequence[ScoredGroup], selections: Sequence[Selection]) -> list[Sample]:
    """Join the groups' samples in start order, whatever order the groups arrived in."""
    pairs = sorted(zip(groups, selections, strict=True), key=lambda pair: pair[0].group.index)
    return [
        sample
        for group, chosen in pairs
        for sample in make_samples(group, chosen.fates, chosen.rewards, chosen.advantages)
    ]
