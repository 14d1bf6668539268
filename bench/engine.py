"""Rollout speed of the embedded engine beside ``model.generate``, alternating, in one run.

    python bench/engine.py                       16 prompts x 8 samples x up to 256 tokens, bfloat16
    python bench/engine.py --prompts 1 --samples 1

Both sample at temperature 1 and stop at the model's own end ids; the engine also records the
log-prob of every token. Tokens are counted up to the end id. Each measurement is a process of its
own; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import time

import peers


def main() -> None:
    """Measure, or be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", choices=("engine", "generate"), help="measure one, print JSON")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(measure(options)))
        return
    shared = [
        f"--{name}={getattr(options, name.replace('-', '_'))}"
        for name in ("model", "dtype", "prompts", "samples", "max-new-tokens")
    ]
    runs: dict[str, list[dict[str, float]]] = {"engine": [], "generate": []}
    for number in range(options.repeats):
        for peer, done in runs.items():
            done.append(peers.child(__file__, [*shared, f"--peer={peer}"]))
            print(f"{number + 1} {peer:9s} {done[-1]['tok_per_s']:7.0f} tok/s", flush=True)
    dtype = peers.dtype_name(options.dtype)
    print(f"{options.prompts} prompts x {options.samples} samples, {dtype}; medians:")
    result = {peer: peers.medians(done) for peer, done in runs.items()}
    for peer, figures in result.items():
        print(
            f"  {peer:9s} {figures['tok_per_s']:7.0f} tok/s  {figures['tokens']:7.0f} tokens in "
            f"{figures['seconds']:6.1f} s  ready in {figures['ready_s']:4.1f} s  "
            f"peak {figures['peak_gb']:.2f} GB"
        )
    ratio = result["engine"]["tok_per_s"] / result["generate"]["tok_per_s"]
    print(f"  engine / generate = {ratio:.2f}")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Load the model and sample once."""
    import torch

    from lagzero.config import ModelConfig
    from lagzero.engine.engine import Engine, EngineLimits
    from lagzero.engine.request import Request, Sampling, derive_seed
    from lagzero.numerics.allocator import keep_freed_memory
    from lagzero.train.model import load_policy, stop_ids

    begun = time.perf_counter()
    policy = load_policy(ModelConfig(path=options.model, dtype=options.dtype))
    prompts = peers.chat_prompts(policy.tokenizer, options.prompts)
    ends = set(stop_ids(policy.module, policy.tokenizer))
    num_sequences = options.prompts * options.samples
    if options.peer == "generate":
        ready_s = time.perf_counter() - begun
        tokens, seconds = peers.generate(
            policy, prompts, options.samples, options.max_new_tokens, ends
        )
    else:
        keep_freed_memory()
        longest = max(map(len, prompts)) + options.max_new_tokens
        engine = Engine(
            policy,
            policy.tokenizer,
            EngineLimits(max_running=num_sequences, kv_cache_tokens=num_sequences * (longest + 32)),
        )
        ready_s = time.perf_counter() - begun
        begun = time.perf_counter()
        sampling = Sampling(options.max_new_tokens, stop_ids=frozenset(ends))
        for number, prompt in enumerate(prompts):
            seeds = tuple(derive_seed("bench", number, k) for k in range(options.samples))
            engine.add(Request(number, tuple(prompt), seeds, sampling))
        tokens = 0
        while engine.has_work:
            tokens += sum(len(done.tokens) for done in engine.step())
        seconds = time.perf_counter() - begun
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tok_per_s": tokens / seconds,
        "ready_s": ready_s,
        "peak_gb": peers.peak_memory_gb(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
