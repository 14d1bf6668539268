"""A policy's modules, made to compute by the Triton kernels."""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from lagzero.numerics.exact import Kernels, install
from lagzero.numerics.rows import embed_forward, linear_forward, norm_forward

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types all of whose sums over a row are linear layers, ``...RMSNorm`` and attention."""


def why_not(policy: Any) -> str | None:
    """Say why the kernels cannot run a policy, or None if they can."""
    kind = policy.module.config.model_type
    if kind not in FAMILIES:
        return f"they know {', '.join(FAMILIES)}, not {kind}"
    if policy.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the weights are {policy.dtype}"
    for name, module in policy.module.named_modules():
        own = [each for each in module.parameters(recurse=False) if each.ndim >= 2]
        known = isinstance(module, torch.nn.Embedding) or _is_linear(module)
        if own and not known:
            return f"they do not know how {name} ({type(module).__name__}) multiplies"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _is_linear(module: torch.nn.Module) -> bool:
    return type(module).forward is torch.nn.Linear.forward


def _norms(policy: Any) -> Iterator[Any]:
    for module in policy.module.modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield module


def install_tiles(policy: Any) -> Kernels:
    """Let a policy's modules compute by the kernels, in place; return the kernels.

    Attention does so under a ``RowPlan`` and the engine's plan. The head's logits are float32 with
    ``fp32_head``. ``why_not`` says nothing of the policy.
    """
    from lagzero.tiles.kernels import KERNELS  # brings in Triton

    install(policy.module.get_input_embeddings(), embed_forward, None)
    head = policy.module.get_output_embeddings()
    for module in policy.module.modules():
        if _is_linear(module):
            wide = policy.fp32_head and module is head
            install(module, linear_forward, (KERNELS, wide))
    for norm in _norms(policy):
        install(norm, norm_forward, (KERNELS, norm.variance_epsilon))
    return KERNELS
