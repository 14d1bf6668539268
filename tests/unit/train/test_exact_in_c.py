"""Exact numerics through the C library: sampled and trained log-probs are the same bits.

More tokens: python -m lagzero.train.verify --tokens 10000 --decoder native
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from lagzero.config import LoraConfig
from lagzero.engine.engine import Engine, EngineLimits
from lagzero.errors import LagzeroError
from lagzero.native import decoder as native
from lagzero.native import kernels
from lagzero.numerics.attention import ATTENTION, register
from lagzero.numerics.exact import ProductType
from lagzero.prepare.pack import pack
from lagzero.train.exactness import make_exact
from lagzero.train.logprobs import chunked_logprobs
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy, enable_activation_checkpointing, frozen_copy
from lagzero.train.rows import on_device, predictor_hidden
from lagzero.train.traffic import Traffic, compare, play
from lagzero.train.verify import main, tiny_policy

LIVELY = Traffic(
    num_tokens=60,
    longest_prompt=70,
    longest_response=12,
    num_open=4,
    most_running=8,
    weight_change=0.06,
    take_back=0.1,
    release=0.03,
)
STILL = replace(LIVELY, weight_change=0.0)
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
TYPES = [torch.float32, torch.bfloat16]


@functools.cache
def in_c(
    family: str, dtype: torch.dtype, fp32_head: bool = False, products: ProductType = "same"
) -> Policy:
    policy = tiny_policy(family, dtype)
    policy.fp32_head, policy.products = fp32_head, products
    policy = make_exact(policy, decoder="native")
    assert (
        policy.exact.native
        and policy.native is not None
        and policy.tail is kernels.kernels_of(products)
    )
    return policy


@pytest.mark.parametrize("products", ["same", "int16"])
@pytest.mark.parametrize("fp32_head", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_and_trained_log_probs_are_the_same(family, dtype, fp32_head, products):
    """The traffic holds a window (mistral), biases (qwen2) and norms of heads (qwen3)."""
    policy = in_c(family, dtype, fp32_head, products)
    found = compare(policy, play(policy, LIVELY, seed=1), LIVELY, seed=1)
    assert found.num_tokens >= 60
    assert (found.num_different, found.gap_max, found.kl_k3) == (0, 0.0, 0.0)


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_with_other_sizes_and_a_tied_head(tied):
    """Six heads of 48 that share one key head; a vocabulary that fills no block."""
    register()
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=1031,
        hidden_size=224,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=48,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
    )
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    policy = make_exact(Policy(module.eval(), None), decoder="native")
    found = compare(policy, play(policy, LIVELY, 2), LIVELY, 2)
    assert found.num_tokens >= 60 and found.num_different == 0


@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 1.3]), st.sampled_from(TYPES))
@settings(max_examples=8, deadline=None)
def test_they_are_in_any_traffic(seed, temperature, dtype):
    policy = in_c("qwen3", dtype)
    traffic = replace(LIVELY, num_tokens=20, temperature=temperature)
    assert compare(policy, play(policy, traffic, seed), traffic, seed).num_different == 0


@pytest.mark.parametrize("products", ["same", "int16"])
def test_an_engine_samples_from_the_weights_that_it_was_made_for(products: ProductType):
    """Not from what was laid out for an engine before it whose cache lay in the same place."""
    policy = in_c("llama", torch.bfloat16, products=products)
    play(policy, STILL, 1)
    assert policy.native is not None and policy.native._places
    Engine(policy, None, EngineLimits())  # type: ignore[arg-type]
    assert not policy.native._places  # the next step lays them out anew


def test_integers_are_closer_to_float32_than_bfloat16_is():
    """What each samples is scored in float32; no log-prob is the same, so integers were used."""
    exact = in_c("qwen3", torch.float32)

    def gaps(policy: Policy) -> tuple[float, float]:
        found = compare(exact, play(policy, STILL, 5), STILL, 5)
        assert found.num_different > 0.9 * found.num_tokens >= 50
        return found.gap_max, found.kl_k3

    largest, kl = gaps(in_c("qwen3", torch.float32, products="int16"))
    rough, rough_kl = gaps(in_c("qwen3", torch.bfloat16))
    assert 0 < 5 * largest < rough and 0 < 25 * kl < rough_kl


def test_the_number_of_threads_does_not_matter():
    policy, before = in_c("qwen2", torch.float32), torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        played = play(policy, LIVELY, 6)
    finally:
        torch.set_num_threads(before)
    assert compare(policy, played, LIVELY, 6).num_different == 0


def test_both_ways_agree_but_for_rounding():
    """What C samples is scored by the exact modules of torch."""
    by_torch = make_exact(tiny_policy("mistral", torch.float32), decoder="torch")
    played = play(in_c("mistral", torch.float32), LIVELY, 4)
    assert by_torch.exact.native is False and by_torch.tail == "exact"
    assert 0 < compare(by_torch, played, LIVELY, 4).gap_max < 1e-4


def scored_gradients(policy: Policy, row) -> list[torch.Tensor]:
    policy.module.zero_grad(set_to_none=True)
    logprobs, entropies = chunked_logprobs(
        predictor_hidden(policy, row),
        policy.logits,
        on_device(row.targets, policy.device),
        0.7,
        50,
        entropy_gradient=True,
        tail=policy.tail,
    )
    (logprobs.sum() + 0.3 * entropies.sum()).backward()
    found = [parameter.grad for parameter in policy.trainable().values()]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_plain_modules(family):
    """Of log-probs and entropies, of every parameter, through shared prompts and several chunks."""
    policy = in_c(family, torch.float32)
    samples = [each for each in play(policy, LIVELY, 8).samples if len(each.tokens)]
    (row, *_) = pack(samples, 400, True, np.ones(len(samples)))
    found = scored_gradients(policy, row)
    wanted = scored_gradients(tiny_policy(family, torch.float32), row)
    assert len(found) == len(wanted) > 10
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()


def test_activation_checkpointing_changes_neither_log_probs_nor_gradients():
    gradients = []
    for checkpointing in (False, True):
        policy = make_exact(tiny_policy("llama", torch.float32), decoder="native")
        if checkpointing:
            enable_activation_checkpointing(policy)
        played = play(policy, LIVELY, 7)
        assert compare(policy, played, LIVELY, 7).num_different == 0
        samples = [sample for sample in played.samples if len(sample.tokens)]
        (row, *_) = pack(samples, 500, True, np.ones(len(samples)))
        gradients.append(scored_gradients(policy, row))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_reference_scores_the_untouched_policy_with_the_same_bits():
    policy = in_c("llama", torch.bfloat16)
    traffic = replace(LIVELY, weight_change=0.0)
    played = play(policy, traffic, 3)
    with frozen_copy(policy)() as reference:
        assert reference.module is not policy.module and reference.native is None
        assert compare(reference, played, traffic, 3).num_different == 0


def _last_bit(forward, inputs):
    out = forward(inputs)
    return torch.nextafter(out, out + 1)


@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "model.norm", "lm_head"])
def test_a_last_bit_in_the_trainer_is_found(layer):
    policy = in_c("llama", torch.float32)
    played = play(policy, LIVELY, 1)
    spoiled = replace(policy, module=copy.deepcopy(policy.module), native=None)
    module = spoiled.module.get_submodule(layer)
    module.forward = functools.partial(_last_bit, module.forward)
    assert compare(spoiled, played, LIVELY, 1).num_different > 0


def test_a_model_that_is_not_exact_after_all_is_refused(monkeypatch):
    real = native.Decoder.logits
    monkeypatch.setattr(native.Decoder, "logits", lambda *args: real(*args).mul_(1 + 2.0**-23))
    with pytest.raises(LagzeroError, match=r"sampled tokens .* engine.decoder: torch may hold"):
        make_exact(tiny_policy("llama", torch.float32))


def test_what_c_does_not_know_goes_by_the_modules_unless_c_is_asked_for(monkeypatch):
    with_adapter = add_lora(tiny_policy("llama", torch.float32), LoraConfig(rank=2))
    by_modules = make_exact(with_adapter).exact
    assert not by_modules.native and "(not in C: the policy has an adapter)" in str(by_modules)
    assert str(in_c("llama", torch.float32).exact) == "engine and trainer compute in C"
    with pytest.raises(LagzeroError, match=r"this process cannot: it knows .*, not olmo2"):
        make_exact(tiny_policy("olmo2", torch.float32), decoder="native")

    def broken() -> None:
        raise native.NotBuilt("no compiler today")

    monkeypatch.setattr(native, "library", broken)
    with pytest.raises(LagzeroError, match=r"cannot: no compiler today. Set engine.decoder: torch"):
        make_exact(tiny_policy("llama", torch.float32), decoder="native")


def test_the_command_says_which_way_was_used(capsys):
    options = ["--tokens", "20", "--family", "llama", "--dtype", "float32"]
    assert main(options) == 0 and main([*options, "--decoder", "torch"]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if " differ" in line)
    assert first.startswith("llama float32 in C  ") and " 0 of " in first
    assert second.startswith("llama float32  ") and " 0 of " in second
