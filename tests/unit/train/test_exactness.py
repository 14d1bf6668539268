"""Under random traffic every sampled log-prob is the trainer's, bit for bit; and faults are found.

Here engine and trainer run the model's modules; ``test_exact_in_c`` is of what the C library runs.

More tokens: python -m lagzero.train.verify --tokens 10000
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.config import LoraConfig
from lagzero.engine.attention import KVCache
from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Request, Sampling
from lagzero.errors import LagzeroError
from lagzero.numerics import exact
from lagzero.prepare.pack import pack
from lagzero.train import exactness
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy, enable_activation_checkpointing
from lagzero.train.rows import predictor_hidden
from lagzero.train.traffic import Traffic, _NoText, compare, play
from lagzero.train.verify import main, tiny_policy

LIVELY = Traffic(
    num_tokens=40,
    longest_prompt=70,
    longest_response=12,
    num_open=4,
    most_running=8,
    weight_change=0.06,
    take_back=0.1,
    release=0.03,
)
make_exact = functools.partial(exactness.make_exact, decoder="torch")
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "olmo2", "gemma3_text", "qwen3_moe", "gpt2"]


@functools.cache
def exact_policy(family: str, dtype: torch.dtype, lora: bool = False) -> Policy:
    policy = tiny_policy(family, dtype)
    if lora:
        policy = add_lora(policy, LoraConfig(rank=4))
        for parameter in policy.trainable().values():  # a new adapter would change nothing
            parameter.data += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(2)
            )
    return make_exact(policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_and_trained_log_probs_are_the_same(family: str, dtype: torch.dtype):
    policy = exact_policy(family, dtype)
    found = compare(policy, play(policy, LIVELY, seed=1), LIVELY, seed=1)
    assert found.num_tokens >= 40
    assert (found.num_different, found.gap_max, found.kl_k3) == (0, 0.0, 0.0)


@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 1.3]))
@settings(max_examples=5, deadline=None)
def test_they_are_in_any_traffic(seed: int, temperature: float):
    policy = exact_policy("qwen3", torch.bfloat16)
    traffic = replace(LIVELY, num_tokens=20, temperature=temperature)
    assert compare(policy, play(policy, traffic, seed), traffic, seed).num_different == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_with_adapters(dtype: torch.dtype):
    policy = exact_policy("llama", dtype, lora=True)
    assert compare(policy, play(policy, LIVELY, 2), LIVELY, 2).num_different == 0


def test_they_are_in_float16():
    policy = exact_policy("llama", torch.float16)
    assert policy.exact is not None and policy.exact.widened  # multiplied in float32, on any CPU
    assert compare(policy, play(policy, LIVELY, 5), LIVELY, 5).num_different == 0


def test_they_are_with_a_head_in_float32():
    policy = tiny_policy("llama", torch.bfloat16)
    policy.fp32_head = True
    policy = make_exact(policy)
    assert compare(policy, play(policy, LIVELY, 3), LIVELY, 3).num_different == 0


def test_fast_numerics_differ_in_the_same_traffic():
    """So the traffic can tell."""
    policy = tiny_policy("llama", torch.float32)
    found = compare(policy, play(policy, LIVELY, 1), LIVELY, 1)
    assert found.num_different > 0 and 0 < found.gap_max < 1e-4


def test_exact_log_probs_are_those_of_fast_numerics_but_for_rounding():
    fast, now = (
        tiny_policy("gemma3_text", torch.float32),
        exact_policy("gemma3_text", torch.float32),
    )
    played = play(now, LIVELY, 4)
    assert 0 < compare(fast, played, LIVELY, 4).gap_max < 1e-4


def _spoil(policy: Policy, layer: str, spoiled: object) -> Policy:
    """Return a copy one of whose layers runs ``spoiled(its exact forward, inputs)``."""
    out = copy.deepcopy(policy)
    module = out.module.get_submodule(layer)
    module.forward = functools.partial(spoiled, module.forward)
    return out


def _last_bit_in_small_batches(forward, inputs):
    out = forward(inputs)
    return torch.nextafter(out, out + 1) if inputs.shape[1] <= 32 else out


def test_a_last_bit_that_depends_on_the_batch_is_found():
    layer = "model.layers.1.mlp.down_proj"
    policy = _spoil(exact_policy("llama", torch.float32), layer, _last_bit_in_small_batches)
    found = compare(policy, play(policy, LIVELY, 1), LIVELY, 1)
    assert found.num_different > 0


def test_a_model_that_is_not_exact_after_all_is_refused(monkeypatch):
    real = exact.multiply

    def uneven(inputs, *rest):
        out = real(inputs, *rest)
        return torch.nextafter(out, out + 1) if inputs.shape[-2] <= 16 else out

    monkeypatch.setattr(exact, "multiply", uneven)
    with pytest.raises(LagzeroError, match=r"does not hold for LlamaForCausalLM .* of \d+ sampled"):
        make_exact(tiny_policy("llama", torch.float32))


def test_what_lies_in_unused_pages_does_not_matter(monkeypatch):
    real = KVCache.__init__

    def poisoned(self, *args):
        real(self, *args)
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor.fill_(math.nan)

    monkeypatch.setattr(KVCache, "__init__", poisoned)
    policy = exact_policy("mistral", torch.float32)
    found = compare(policy, play(policy, LIVELY, 5), LIVELY, 5)
    assert found.num_tokens > 0 and found.num_different == 0


def test_the_number_of_threads_does_not_matter():
    """Where the self-check says so, an engine may have more threads than the trainer."""
    before = torch.get_num_threads()
    policy = make_exact(tiny_policy("llama", torch.float32), [before + 1])
    torch.set_num_threads(before + 1)
    try:
        played = play(policy, LIVELY, 6)
    finally:
        torch.set_num_threads(before)
    assert compare(policy, played, LIVELY, 6).num_different == 0


def test_greedy_tokens_are_the_likeliest_of_fast_numerics():
    ids = []
    for policy in (tiny_policy("llama", torch.float32), exact_policy("llama", torch.float32)):
        engine = Engine(policy, _NoText(), EngineLimits(kv_cache_tokens=512))
        sampling = Sampling(max_new_tokens=12, temperature=0.0)
        engine.add(Request(0, (5, 9, 11), (1,), sampling))
        done = []
        while not done:
            done = engine.step()
        ids.append(done[0].tokens["id"])
    np.testing.assert_array_equal(*ids)


def test_models_that_multiply_in_ways_of_their_own_are_refused(monkeypatch):
    policy = tiny_policy("llama", torch.float32)
    policy.module.model.layers[0].extra = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(LagzeroError, match=r"does not know how model.layers.0.extra \(Bilinear\)"):
        make_exact(policy)


def test_an_exact_policy_is_not_made_exact_again():
    with pytest.raises(ValueError, match="already"):
        make_exact(exact_policy("llama", torch.float32))


def test_layers_of_every_kind_are_checked_once_a_shape():
    policy = exact_policy("qwen3_moe", torch.bfloat16)
    # q, o; k, v; gate-up and down of the experts; the router in two types; the head
    assert policy.exact.num_shapes == 7
    kinds = {type(m).__name__ for m, _, _ in exactness._multiplying(policy)}
    assert kinds == {"Linear", "Qwen3MoeExperts", "Qwen3MoeTopKRouter"}


def test_the_command_says_how_many_tokens_differ(capsys):
    options = ["--tokens", "20", "--family", "llama", "--dtype", "float32"]
    assert main(options) == 0
    assert " 0 of " in capsys.readouterr().out


def test_activation_checkpointing_changes_neither_log_probs_nor_gradients():
    gradients = []
    for checkpointing in (False, True):
        policy = make_exact(tiny_policy("llama", torch.float32))
        if checkpointing:
            enable_activation_checkpointing(policy)
        played = play(policy, LIVELY, 7)
        assert compare(policy, played, LIVELY, 7).num_different == 0
        samples = [sample for sample in played.samples if len(sample.tokens)]
        (row, *_) = pack(samples, 500, True, np.ones(len(samples)))
        predictor_hidden(policy, row).square().sum().backward()
        gradients.append([p.grad for p in policy.trainable().values() if p.grad is not None])
    assert len(gradients[0]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
