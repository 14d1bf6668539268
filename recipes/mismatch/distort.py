"""A sampler that is made to differ from the trainer, and the link that keeps it so.

The trainer's weights stay as they are. The sampler holds a copy of them, and what is distorted is
the copy: its weights after each publication, or its logits at each token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from conditions import UNDISTORTED, Distortion

from lagzero.build_serving import Serving, build_serving
from lagzero.config import Config
from lagzero.protocols import WeightLink
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.sync.memory import copy_weights
from lagzero.train.model import Policy


def round_rows(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """Round each row of [M, N] to 2^bits - 1 levels, evenly spaced up to its largest magnitude."""
    top = 2 ** (bits - 1) - 1
    scale = matrix.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    return (matrix / scale).round() * scale


def round_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to ``bits`` significant bits, the leading one included: 8 is bfloat16's precision."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


@dataclass(slots=True)
class Sampler(Policy):
    """A copy of the trainer's policy whose logits are distorted."""

    distortion: Distortion = UNDISTORTED

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of hidden states [N, D], distorted."""
        logits = Policy.logits(self, hidden) / self.distortion.heat
        bits = self.distortion.logit_bits
        return logits if bits is None else round_bits(logits, bits)


class DistortedLink:
    """Copies the trainer's weights to the sampler, rounds them there, and announces them."""

    def __init__(self, policy: Policy, sampler: Sampler, inner: WeightLink, compute: ComputeThread):
        self._policy = policy
        self._sampler = sampler
        self._inner = inner
        self._compute = compute

    async def publish(self, version: int) -> None:
        """Make the sampler's weights the distorted ones of ``version``."""
        await self._compute.call(self._copy)
        await self._inner.publish(version)

    @torch.no_grad()
    def _copy(self) -> None:
        weights = self._sampler.weights()
        copy_weights(self._policy.weights(), weights)
        bits = self._sampler.distortion.weight_bits
        if bits is not None:
            for weight in weights.values():
                if weight.ndim == 2:
                    weight.copy_(round_rows(weight, bits))


def distorted_serving(
    config: Config, policy: Policy, compute: ComputeThread, distortion: Distortion
) -> Serving:
    """Return what samples: lagzero's own serving, of the policy itself or of a distorted copy."""
    if distortion == UNDISTORTED:
        return build_serving(config, policy, compute, print)
    copy = policy.cast_copy(policy.dtype)
    parts = {field.name: getattr(copy, field.name) for field in fields(copy)}
    sampler = Sampler(**parts, distortion=distortion)
    serving = build_serving(config, sampler, compute, print)
    return replace(serving, link=DistortedLink(policy, sampler, serving.link, compute))
