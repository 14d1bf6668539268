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
    """

    behaviour_logprobs: Tensor  # [N] nats
    reference_logprobs: Tensor | None  # [N] nats
    advantages: Tensor  # [N]
    versions: Tensor  # [N] int, policy version that sampled the token
    sequences: Tensor  # [N] int64, in [0, num_sequences)
    num_sequences: int

    def __post_init__(self) -> None:
        columns = [self.behaviour_logprobs, self.advantages, self.versions, self.sequences]
        if self.reference_logprobs is not None:
            columns.append(self.reference_logprobs)
        shapes = {tuple(c.shape) for c in columns}
        if len(shapes) != 1 or self.advantages.ndim != 1:
            raise ValueError(f"loss inputs are arrays [N] of one length, not {sorted(shapes)}")

    def where(self, keep: Tensor) -> LossInputs:
        """Return the inputs of the tokens that ``keep`` [N] bool selects.

        Masking is selection, before any arithmetic: NaN, inf or sentinel values in the tokens left
        out can reach neither the loss nor, through 0 * inf, the gradient. Select the log-probs with
        the same mask: ``loss(logprobs[keep], None, inputs.where(keep))``.
        """
        reference = self.reference_logprobs
        return LossInputs(
            self.behaviour_logprobs[keep],
            None if reference is None else reference[keep],
            self.advantages[keep],
            self.versions[keep],
            self.sequences[keep],
            self.num_sequences,
        )


def loss_inputs(
    row: MicroBatch,
    num_sequences: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LossInputs:
    """Move what the loss reads of one packed row to a device.

    ``num_sequences`` is the step's (``Batch.num_sequences``); ``dtype`` is of the real columns.
    """

    def real(array: object) -> Tensor:
        return torch.as_tensor(array).to(device=device, dtype=dtype)

    return LossInputs(
        behaviour_logprobs=real(row.behaviour_logprobs),
        reference_logprobs=(
            None if row.reference_logprobs is None else real(row.reference_logprobs)
        ),
        advantages=real(row.advantages),
        versions=torch.as_tensor(row.versions).to(device),
        sequences=torch.as_tensor(row.sequences).to(device=device, dtype=torch.int64),
        num_sequences=num_sequences,
    )
