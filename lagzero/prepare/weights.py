"""The denominator of a step: one weight for each sequence, fixed before the batch is cut."""

from __future__ import annotations

from typing import Literal

import numpy as np

from lagzero.types import Array

Reduction = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    num_trained_tokens: Array, reduction: Reduction, constant: float | None = None
) -> Array:
    """Return the weight w_i of every trained token of sequence i: [S] float64.

    The step's loss is sum_i w_i * (sum of sequence i's per-token losses), over all micro-batches
    and ranks, so neither cutting nor padding can change it. With L_i trained tokens and S the
    number of sequences that have any::

        token_mean     w_i = 1 / sum_j L_j
        sequence_mean  w_i = 1 / (S * L_i)
        constant       w_i = 1 / (S * constant)

    A sequence without trained tokens has weight 0 and does not count in S.

    Args:
        num_trained_tokens: [S] L_i >= 0.
        reduction: which of the three.
        constant: tokens, > 0; needed by ``constant`` alone.

    Raises ValueError when ``constant`` is missing or not positive, or a length is negative.
    Source: Liu et al. 2025, arXiv:2503.20783 (constant); Yu et al. 2025, arXiv:2503.14476
    (token_mean over the step).
    """
    lengths = np.asarray(num_trained_tokens, np.float64)
    if (lengths < 0).any():
        raise ValueError("a sequence cannot have fewer than 0 trained tokens")
    counts = lengths > 0
    weights = np.zeros(len(lengths))
    num_sequences = int(counts.sum())
    if num_sequences == 0:
        return weights
    match reduction:
        case "token_mean":
            weights[counts] = 1.0 / lengths.sum()
        case "sequence_mean":
            weights[counts] = 1.0 / (num_sequences * lengths[counts])
        case "constant":
            if constant is None or constant <= 0:
                raise ValueError("reduction constant needs a constant > 0 (tokens)")
            weights[counts] = 1.0 / (num_sequences * constant)
    return weights
