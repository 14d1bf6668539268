"""``python -m lagzero.train.verify``: are sampled and trained log-probs the same, bit for bit?

Plays random traffic on small random models of many families, or on a model of your own, and counts
the tokens whose log-prob the trainer computes otherwise.
"""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lagzero.config import LoraConfig, ModelConfig
from lagzero.numerics.attention import ATTENTION, register
from lagzero.train.exactness import make_exact
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy, load_policy, pick_device
from lagzero.train.traffic import Played, Traffic, compare, play

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWED = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 40},
    "olmo2": {},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOWED},
    "smollm3": {},
    "phi3": {},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True, **_EXPERTS},
    "gpt2": {
        "vocab_size": 211,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""What a small model of each family needs besides the usual sizes, by transformers' model type."""


def tiny_policy(family: str, dtype: torch.dtype, seed: int = 7) -> Policy:
    """Return a small random model of a family, without a tokenizer."""
    register()
    sizes = {} if family == "gpt2" else _SIZES  # that one has names of its own
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module: Any = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # larger than the usual start: far from uniform
            for parameter in module.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4.0)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.set_attn_implementation(ATTENTION)
    return Policy(module.eval(), None)


def _describe(name: str, policy: Policy, traffic: Traffic, goal: int, seed: int) -> int:
    """Play, compare, print one line; return how many tokens differ."""
    begun = time.perf_counter()
    tokens, different, preempted, cached, versions = 0, 0, 0, 0, 0
    gap_max, kl = 0.0, 0.0
    sizes: set[int] = set()
    while tokens < goal:
        played: Played = play(policy, traffic, seed)
        found = compare(policy, played, traffic, seed)
        kl = (kl * tokens + found.kl_k3 * found.num_tokens) / (tokens + found.num_tokens)
        tokens += found.num_tokens
        different += found.num_different
        gap_max = max(gap_max, found.gap_max)
        preempted += played.num_preemptions
        cached += played.num_cached_tokens
        versions += len(played.weights)
        sizes |= played.batch_sizes
        seed += 1
    elapsed = time.perf_counter() - begun
    print(
        f"{name:28} {different:6} of {tokens} differ, largest {gap_max:.2g} nats, KL {kl:.2g}  "
        f"({len(sizes)} batch sizes, {preempted} preemptions, {cached} tokens from the prefix "
        f"cache, {versions} weight versions, {elapsed:.0f} s)",
        flush=True,
    )
    return different


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when no token differs."""
    parser = argparse.ArgumentParser("lagzero.train.verify", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="of each model and type")
    parser.add_argument("--family", nargs="*", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--model", help="a folder, hub id or built-in name, in place of families")
    parser.add_argument("--dtype", nargs="*", choices=["float32", "bfloat16"])
    parser.add_argument("--lora", action="store_true", help="with adapters of rank 8")
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    parser.add_argument("--decoder", choices=["auto", "native", "torch"], default="auto")
    parser.add_argument("--longest-prompt", type=int, default=90, help="tokens")
    parser.add_argument("--longest-response", type=int, default=48, help="tokens")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--fp32-head", action="store_true")
    parser.add_argument("--products", choices=["same", "int16"], default="same")
    parser.add_argument("--still", action="store_true", help="without changes of weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} thread(s), "
        f"{options.numerics}"
    )
    # A round's memory is bounded: each version's weights are kept.
    traffic = Traffic(
        min(options.tokens, 2500),
        options.longest_prompt,
        options.longest_response,
        num_open=min(30, 2 + options.tokens // 50),
        most_running=80,
        weight_change=0.0 if options.still else 0.03,
    )
    different = 0
    names: list[str] = [options.model] if options.model else options.family
    dtypes: list[Literal["float32", "bfloat16"]] = options.dtype or ["float32", "bfloat16"]
    for name in names:
        for dtype in dtypes:
            if options.model:
                policy = load_policy(ModelConfig(path=name, dtype=dtype), device)
            else:
                policy = tiny_policy(name, getattr(torch, dtype))
                policy.module.to(device)
            policy.fp32_head, policy.products = options.fp32_head, options.products
            if options.lora:
                policy = add_lora(policy, LoraConfig(rank=8))
            if options.numerics == "exact":
                policy = make_exact(policy, decoder=options.decoder)
            label = f"{name} {dtype}" + " in C" * (policy.native is not None)
            different += _describe(label, policy, traffic, options.tokens, options.seed)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
