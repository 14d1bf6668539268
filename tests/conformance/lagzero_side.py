"""The vectors' batches and configurations as lagzero's own types."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from naive.objective import Batch, filled
from torch import Tensor

from lagzero.config import CorrectionConfig, KLConfig, LossConfig
from lagzero.losses.inputs import LossInputs, loss_inputs
from lagzero.losses.objective import make_loss
from lagzero.losses.reduce import reduce
from lagzero.prepare.pack import pack
from lagzero.prepare.weights import token_weights
from lagzero.types import TOKEN, MicroBatch, Sample

HERE = pathlib.Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def loss_config(config: dict[str, Any]) -> LossConfig:
    full = filled(config)
    parts = {"correction": CorrectionConfig(**full["correction"]), "kl": KLConfig(**full["kl"])}
    return LossConfig(**{**full, **parts})


def column(batch: Batch, name: str, dtype: torch.dtype, hole: float = math.nan) -> Tensor:
    """A column [N], with ``hole`` where the vectors say null."""
    return torch.tensor([hole if v is None else v for v in batch[name]], dtype=dtype)


def inputs_of(batch: Batch, dtype: torch.dtype, hole: float = math.nan) -> LossInputs:
    """What the loss knows of all tokens, trained or not; ``where`` leaves the latter out."""

    def real(name: str) -> Tensor | None:
        return None if batch.get(name) is None else column(batch, name, dtype, hole)

    advantages, behaviour = real("advantage"), real("behaviour")
    assert advantages is not None
    length = len(batch["trained"])
    return LossInputs(
        behaviour_logprobs=torch.full((length,), hole) if behaviour is None else behaviour,
        reference_logprobs=real("reference"),
        advantages=advantages,
        versions=torch.tensor(batch.get("version", [0] * length)),
        sequences=torch.tensor(batch["sequence"]),
        num_sequences=max(batch["sequence"]) + 1,
        version=batch.get("trainer_version", 0),
        proximal_logprobs=real("proximal"),
        groups=torch.tensor(batch.get("group", batch["sequence"])),
    )


def weights_of(batch: Batch, config: dict[str, Any]) -> Tensor:
    """The weight of every token [N], float64, 0 where it is not trained."""
    sequence, trained = np.array(batch["sequence"]), np.array(batch["trained"])
    lengths = np.bincount(sequence[trained], minlength=sequence.max() + 1)
    full = filled(config)
    per_sequence = token_weights(lengths, full["reduction"], full["constant"])
    return torch.tensor(np.where(trained, per_sequence[sequence], 0.0))


@dataclass
class Solved:
    """Lists with one entry a token, 0 where it is not trained, as in the vectors."""

    per_token: list[float]
    loss: float
    gradient: list[float]
    entropy_gradient: list[float]


def solve(
    batch: Batch, config: dict[str, Any], dtype: torch.dtype, hole: float = math.nan
) -> Solved:
    """One batch in one piece: loss of the selected tokens, weights, reduction, backward."""
    keep = torch.tensor(batch["trained"])
    logprobs = column(batch, "logprob", dtype, hole).requires_grad_()
    entropies = None
    if batch.get("entropy") is not None:
        entropies = column(batch, "entropy", dtype, hole).requires_grad_()
    per_token, _ = make_loss(loss_config(config))(
        logprobs[keep],
        None if entropies is None else entropies[keep],
        inputs_of(batch, dtype, hole).where(keep),
    )
    loss = reduce(per_token, weights_of(batch, config)[keep])
    loss.backward()
    spread = torch.zeros(len(keep), dtype=dtype).masked_scatter(keep, per_token.detach())
    return Solved(spread.tolist(), loss.item(), gradient_of(logprobs), gradient_of(entropies))


def gradient_of(leaf: Tensor | None) -> list[float]:
    return [] if leaf is None or leaf.grad is None else leaf.grad.tolist()


# --- through preparation and packing -----------------------------------------------------------


def samples_of(batch: Batch) -> list[Sample]:
    """The batch's sequences as samples; a token's id is its place in the batch."""
    sequence = np.array(batch["sequence"])
    samples: list[Sample] = []
    for index in range(sequence.max() + 1):
        places = np.flatnonzero(sequence == index)
        tokens = np.empty(len(places), TOKEN)
        tokens["id"] = places
        tokens["logprob"] = [_number(batch["behaviour"][t]) for t in places]
        tokens["version"] = [batch["version"][t] for t in places]
        tokens["trained"] = [batch["trained"][t] for t in places]
        group = batch["group"][places[0]]
        advantages = np.array([_number(batch["advantage"][t]) for t in places])
        samples.append(Sample(group, index, (1000 + group, 7), tokens, advantages, 0.0))
    return samples


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def rows_of(
    batch: Batch, config: dict[str, Any], budget: int, share_prompt: bool, order: Sequence[int]
) -> tuple[MicroBatch, ...]:
    """Pack the batch's samples, taken in ``order``, with the weights of the configuration."""
    samples = samples_of(batch)
    chosen = [samples[i] for i in order]
    full = filled(config)
    lengths = np.array([int(s.tokens["trained"].sum()) for s in chosen])
    references = None
    if batch.get("reference") is not None:
        references = [
            np.array([_number(batch["reference"][t]) for t in s.tokens["id"]]) for s in chosen
        ]
    weights = token_weights(lengths, full["reduction"], full["constant"])
    return pack(chosen, budget, share_prompt, weights, references)


def packed(
    batch: Batch,
    config: dict[str, Any],
    rows: Sequence[MicroBatch],
    leaf: Tensor,
    num_sequences: int,
) -> tuple[Tensor, dict[int, float]]:
    """The loss that some rows add, as a tensor, and the per-token losses by place in the batch."""
    loss_function = make_loss(loss_config(config))
    total, by_place = leaf.new_zeros(()), dict[int, float]()
    for row in rows:
        places = torch.tensor(row.targets.astype(np.int64))
        entropies = proximal = None
        if batch.get("entropy") is not None:
            entropies = column(batch, "entropy", leaf.dtype)[places]
        if batch.get("proximal") is not None:
            proximal = column(batch, "proximal", leaf.dtype)[places]
        inputs = loss_inputs(
            row,
            num_sequences,
            dtype=leaf.dtype,
            version=batch["trainer_version"],
            proximal_logprobs=proximal,
        )
        per_token, _ = loss_function(leaf[places], entropies, inputs)
        total = total + reduce(per_token, torch.as_tensor(row.weights))
        by_place |= dict(zip(row.targets.tolist(), per_token.tolist(), strict=True))
    return total, by_place
