"""What AdamW's mean square becomes in few bits, rounded to the nearest or at random.

    python bench/moments.py

Gradients are standard normal, so the mean square should be 1; in float32 it has a spread of
sqrt(2 x 0.001 / 2) = 0.032 by the gradients themselves. 8 bits are those of float8_e4m3fn.
"""

from __future__ import annotations

import argparse

import torch

from lagzero.numerics.rounding import round_at_random

_TYPES = {"bfloat16": (torch.bfloat16, 16), "8 bits": (torch.float8_e4m3fn, 20)}  # bits dropped


def main() -> None:
    """Print mean and spread of many mean squares for each way to keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=1 << 14)
    parser.add_argument("--updates", type=int, default=6000)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    ways = ["float32", *(f"{name}, {how}" for name in _TYPES for how in ("nearest", "at random"))]
    squares = {way: torch.ones(options.weights) for way in ways}
    for _ in range(options.updates):
        grad = torch.randn(options.weights, generator=generator)
        for way, before in squares.items():
            after = before + 0.001 * (grad.square() - before)
            squares[way] = _kept(after, way, generator)
    for way, square in squares.items():
        print(f"{way:20s} mean {square.mean():.3f}  spread {square.std():.3f}")


def _kept(wide: torch.Tensor, way: str, generator: torch.Generator) -> torch.Tensor:
    if way == "float32":
        return wide
    name, how = way.split(", ")
    dtype, dropped = _TYPES[name]
    if how == "nearest":
        return wide.to(dtype).float()
    draws = torch.randint(0, 1 << dropped, wide.shape, dtype=torch.int32, generator=generator)
    if dtype == torch.bfloat16:
        rounded = torch.empty_like(wide, dtype=dtype)
        round_at_random(wide, rounded, (draws - (1 << 15)).short())
        return rounded.float()
    return ((wide.view(torch.int32) + draws) >> dropped << dropped).view(torch.float32)


if __name__ == "__main__":
    main()
