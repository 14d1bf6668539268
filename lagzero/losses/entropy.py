"""Entropy of next-token distributions."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy [...] in nats of the distributions that logits [..., V] stand for.

    H = -sum_v p_v log p_v, over the whole vocabulary (not the sampled token's -log p, whose
    spread is large). At least float32. Logits of -inf have probability 0 and add 0, to the
    gradient too. Between 0 and log V.

    A loss *subtracts* coefficient * H, so a coefficient > 0 raises entropy.
    """
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    # Both factors must be finite before they are multiplied: 0 * -inf is NaN.
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return -(logprobs.exp() * finite).sum(-1).clamp(max=0.0)
