"""One step on one device: packed rows in, new weights and metrics out.

The trainer is blind to the algorithm. It computes log-probs of the trained tokens, hands them to
the loss function that was passed in, and sums weight * per-token loss over all rows of the step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lagzero.config import TrainConfig
from lagzero.losses.inputs import loss_inputs
from lagzero.losses.objective import Loss, step_metrics
from lagzero.losses.reduce import Metrics, reduce
from lagzero.prepare.pack import pack, unpack
from lagzero.train.logprobs import chunked_logprobs
from lagzero.train.model import Policy, ReferenceScope
from lagzero.train.optimizer import Optimizer
from lagzero.train.rows import Auxiliary, on_device, predictor_hidden
from lagzero.types import Array, Batch, MicroBatch, Sample, StepStats


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one update on a batch came to."""

    loss: float
    metrics: list[Metrics]  # of each row
    logprobs: list[torch.Tensor]  # [N] of each row, before the update
    grad_norm: float
    forward_s: float
    backward_s: float
    optimizer_s: float


class LocalTrainer:
    """Takes optimiser steps on one policy. Not thread-safe: one thread calls it at a time.

    Args:
        policy: what is trained; its parameters that require gradients are.
        loss: per-token loss from log-probs, entropies and the row's facts.
        train: passes, row budget, chunk size and the optimiser's settings.
        temperature: of the rollouts; log-probs are of softmax(logits / temperature). At 0, greedy,
            the sampler records log-probs at temperature 1, and so does the trainer.
        total_steps: length of the learning-rate schedule.
        entropy_gradient: whether the loss needs entropies that carry a gradient.
        master_weights: keep float32 weights when the model is of a smaller type.
        reference: the frozen policy of the KL term, if there is one.
        auxiliary: a term to add to the loss, such as that of a critic on the policy's trunk.
        version: policy version of the weights as they are.
    """

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        train: TrainConfig,
        *,
        temperature: float = 1.0,
        total_steps: int = 1,
        entropy_gradient: bool = False,
        master_weights: bool = True,
        reference: ReferenceScope | None = None,
        auxiliary: Auxiliary | None = None,
        version: int = 0,
    ):
        self.policy = policy
        self.version = version
        self.optimizer = Optimizer(
            policy.trainable(), train.optimizer, master_weights, total_steps, train.passes
        )
        self._loss = loss
        self._train = train
        self._temperature = temperature or 1.0
        self._entropy_gradient = entropy_gradient
        self._reference = reference
        self._auxiliary = auxiliary

    def step(self, batch: Batch) -> StepStats:
        """Take one step of ``train.passes`` updates on the batch, which make one version together.

        The log-probs of the first pass, before any update, are the proximal ones of the others. An
        empty batch changes nothing, the version included.

        Raises LagzeroError for a gradient that is not finite; its update changes nothing. Should
        earlier ones of the step stand, the version says that the weights are no longer what it was.
        """
        if batch.num_trained_tokens == 0:
            return StepStats(self.version, {})
        started = time.perf_counter()
        passes: list[_Pass] = []
        proximal: Sequence[torch.Tensor | None] = [None] * len(batch.micro_batches)
        rate = self.optimizer.lr
        try:
            for _ in range(self._train.passes):
                passes.append(self._pass(batch, proximal))
                proximal = passes[0].logprobs
        finally:
            self.version += bool(passes)  # after a later pass that failed, too
        elapsed = time.perf_counter() - started
        num_tokens = sum(len(row.token_ids) for row in batch.micro_batches) * len(passes)
        return StepStats(
            self.version,
            {
                **step_metrics([part for each in passes for part in each.metrics]),
                "train/loss": sum(each.loss for each in passes) / len(passes),
                "train/grad_norm": passes[-1].grad_norm,
                "train/lr": rate,
                "train/num_updates": float(len(passes)),
                "train/num_tokens": float(num_tokens),
                "train/num_trained_tokens": float(batch.num_trained_tokens),
                "train/num_micro_batches": float(len(batch.micro_batches) * len(passes)),
                "train/forward_s": sum(each.forward_s for each in passes),
                "train/backward_s": sum(each.backward_s for each in passes),
                "train/optimizer_s": sum(each.optimizer_s for each in passes),
                "train/tok_per_s": num_tokens / elapsed,
            },
        )

    def _pass(self, batch: Batch, proximal: Sequence[torch.Tensor | None]) -> _Pass:
        """Make one update, from the gradient of every row of the batch."""
        by_kernels = self.policy.exact is not None and self.policy.exact.kernels is not None
        self.optimizer.begin(zeros=by_kernels)  # they add to gradients in place
        parts: list[Metrics] = []
        scored: list[torch.Tensor] = []
        loss, forward_s, backward_s = 0.0, 0.0, 0.0
        for row, anchors in zip(batch.micro_batches, proximal, strict=True):
            begun = time.perf_counter()
            row_loss, metrics, logprobs = self._row_loss(row, batch.num_sequences, anchors)
            loss += float(row_loss.detach())  # waits for the device, so the times are true
            forwarded = time.perf_counter()
            row_loss.backward()  # pyright: ignore[reportUnknownMemberType]
            parts.append(metrics)
            scored.append(logprobs)
            forward_s += forwarded - begun
            backward_s += time.perf_counter() - forwarded
        updating = time.perf_counter()
        norm = self.optimizer.step()
        if self._auxiliary is not None:
            self._auxiliary.update()
        updated_s = time.perf_counter() - updating
        return _Pass(loss, parts, scored, norm, forward_s, backward_s, updated_s)

    def _row_loss(
        self, row: MicroBatch, num_sequences: int, proximal: torch.Tensor | None
    ) -> tuple[torch.Tensor, Metrics, torch.Tensor]:
        """Return the row's share of the step's loss, metrics, and log-probs without gradient."""
        hidden = predictor_hidden(self.policy, row)
        logprobs, entropies = self._score(self.policy, row, hidden)
        inputs = loss_inputs(
            row,
            num_sequences,
            logprobs.device,
            logprobs.dtype,
            version=self.version,
            proximal_logprobs=proximal,
        )
        per_token, metrics = self._loss(logprobs, entropies, inputs)
        if self._auxiliary is not None:
            extra, more = self._auxiliary.term(row, hidden)
            per_token, metrics = per_token + extra, {**metrics, **more}
        weights = torch.as_tensor(row.weights, device=logprobs.device)
        return reduce(per_token, weights), metrics, logprobs.detach()

    def _score(
        self, policy: Policy, row: MicroBatch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies [N] of the row's trained tokens."""
        return chunked_logprobs(
            hidden,
            policy.logits,
            on_device(row.targets, policy.device),
            self._temperature,
            self._train.logprob_chunk_tokens,
            self._entropy_gradient,
            tail=policy.tail,
        )

    def _logprobs(self, policy: Policy, row: MicroBatch) -> Array:
        scored = self._score(policy, row, predictor_hidden(policy, row))
        return scored[0].float().cpu().numpy()

    @torch.no_grad()
    def logprobs(self, row: MicroBatch) -> Array:
        """Return the log-probs [N] float32 of a row's trained tokens under the policy as it is."""
        return self._logprobs(self.policy, row)

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Array]:
        """Return one float32 array [T] a sample, under the reference policy; NaN if not trained.

        Raises ValueError when the trainer was made without a reference.
        """
        if self._reference is None:
            raise ValueError("this trainer has no reference policy")
        rows = pack(
            samples,
            self._train.micro_batch_tokens,
            self._train.share_prompt,
            np.zeros(len(samples)),
        )
        with self._reference() as policy:
            values = [self._logprobs(policy, row) for row in rows]
        return unpack(values, rows, samples)

    def state_dict(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors and JSON values that ``load_state_dict`` resumes from, bit for bit."""
        return self.optimizer.state_dict(), {"version": self.version}

    def load_state_dict(
        self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
    ) -> None:
        """Take over weights, moments, schedule and version. Raises LagzeroError if they differ."""
        self.optimizer.load_state_dict(tensors)
        self.version = int(values["version"])
