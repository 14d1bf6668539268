"""Tiny random models of five families, and samples for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lagzero.losses.inputs import LossInputs
from lagzero.numerics.attention import ATTENTION, register
from lagzero.train.model import Policy
from lagzero.types import Sample, given_tokens, sampled_tokens

VOCABULARY = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _module(family: str, **changes: Any) -> Any:
    sizes = {**_SIZES, **changes}
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**sizes))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes))
        case "gemma3":
            layers = ["sliding_attention", "full_attention", "sliding_attention"]
            return Gemma3ForCausalLM(
                Gemma3TextConfig(
                    head_dim=8,
                    sliding_window=4,
                    layer_types=layers,
                    query_pre_attn_scalar=8,
                    **sizes,
                )
            )
        case "gpt2":
            return GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=VOCABULARY,
                    n_positions=64,
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    bos_token_id=1,
                    eos_token_id=2,
                )
            )
        case "opt":
            return OPTForCausalLM(
                OPTConfig(
                    vocab_size=VOCABULARY,
                    max_position_embeddings=64,
                    hidden_size=32,
                    word_embed_proj_dim=32,
                    ffn_dim=48,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    dropout=0.1,
                    bos_token_id=1,
                    eos_token_id=2,
                    pad_token_id=0,
                )
            )
        case _:
            raise ValueError(family)


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    """A function (family, dtype, **config changes) -> policy, the same weights each time."""

    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Policy:
        register()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            module = _module(family, **changes)
            # Larger than the usual start, so that distributions are far from uniform.
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.ndim >= 2:
                        parameter.mul_(4.0)
        module = module.to(dtype).eval()
        module.set_attn_implementation(ATTENTION)
        return Policy(module, _tokenizer())

    return make


@pytest.fixture
def model_folder(tmp_path: Path, make_policy: Callable[..., Policy]) -> Callable[..., Path]:
    """A function (family) -> folder that plain transformers wrote."""

    def make(family: str = "llama", **changes: Any) -> Path:
        policy = make_policy(family, **changes)
        policy.module.set_attn_implementation("sdpa")
        folder = tmp_path / f"model-{family}"
        policy.module.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """A function (groups, members, seed) -> samples of mixed lengths, some with observations."""

    def make(
        groups: int = 3, members: int = 3, seed: int = 0, version: int = 0, gaps: bool = True
    ) -> list[Sample]:
        rng = np.random.default_rng(seed)
        out: list[Sample] = []
        for group in range(groups):
            prompt = tuple(int(i) for i in rng.integers(3, VOCABULARY, 3 + 4 * group))
            for member in range(members):
                num = int(rng.integers(1, 12))
                ids = rng.integers(3, VOCABULARY, num).tolist()
                logprobs = (-4 + rng.normal(0, 0.3, num)).clip(max=-0.01).tolist()
                tokens = sampled_tokens(ids, logprobs, [version] * num)
                if gaps and num > 4 and member == 1:  # a tool answered in the middle
                    tokens[2:4] = given_tokens(ids[2:4])
                advantages = rng.normal(size=num).astype(np.float32)
                out.append(Sample(group, member, prompt, tokens, advantages, 1.0))
        return out

    return make


@pytest.fixture
def policy_gradient() -> Callable[..., Any]:
    """The plainest loss: -advantage * log-prob, with an entropy term if it carries a gradient."""

    def loss(
        logprobs: torch.Tensor, entropies: torch.Tensor | None, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        assert entropies is not None
        per_token = -inputs.advantages * logprobs
        if entropies.requires_grad:
            per_token = per_token - 0.1 * entropies
        return per_token, {"policy/entropy": (entropies.detach(), "mean")}

    return loss
