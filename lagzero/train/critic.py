"""A critic: a linear head that turns hidden states into values, and a policy that learns with it.

The head stands on a trunk of its own, of the policy's architecture, or on the policy's. It is no
part of the policy: neither the engines nor the saved policy folder see it.
"""

# torch's and transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from lagzero.config import CriticConfig, TrainConfig
from lagzero.errors import LagzeroError
from lagzero.losses.reduce import Metrics, reduce, reduce_metrics
from lagzero.losses.value import explained_variance, value_loss
from lagzero.prepare.pack import pack, unpack
from lagzero.train.model import Policy, model_source
from lagzero.train.optimizer import Optimizer
from lagzero.train.rows import predictor_hidden
from lagzero.train.step import LocalTrainer
from lagzero.types import Array, Batch, MicroBatch, Sample, StepStats

_PREFIX = "critic."


class Critic:
    """A value function V = w . h + b of the hidden state h that a trained token is predicted from.

    The head is float32 and starts at 0, so that the first step's advantages are those of the
    rewards alone. Without ``config.shared`` trunk and head are trained together by ``learn``, with
    ``config.optimizer``. With it the trunk belongs to a trainer, of whose loss this is the
    ``Auxiliary`` term; the head has an optimiser with the policy's settings, ``train.optimizer``.

    Args:
        trunk: the critic's own model, or the policy.
        config: the critic's settings. train: passes, row budget and the policy's optimiser.
        total_steps: length of the learning-rate schedule.
        master_weights: keep float32 weights when the trunk is of a smaller type.
    """

    def __init__(
        self,
        trunk: Policy,
        config: CriticConfig,
        train: TrainConfig,
        *,
        total_steps: int = 1,
        master_weights: bool = True,
    ):
        width = trunk.module.get_output_embeddings().weight.shape[1]
        self.head = torch.nn.Linear(width, 1, device=trunk.device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.shared = config.shared
        self._trunk = trunk
        self._config = config
        self._train = train
        parameters = {f"head.{name}": p for name, p in self.head.named_parameters()}
        if not self.shared:
            parameters |= _below_the_head(trunk)
        self._optimizer = Optimizer(
            parameters,
            train.optimizer if self.shared else config.optimizer,
            master_weights,
            total_steps,
            train.passes,
        )

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[Array]:
        """Return one float32 array [T] a sample, as the critic is now; NaN if not trained."""
        rows = pack(
            samples,
            self._train.micro_batch_tokens,
            self._train.share_prompt,
            np.zeros(len(samples)),
        )
        found = [self._values(predictor_hidden(self._trunk, row)).cpu().numpy() for row in rows]
        return unpack(found, rows, samples)

    def learn(self, batch: Batch) -> dict[str, float]:
        """Take ``train.passes`` updates of the critic alone; a shared trunk stays as it is.

        Raises LagzeroError for a gradient that is not finite; its update changes nothing.
        """
        parts: list[Metrics] = []
        loss, norm = 0.0, 0.0
        for _ in range(self._train.passes):
            self._optimizer.clear()
            for row in batch.micro_batches:
                with torch.set_grad_enabled(not self.shared):
                    hidden = predictor_hidden(self._trunk, row)
                per_token, metrics = self._loss(row, hidden)
                row_loss = reduce(per_token, torch.as_tensor(row.weights, device=per_token.device))
                row_loss.backward()
                loss += float(row_loss.detach())
                parts.append(metrics)
            norm = self._optimizer.step()
        return {
            **reduce_metrics(parts),
            "train/loss": loss / self._train.passes,
            "value/grad_norm": norm,
        }

    def term(self, row: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        """Return ``config.coefficient`` times the value loss [N], and its metrics."""
        per_token, metrics = self._loss(row, hidden)
        return self._config.coefficient * per_token, metrics

    def update(self) -> None:
        """Update the head with the gradients that the policy's rows have left in it."""
        self._optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return weights, moments and step count, from which ``load_state_dict`` resumes."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``state_dict`` returned. Raises LagzeroError where it does not fit."""
        self._optimizer.load_state_dict(state)

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden.float()).squeeze(-1)

    def _loss(self, row: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        if row.old_values is None or row.returns is None:
            raise ValueError("a critic learns from returns, and the batch has none")
        values = self._values(hidden)
        old, returns = (
            torch.as_tensor(column, device=values.device)
            for column in (row.old_values, row.returns)
        )
        return value_loss(values, old, returns, self._config.clip)


class ActorCritic:
    """A policy's trainer and its critic, which step on the same batches as one trainer.

    In the first ``warmup_steps`` steps only the critic learns. They count as versions, of one and
    the same policy.
    """

    def __init__(self, trainer: LocalTrainer, critic: Critic, warmup_steps: int = 0):
        self.critic = critic
        self._trainer = trainer
        self._warmup_steps = warmup_steps

    @property
    def version(self) -> int:
        """Policy version of the weights as they are."""
        return self._trainer.version

    def step(self, batch: Batch) -> StepStats:
        """Take one step of policy and critic; an empty batch changes nothing.

        Raises LagzeroError as ``LocalTrainer.step`` does.
        """
        if batch.num_trained_tokens == 0:
            return self._trainer.step(batch)
        if self.version < self._warmup_steps:
            self._trainer.version += 1  # first: a step that fails half way must not count as none
            stats = StepStats(self.version, self.critic.learn(batch))
        else:
            stats = self._trainer.step(batch)
            if not self.critic.shared:
                stats = StepStats(stats.version, {**self.critic.learn(batch), **stats.metrics})
        return StepStats(stats.version, {**stats.metrics, **_explained(batch)})

    def state_dict(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors and JSON values that ``load_state_dict`` resumes from, bit for bit."""
        tensors, values = self._trainer.state_dict()
        critic = {f"{_PREFIX}{name}": t for name, t in self.critic.state_dict().items()}
        return {**tensors, **critic}, values

    def load_state_dict(
        self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
    ) -> None:
        """Take over weights, moments, schedules and version. Raises LagzeroError if they differ."""
        critic = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
        policy = {n: t for n, t in tensors.items() if not n.startswith(_PREFIX)}
        self.critic.load_state_dict(critic)
        self._trainer.load_state_dict(policy, values)


def load_head(critic: Critic, path: str) -> None:
    """Start the head as that of the reward model at ``path``; a plain language model has none.

    Raises LagzeroError for a classifier with more outputs than one.
    """
    source = model_source(path)
    names: list[str] = AutoConfig.from_pretrained(source).architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return
    module: Any = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32)
    outputs = int(module.score.weight.shape[0])
    if outputs != 1:
        raise LagzeroError(
            f"critic.path: {path!r} has {outputs} outputs; a critic starts from a language model "
            "or from a reward model with one"
        )
    with torch.no_grad():
        critic.head.weight.copy_(module.score.weight)
        if module.score.bias is not None:
            critic.head.bias.copy_(module.score.bias)


def _below_the_head(trunk: Policy) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters that hidden states depend on: not those of an untied vocabulary head."""
    return {
        f"trunk.{name}": p
        for name, p in trunk.module.base_model.named_parameters()
        if p.requires_grad
    }


def _explained(batch: Batch) -> dict[str, float]:
    """Measure the values before the step against the returns."""
    old = [row.old_values for row in batch.micro_batches if row.old_values is not None]
    returns = [row.returns for row in batch.micro_batches if row.returns is not None]
    share = explained_variance(*(torch.from_numpy(np.concatenate(c)) for c in (old, returns)))
    return {} if share is None else {"value/explained_variance": share}
