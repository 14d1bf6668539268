"""A policy by Triton kernels: sampled and trained log-probs are the same, and a fault is found.

More tokens, on a GPU: python -m lagzero.train.verify --device cuda --tokens 10000 --family llama
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton comes for Linux only")

from lagzero.config import LoraConfig
from lagzero.errors import LagzeroError
from lagzero.tiles import kernels
from lagzero.train.exactness import make_exact, make_exact_by_tiles
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy
from lagzero.train.traffic import Traffic, compare, play
from lagzero.train.verify import tiny_policy

SHORT = Traffic(
    num_tokens=8,
    longest_prompt=12,
    longest_response=4,
    num_open=2,
    weight_change=0.2,
    take_back=0.1,
    release=0.0,
)


def policy_on(device: torch.device, family: str, dtype: torch.dtype) -> Policy:
    policy = tiny_policy(family, dtype)
    policy.module.to(device)
    return policy


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("qwen3", torch.bfloat16, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_sampled_and_trained_log_probs_are_the_same(device, family: str, dtype: torch.dtype):
    fast = policy_on(device, family, dtype)
    policy = make_exact_by_tiles(policy_on(device, family, dtype))
    assert "Triton" in str(policy.exact) and not policy.exact.native
    played = play(policy, SHORT, 1)
    found = compare(policy, played, SHORT, 1)
    assert found.num_tokens >= 8
    assert (found.num_different, found.gap_max, found.kl_k3) == (0, 0.0, 0.0)
    gap = compare(fast, played, SHORT, 1).gap_max
    assert 0 < gap < (1e-4 if dtype == torch.float32 else 1.0)


@pytest.mark.long
def test_they_are_with_adapters(device):
    policy = add_lora(policy_on(device, "llama", torch.float32), LoraConfig(rank=4))
    for parameter in policy.trainable().values():  # a new adapter would change nothing
        parameter.data += 0.1
    make_exact_by_tiles(policy)  # tries out some tokens


def test_products_that_depend_on_the_number_of_rows_are_caught(device, monkeypatch):
    def spoiled(inputs, weight, bias, wide=False):
        return F.linear(inputs, weight, bias) * (1 + 1e-6 * (inputs.numel() % 7))

    monkeypatch.setattr(kernels, "KERNELS", replace(kernels.KERNELS, multiply=spoiled))
    with pytest.raises(LagzeroError, match="exact does not hold for LlamaForCausalLM"):
        make_exact_by_tiles(policy_on(device, "llama", torch.float32))


def test_a_model_that_the_kernels_do_not_know_is_refused_on_a_gpu(monkeypatch):
    policy = tiny_policy("gemma3_text", torch.float32)
    monkeypatch.setattr(Policy, "device", property(lambda _: torch.device("cuda:0")))
    with pytest.raises(LagzeroError, match="they know llama, mistral, qwen2, qwen3, not gemma3"):
        make_exact(policy)
    policy = tiny_policy("llama", torch.float32)
    policy.module.model.layers[0].mlp.odd = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(LagzeroError, match=r"how model.layers.0.mlp.odd \(Bilinear\) multiplies"):
        make_exact(policy)
