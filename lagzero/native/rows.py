"""A policy's modules, made to compute as the C library decodes."""

from __future__ import annotations

from typing import Any

from lagzero.native.decoder import layer_linears, window_of
from lagzero.native.kernels import gate, kernels_of, rotate, rotate_back
from lagzero.native.modules import Attention
from lagzero.numerics.exact import install
from lagzero.numerics.rows import (
    attention_forward,
    embed_forward,
    linear_forward,
    mlp_forward,
    norm_forward,
)


def install_rows(policy: Any) -> None:
    """Let a policy's modules compute as its ``native`` decoder does, in place.

    Attention does so under a ``RowPlan``. The head's logits are float32 with ``fp32_head``.
    """
    module, eps = policy.module, policy.module.config.rms_norm_eps
    kernels = kernels_of(policy.products)
    install(module.get_output_embeddings(), linear_forward, (kernels, policy.fp32_head))
    install(module.get_input_embeddings(), embed_forward, None)
    install(module.model.norm, norm_forward, (kernels, eps))
    for layer in module.model.layers:
        for linear in layer_linears(layer):
            install(linear, linear_forward, (kernels, False))
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        if module.config.model_type == "qwen3":
            norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
        for norm in norms:
            install(norm, norm_forward, (kernels, eps))
        install(layer.mlp, mlp_forward, (gate, kernels.back))
        if not isinstance(layer.self_attn, Attention):  # whose arguments are others: it trains none
            how = (rotate, rotate_back), window_of(module.config, layer.self_attn)
            install(layer.self_attn, attention_forward, how)
