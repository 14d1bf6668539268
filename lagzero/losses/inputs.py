"""What a loss knows of each trained token besides its log-prob under the policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lagzero.types import MicroBatch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Per-token facts [N], none of which carries a gradient.

    A sequence ratio is taken over the tokens given here, so all trained tokens of a sequence must
    be in the same inputs; ``prepare.pack`` never tears a sequence.

    ``proximal_logprobs`` is None in the first update on a batch: the policy itself is then the
    proximal one. ``version`` is the trainer's before the step, so a token's lag is ``version``
    less its own.
    """

    behaviour_logprobs: Tensor  # [N] nats
    reference_logprobs: Tensor | None  # [N] nats
    advantages: Tensor  # [N]
    versions: Tensor  # [N] int, policy version that sampled the token
    sequences: Tensor  # [N] int64, in [0, num_sequences)
    num_sequences: int
    version: int = 0
    proximal_logprobs: Tensor | None = None  # [N] nats
    groups: Tensor | None = None  # [N] int64, number of the token's group in the step

    def __post_init__(self) -> None:
        columns = (
            self.behaviour_logprobs,
            self.reference_logprobs,
            self.advantages,
            self.versions,
            self.sequences,
            self.proximal_logprobs,
            self.groups,
        )
        shapes = {tuple(c.shape) for c in columns if c is not None}
        if len(shapes) != 1 or self.advantages.ndim != 1:
            raise ValueError(f"loss inputs are arrays [N] of one length, not {sorted(shapes)}")

    @property
    def lags(self) -> Tensor:
        """Return how many versions before the trainer's each token was sampled: [N], >= 0."""
        return (self.version - self.versions).clamp(min=0)

    def where(self, keep: Tensor) -> LossInputs:
        """Return the inputs of the tokens that ``keep`` [N] bool selects.

        Masking is selection, before any arithmetic: NaN, inf or sentinel values in the tokens left
        out can reach neither the loss nor, through 0 * inf, the gradient. Select the log-probs with
        the same mask: ``loss(logprobs[keep], None, inputs.where(keep))``.
        """

        def chosen(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[keep]

        return LossInputs(
            self.behaviour_logprobs[keep],
            chosen(self.reference_logprobs),
            self.advantages[keep],
            self.versions[keep],
            self.sequences[keep],
            self.num_sequences,
            self.version,
            chosen(self.proximal_logprobs),
            chosen(self.groups),
        )


def loss_inputs(
    row: MicroBatch,
    num_sequences: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    version: int = 0,
    proximal_logprobs: Tensor | None = None,
) -> LossInputs:
    """Move what the loss reads of one packed row to a device.

    ``num_sequences`` is the step's (``Batch.num_sequences``); ``dtype`` is of the real columns.
    ``version`` and ``proximal_logprobs`` are the trainer's, which the row cannot know.
    """

    def real(array: object) -> Tensor:
        return torch.as_tensor(array).to(device=device, dtype=dtype)

    def index(array: object) -> Tensor:
        return torch.as_tensor(array).to(device=device, dtype=torch.int64)

    return LossInputs(
        behaviour_logprobs=real(row.behaviour_logprobs),
        reference_logprobs=(
            None if row.reference_logprobs is None else real(row.reference_logprobs)
        ),
        advantages=real(row.advantages),
        versions=torch.as_tensor(row.versions).to(device),
        sequences=index(row.sequences),
        num_sequences=num_sequences,
        version=version,
        proximal_logprobs=proximal_logprobs,
        groups=index(row.groups),
    )
