"""The modules of the models that the C library knows, without transformers' own.

A policy that only samples is decoded in C: of its modules are needed the tensors by name, sizes,
rotary angles, and a forward pass of a few tokens that shows that the library computes the same.
transformers' modelling gives all that for seconds of imports. These modules have its names of
attributes and parameters and do its operations in its order, so that the results are its bits.

Shapes: T tokens of the flat row, D model width, E head size.
"""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lagzero.numerics.attention import AttentionPlan

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary angles whose frequencies do not depend on the length of the row."""


class Norm(nn.Module):
    """weight * x / rms(x), over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute in float32, round to the type of ``inputs``, then scale."""
        wide = inputs.float()
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * factor).to(inputs.dtype)


class Rotary(nn.Module):
    """Angles by position, from frequencies that transformers computes, but for the plainest."""

    inv_freq: torch.Tensor  # [E / 2]

    def __init__(self, config: Any):
        super().__init__()
        kind, size = config.rope_parameters["rope_type"], head_size(config)
        if kind == "default":
            places = torch.arange(0, size, 2, dtype=torch.float) / size
            frequencies, scale = 1.0 / config.rope_parameters["rope_theta"] ** places, 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config)
        self.attention_scaling = scale
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(
        self, like: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [..., E] of positions [...], in the type of ``like``."""
        half = positions.unsqueeze(-1).float() * self.inv_freq
        angles = torch.cat((half, half), -1)
        scale = self.attention_scaling
        return (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)


class Attention(nn.Module):
    """Attention of one layer; the plan of the call does the attending."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        family, width, self.head_dim = config.model_type, config.hidden_size, head_size(config)
        self.layer_idx, self.scaling = layer, self.head_dim**-0.5
        self.sliding_window = _window(config, layer)
        biased = family in ("llama", "qwen3") and config.attention_bias
        inner, shared = (
            heads * self.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(width, inner, bias=biased or family == "qwen2")
        self.k_proj = nn.Linear(width, shared, bias=biased or family == "qwen2")
        self.v_proj = nn.Linear(width, shared, bias=biased or family == "qwen2")
        self.o_proj = nn.Linear(inner, width, bias=biased)
        self.q_norm = self.k_norm = nn.Identity()
        if family == "qwen3":
            self.q_norm = Norm(self.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, inputs: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan
    ) -> torch.Tensor:
        """Return [T, D] from inputs [T, D] and angles [T, E]."""
        query, key, value = (
            project(inputs).view(len(inputs), -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(self.q_norm(query), angles), _rotate(self.k_norm(key), angles)
        out = plan.attend(self.layer_idx, query, key, value, self.scaling, self.sliding_window)
        return self.o_proj(out.reshape(len(inputs), -1))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Any):
        super().__init__()
        biased = config.model_type == "llama" and config.mlp_bias
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=biased)
        self.up_proj = nn.Linear(*sizes, bias=biased)
        self.down_proj = nn.Linear(*reversed(sizes), bias=biased)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [T, D] from [T, D]."""
        return self.down_proj(F.silu(self.gate_proj(inputs)) * self.up_proj(inputs))


class Layer(nn.Module):
    """Attention, then the MLP, each over normalised inputs and added to them."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, inputs: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan
    ) -> torch.Tensor:
        """Return [T, D] from inputs [T, D]."""
        middle = inputs + self.self_attn(self.input_layernorm(inputs), angles, plan)
        return middle + self.mlp(self.post_attention_layernorm(middle))


class Body(nn.Module):
    """Everything but the head; ``rotary_emb`` is set by who makes it."""

    rotary_emb: Rotary

    def __init__(self, config: Any):
        super().__init__()
        # Made of a tensor: drawing numbers without memory would import torch's compiler.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        self.layers = nn.ModuleList(
            Layer(config, number) for number in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_plan: AttentionPlan,
        use_cache: bool,
    ) -> SimpleNamespace:
        """Return ``last_hidden_state`` [1, T, D] of ids [1, T]; the plan keeps what is cached."""
        hidden = self.embed_tokens(input_ids[0])
        angles = self.rotary_emb(hidden, position_ids[0])
        for layer in self.layers:
            hidden = layer(hidden, angles, attention_plan)
        return SimpleNamespace(last_hidden_state=self.norm(hidden).unsqueeze(0))


class CausalLM(nn.Module):
    """A model without weights yet: each parameter has its shape and no memory.

    ``config`` is transformers' configuration of one of ``decoder.FAMILIES``, whose rotary angles
    are of ``ROTARY_TYPES``.
    """

    generation_config: Any = None

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.model = Body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model.rotary_emb = Rotary(config)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def fill(self, weights: dict[str, torch.Tensor]) -> None:
        """Let the parameters be ``weights``, which has the names and shapes of all of them."""
        for name, tensor in weights.items():
            owner, _, last = name.rpartition(".")
            setattr(self.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    @property
    def base_model(self) -> Body:
        """Everything but the head."""
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table of embeddings."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head."""
        return self.lm_head


def head_size(config: Any) -> int:
    """Return the size of a head, which not all configurations name."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _window(config: Any, layer: int) -> int | None:
    """Return how many positions a token of a layer sees, its own included, or None for all."""
    match config.model_type:
        case "mistral":
            return config.sliding_window
        case "qwen2" | "qwen3" if config.layer_types[layer] == "sliding_attention":
            return config.sliding_window
        case _:
            return None


def _rotate(heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn heads [T, H, E] by angles [T, E]: numbers e and e + E/2 are one plane."""
    cosine, sine = (each.unsqueeze(1) for each in angles)
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat((-second, first), -1) * sine
