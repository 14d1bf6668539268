"""One step's scored groups in, one packed batch out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lagzero.config import AdvantageConfig, KLConfig, LossConfig, TrainConfig
from lagzero.prepare.advantage import standardized
from lagzero.prepare.gae import with_critic
from lagzero.prepare.keep import Selection, first_fates, has_spread, select, usable_rewards
from lagzero.prepare.measure import (
    empty_batch,
    pack_metrics,
    penalty_metrics,
    rollout_metrics,
    sample_metrics,
    selection_metrics,
)
from lagzero.prepare.pack import pack
from lagzero.prepare.penalty import sample_kl
from lagzero.prepare.samples import make_samples, num_trained
from lagzero.prepare.weights import token_weights
from lagzero.types import Array, Batch, Sample, ScoredGroup

TokenScores = Callable[[Sequence[Sample]], Awaitable[Sequence[Array]]]
"""Gives one number to each token: one array [T] a sample, read at trained tokens. Advantages may
still be 0."""


@dataclass(frozen=True, slots=True)
class GroupPreparer:
    """Advantages, selection, weights and packing, as configured; satisfies ``Preparer``.

    A penalty k for the distance to the reference, from ``penalty.token_kl``, comes where
    ``kl.where`` says::

        reward      r_i' = r_i - kl.coefficient * sum_t k(behaviour_it, reference_it), before the
                    group's statistics and the decision whether it has spread; under ``gae`` each
                    token's own in r_it
        advantage   A_it' = A_it - kl.coefficient * k(behaviour_it, reference_it)
        loss        the reference log-probs travel in the micro-batches

    They travel with the preference loss and with ``advantage``, too, where they are measured.
    ``normalize_batch`` comes last.

    Args:
        advantage: how rewards become advantages. loss: the objective. train: the row budget.
        group_size: members of a full group; None: as many as arrive.
        reference_logprobs: under the reference policy, at the temperature that the behaviour
            log-probs were recorded at; None where the objective has no reference.
        values: of a critic, before the step, for ``gae`` and nothing else.

    Settings that cannot work together are refused by ``config_check``. Raises ValueError when
    there is no reference policy for a term that needs one, or no critic for ``gae``.
    """

    advantage: AdvantageConfig
    loss: LossConfig
    train: TrainConfig
    group_size: int | None = None
    reference_logprobs: TokenScores | None = None
    values: TokenScores | None = None

    def __post_init__(self) -> None:
        if self.loss.kl.coefficient > 0 and self.reference_logprobs is None:
            raise ValueError("a KL term needs a reference policy")
        if self._pairs and self.reference_logprobs is None:
            raise ValueError("loss.policy dpo needs a reference policy")
        if (self.advantage.estimator == "gae") != (self.values is not None):
            raise ValueError("advantage.estimator gae needs a critic, and nothing else has one")

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        """Return the batch of one step. Nothing to train gives a batch without rows.

        Raises ValueError when two groups have one index: they are two visits or a repeat.
        """
        if len({group.group.index for group in groups}) != len(groups):
            raise ValueError("two groups of one step have the same index")
        metrics = rollout_metrics(groups)
        rewards = [usable_rewards(group) for group in groups]
        if self._has_penalty("reward") and self.values is None:
            rewards, more = await self._penalised(groups, rewards)
            metrics |= more
        selections = [
            select(group, reward, self.advantage, self.group_size, self._pairs)
            for group, reward in zip(groups, rewards, strict=True)
        ]
        metrics |= selection_metrics(selections)
        samples = _samples(groups, selections)
        if not samples:
            return empty_batch(metrics)
        references = await self._references(samples) if self._scores_tokens else None
        if self.values is not None:
            samples, more = await self._with_critic(self.values, samples, references)
            metrics |= more
        if self._has_penalty("advantage") and references is not None:
            samples = _charged(samples, references, self.loss.kl)
        if self.advantage.normalize_batch:
            samples = _standardized(samples)
        lengths = num_trained(samples)
        rows = pack(
            samples,
            self.train.micro_batch_tokens,
            self.train.share_prompt,
            token_weights(lengths, self.loss.reduction, self.loss.constant),
            references if self._pairs or not self._has_penalty("reward") else None,
            keep_groups=self._pairs,
        )
        metrics |= sample_metrics(samples) | pack_metrics(rows, samples)
        num_tokens = int(lengths.sum())
        metrics["tokens/trained/count"] = float(num_tokens)
        return Batch(rows, len(samples), num_tokens, metrics)

    def useful(self, scored: ScoredGroup) -> bool:
        """Say whether a group can teach anything, by its rewards before any penalty."""
        return has_spread(scored)

    @property
    def _pairs(self) -> bool:
        return self.loss.policy == "dpo"

    def _has_penalty(self, where: str) -> bool:
        return self.loss.kl.coefficient > 0 and self.loss.kl.where == where

    @property
    def _scores_tokens(self) -> bool:
        """Whether the trained tokens themselves need reference log-probs."""
        before = self._has_penalty("reward") and self.values is None and not self._pairs
        return self.reference_logprobs is not None and not before

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
        kl = self.loss.kl
        distances = _distances(samples, await self._references(samples), kl)
        sums = iter([float(d.sum()) for d in distances])
        # Usable rollouts are the ones with a reward, and candidates keep their order.
        penalties = [
            np.array([np.nan if np.isnan(r) else next(sums) for r in reward], np.float64)
            for reward in rewards
        ]
        out = [
            reward - kl.coefficient * penalty
            for reward, penalty in zip(rewards, penalties, strict=True)
        ]
        return out, penalty_metrics(samples, distances, kl.coefficient)

    async def _with_critic(
        self, values: TokenScores, samples: Sequence[Sample], references: Sequence[Array] | None
    ) -> tuple[list[Sample], dict[str, float]]:
        """Give each trained token the advantage and return that the critic's values lead to."""
        expected = _one_each(await values(samples), samples, "the critic")
        kl, metrics = self.loss.kl, dict[str, float]()
        penalties = [np.zeros(len(s.tokens)) for s in samples]
        if self._has_penalty("reward") and references is not None:
            distances = _distances(samples, references, kl)
            penalties = [kl.coefficient * distance for distance in distances]
            metrics = penalty_metrics(samples, distances, kl.coefficient)
        gamma, lam = self.advantage.gamma, self.advantage.lam
        judged = [
            with_critic(sample, value, penalty, gamma, lam)
            for sample, value, penalty in zip(samples, expected, penalties, strict=True)
        ]
        return judged, metrics

    async def _references(self, samples: Sequence[Sample]) -> list[Array]:
        assert self.reference_logprobs is not None  # refused when the preparer was made
        return _one_each(await self.reference_logprobs(samples), samples, "the reference policy")


