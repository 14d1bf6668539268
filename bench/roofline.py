"""What a step must cost at least: its matrix products alone, and reading the weights once.

Products are those of every linear layer, as plain torch calls on the layers' own tensors, one after
the other, so that each finds its weights as cold as in a real step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peers
import torch


def measure(policy: Any, steps: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the bounds of a rollout whose forward passes had ``steps`` (rows, rows of the head).

    ``matmul_s`` are the seconds of all its products, ``read_s`` those of reading the weights once
    a step at ``read_gb_per_s``; ``sizes`` lists (rows, seconds of one pass, GFLOP/s).
    """
    head = policy.module.get_output_embeddings().weight
    body = [
        module.weight
        for module in policy.module.modules()
        if isinstance(module, torch.nn.Linear) and module.weight is not head
    ]
    rows, head_rows = ([step[which] for step in steps] for which in (0, 1))
    sizes = _grid(max(rows + head_rows))
    with torch.inference_mode():
        body_s = [products_s(body, size) for size in sizes]
        head_s = [products_s([head], size) for size in sizes]
        speed = read_bytes_per_s([*body, head])
    count = sum(each.numel() for each in [*body, head])
    pass_s = [a + b for a, b in zip(body_s, head_s, strict=True)]
    matmul_s = sum(_between(n, sizes, body_s) for n in rows)
    matmul_s += sum(_between(n, sizes, head_s) for n in head_rows if n)
    return {
        "num_steps": len(steps),
        "matmul_s": matmul_s,
        "read_s": len(steps) * count * head.itemsize / speed,
        "read_gb_per_s": speed / 1e9,
        "weight_gb": count * head.itemsize / 1e9,
        "sizes": [
            (size, seconds, 2e-9 * size * count / seconds)
            for size, seconds in zip(sizes, pass_s, strict=True)
        ],
    }


def products_s(weights: Sequence[torch.Tensor], rows: int) -> float:
    """Return the seconds of ``rows`` rows times each of the weights."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(w.dtype) for w in weights}

    def run() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return peers.median_s(run)


def read_bytes_per_s(weights: Sequence[torch.Tensor]) -> float:
    """Return how fast all cores together read the weights from memory."""
    parts = [weight.view(-1) for weight in weights]

    def run() -> None:
        for part in parts:
            part.sum()

    return sum(part.nbytes for part in parts) / peers.median_s(run)


def _grid(largest: int) -> list[int]:
    """Return 1, 2, 4, ... and ``largest``."""
    return [1 << power for power in range(largest.bit_length()) if 1 << power < largest] + [largest]


def _between(rows: int, sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds at ``rows``, on the straight line between the sizes around it."""
    if rows <= sizes[0]:
        return seconds[0]
    above = next(place for place, size in enumerate(sizes) if size >= rows)
    low, high = sizes[above - 1], sizes[above]
    share = (rows - low) / (high - low)
    return seconds[above - 1] * (1 - share) + seconds[above] * share
