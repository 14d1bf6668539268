"""Policies with 8-bit linear layers: the engine's copy, and a trainer that computes with the same.

The embeddings, the head, norms and adapters keep their type, as does everything else that is no
``torch.nn.Linear`` (the experts of a mixture, for one).
"""

# transformers' and PEFT's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch

from lagzero.errors import LagzeroError
from lagzero.numerics.quantise import Kind, QuantisedLinear, rounded_linear
from lagzero.train.model import Policy


def quantisable(policy: Policy) -> dict[str, torch.nn.Linear]:
    """Return, by name, the linear layers whose weights an 8-bit engine stores in 8 bits.

    Raises LagzeroError for a model that has none.
    """
    head = set(policy.module.get_output_embeddings().modules())
    found = {
        name: module
        for name, module in policy.module.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module not in head
        and not any(part.startswith("lora_") for part in name.split("."))
    }
    if not found:
        raise LagzeroError(
            f"engine.weights: {type(policy.module).__name__} has no torch.nn.Linear besides its "
            "head, so there is nothing to store in 8 bits; set it to same"
        )
    return found


def quantised_copy(policy: Policy, kind: Kind, dtype: torch.dtype | None) -> Policy:
    """Return a copy for an engine: linear layers in 8 bits, other parameters cast to ``dtype``.

    None leaves those in their own types. Buffers stay as they are, as in ``Policy.cast_copy``.
    """
    twins = {id(each): QuantisedLinear(each, kind) for each in quantisable(policy).values()}
    # What deepcopy finds in its memo it does not copy: no second wide weight exists at any time.
    module, adapter = copy.deepcopy((policy.module, policy.adapter), {**twins})
    kept = {id(p) for twin in twins.values() for p in (twin.weight, twin.scale)}
    for parameter in module.parameters():
        if dtype is not None and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    module.requires_grad_(False)
    return replace(policy, module=module, adapter=adapter, native=None)


def compute_with_rounded(policy: Policy, kind: Kind) -> None:
    """Let a policy compute with the weights that ``quantised_copy`` would hold.

    The weights themselves stay as they are and get the straight-through gradient of
    ``rounded_linear``. The module is changed in place.
    """
    layers: dict[str, Any] = {**quantisable(policy)}
    for layer in layers.values():
        layer.forward = functools.partial(_rounded_forward, layer, kind)


def _rounded_forward(layer: Any, kind: Kind, inputs: torch.Tensor) -> torch.Tensor:
    return rounded_linear(inputs, layer.weight, layer.bias, kind)