def _one_each(scores: Sequence[Array], samples: Sequence[Sample], whose: str) -> list[Array]:
    if [len(each) for each in scores] != [len(s.tokens) for s in samples]:
        raise ValueError(f"{whose} must return one number for every token of every sample")
    return list(scores)


def _distances(samples: Sequence[Sample], references: Sequence[Array], kl: KLConfig) -> list[Array]:
    return [sample_kl(s, r, kl.estimator) for s, r in zip(samples, references, strict=True)]


def _charged(samples: Sequence[Sample], references: Sequence[Array], kl: KLConfig) -> list[Sample]:
    """Subtract each token's penalty from its advantage."""
    return [
        replace(sample, advantages=sample.advantages - kl.coefficient * distance)
        for sample, distance in zip(samples, _distances(samples, references, kl), strict=True)
    ]


def _standardized(samples: Sequence[Sample]) -> list[Sample]:
    """Bring the advantages of all trained tokens together to mean 0 and deviation 1."""
    trained = [s.tokens["trained"] for s in samples]
    joined = standardized(
        np.concatenate([s.advantages[t] for s, t in zip(samples, trained, strict=True)])
    )
    out: list[Sample] = []
    first = 0
    for sample, mask in zip(samples, trained, strict=True):
        advantages = np.zeros(len(mask))
        advantages[mask] = joined[first : first + int(mask.sum())]
        first += int(mask.sum())
        out.append(replace(sample, advantages=advantages))
    return out


def _samples(groups: Sequence[ScoredGroup], selections: Sequence[Selection]) -> list[Sample]:
    """Join the groups' samples in start order, whatever order the groups arrived in."""
    pairs = sorted(zip(groups, selections, strict=True), key=lambda pair: pair[0].group.index)
    return [
        sample
        for group, chosen in pairs
        for sample in make_samples(group, chosen.fates, chosen.rewards, chosen.advantages)
    ]
