"""Models that mix the sequences of a packed row are refused at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from lagzero.config import ModelConfig
from lagzero.errors import LagzeroError
from lagzero.numerics.attention import ATTENTION
from lagzero.train.check_model import check_model
from lagzero.train.model import Policy, load_policy

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
STATE: dict[str, Any] = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}


def module(family: str) -> Any:
    match family:
        case "qwen3-next":
            return Qwen3NextForCausalLM(
                Qwen3NextConfig(
                    layer_types=["linear_attention", "full_attention"],
                    linear_num_value_heads=4,
                    linear_num_key_heads=2,
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                    shared_expert_intermediate_size=16,
                    **EXPERTS,
                    **SMALL,
                )
            )
        case "lfm2":
            return Lfm2ForCausalLM(Lfm2Config(layer_types=["conv", "full_attention"], **SMALL))
        case "falcon-h1":
            return FalconH1ForCausalLM(
                FalconH1Config(mamba_d_ssm=32, mamba_n_heads=4, head_dim=8, **STATE, **SMALL)
            )
        case "bamba":
            return BambaForCausalLM(
                BambaConfig(attn_layer_indices=[1], mamba_n_heads=8, **STATE, **SMALL)
            )
        case "mamba":
            return MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2))
        case "bloom":
            return BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))
        case "llama4":
            return Llama4ForCausalLM(Llama4TextConfig(head_dim=8, num_local_experts=2, **SMALL))
        case "mistral":
            return MistralForCausalLM(MistralConfig(sliding_window=4, **SMALL))
        case "qwen3-moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, **SMALL))
        case _:
            raise ValueError(family)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3-next", "only 1 of its 2 layers use lagzero's attention"),
        ("lfm2", "only 1 of its 2 layers"),
        ("bamba", "only 1 of its 2 layers"),
        ("mamba", "only 0 of its 2 layers"),
        ("bloom", "only 0 of its 2 layers"),
        ("falcon-h1", "its layers mix sequences"),  # attention and a state side by side
        ("llama4", "it fails on a packed row"),
    ],
)
def test_a_model_that_mixes_sequences_is_refused_at_load(
    family: str, reason: str, make_policy: Callable[..., Policy], tmp_path: Path
):
    torch.manual_seed(0)
    model = module(family)
    model.save_pretrained(tmp_path)
    make_policy().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(LagzeroError, match=f"{type(model).__name__} cannot be trained: .*{reason}"):
        load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "gpt2", "opt", "mistral", "qwen3-moe"]
)
def test_models_of_attention_layers_pass_and_stay_as_they_are(
    family: str, dtype: torch.dtype, make_policy: Callable[..., Policy]
):
    """Sliding windows of 4 and experts included; weights are 4 times their usual size."""
    if family in ("mistral", "qwen3-moe"):
        torch.manual_seed(0)
        model = module(family).to(dtype).eval()
        model.set_attn_implementation(ATTENTION)
        policy = Policy(model, None)
    else:
        policy = make_policy(family, dtype)
    check_model(policy)
    assert policy.module.config._attn_implementation == ATTENTION


def test_mixing_as_small_as_5e_4_is_found_in_float32(make_policy: Callable[..., Policy]):
    """Each token takes a little of the one before it in the row, whosever that is."""
    policy = make_policy()

    def leak(layer: object, args: object, out: torch.Tensor) -> torch.Tensor:
        return out + 5e-4 * torch.roll(out, 1, dims=1)

    hook = policy.module.base_model.layers[0].register_forward_hook(leak)
    with pytest.raises(LagzeroError, match="mix sequences"):
        check_model(policy)
    hook.remove()
    check_model(policy)


def test_the_models_attention_is_put_back_when_its_own_forward_fails(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
):
    policy = make_policy()
    base = policy.module.base_model
    forward = base.forward

    def only_flat(*args: Any, **kwargs: Any) -> Any:
        if "position_ids" not in kwargs:
            raise KeyError("position_ids")
        return forward(*args, **kwargs)

    monkeypatch.setattr(base, "forward", only_flat)
    with pytest.raises(LagzeroError, match=r"KeyError: 'position_ids'"):
        check_model(policy)
    assert policy.module.config._attn_implementation == ATTENTION
