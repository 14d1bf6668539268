"""float32 numbers as a bfloat16 and the rest, and rounding to bfloat16 that is right on average."""

from __future__ import annotations

import torch

_DROPPED = 16  # bits that a float32 has after those of a bfloat16
_HALF = 1 << (_DROPPED - 1)


def join(rounded: torch.Tensor, rest: torch.Tensor, wide: torch.Tensor) -> None:
    """Write to ``wide`` the float32 numbers that ``split`` took apart."""
    wide.copy_(rounded).view(torch.int32).add_(rest)


def split(wide: torch.Tensor, rounded: torch.Tensor, rest: torch.Tensor) -> None:
    """Write float32 numbers to ``rounded``, their nearest bfloat16, and ``rest``, what is missing.

    As integers, wide = rounded 2^16 + rest: exactly, in 32 bits together. A number half way between
    two goes to the one away from 0, for which alone ``rest`` (-2^15 to 2^15 - 1) has room.

    Args:
        wide: [N], finite; overwritten.
        rounded: [N] bfloat16. rest: [N] int16.
    """
    rest.copy_(wide.view(torch.int32))  # the lower half
    _round(wide, rounded)


def round_at_random(wide: torch.Tensor, rounded: torch.Tensor, draws: torch.Tensor) -> None:
    """Write to ``rounded`` one of the two bfloat16 around each float32, which on average is it.

    A number that lies a share p of the way from the one nearer 0 to the other becomes the other
    with probability p, to within 2^-16. So what adds up in bfloat16 is not lost, however small its
    parts are. Source: stochastic rounding, as in Gupta et al. 2015.

    Args:
        wide: [N], finite; overwritten.
        rounded: [N] bfloat16. draws: [N] int16, uniform over all of them.
    """
    wide.view(torch.int32).add_(draws)
    _round(wide, rounded)


def _round(wide: torch.Tensor, rounded: torch.Tensor) -> None:
    bits = wide.view(torch.int32).add_(_HALF).bitwise_right_shift_(_DROPPED)
    rounded.view(torch.int16).copy_(bits)
