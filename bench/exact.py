"""What exact numerics cost, and what each numeric option leaves of the mismatch.

    python bench/exact.py                              cost: exact and fast in turn, in one process
    python bench/exact.py --mismatch --dtype float32   sampler against trainer, option by option

Cost is of a rollout (32 sequences of a fixed number of tokens, log-probs recorded) and of a
training step's forward and backward pass over the same sequences, packed. The figures are medians
over the repeats. Mismatch is measured at equal weights on chat prompts, temperature 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import peers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--mismatch", action="store_true", help="the table in place of the cost")
    options = parser.parse_args()
    from lagzero.numerics.allocator import keep_freed_memory
    from lagzero.numerics.quiet import quiet_libraries

    keep_freed_memory()
    quiet_libraries()
    (mismatch if options.mismatch else cost)(options)


def load(options: argparse.Namespace, numerics: str, fp32_head: bool = False) -> Any:
    """Return a policy; prints how long the self-check took."""
    import torch

    from lagzero.config import ModelConfig
    from lagzero.train.exactness import make_exact
    from lagzero.train.model import load_policy

    policy = load_policy(
        ModelConfig(path=options.model, dtype=options.dtype, device="cpu", fp32_head=fp32_head)
    )
    if numerics == "exact":
        begun = time.perf_counter()
        policy = make_exact(policy)
        print(
            f"self-check: {time.perf_counter() - begun:.1f} s, {policy.exact}, "
            f"{torch.get_num_threads()} threads",
            flush=True,
        )
    return policy


def rollout(policy: Any, options: argparse.Namespace) -> tuple[list[Any], float]:
    """Sample and return one Sample a sequence, and the seconds it took."""
    from lagzero.engine.engine import Engine, EngineLimits
    from lagzero.engine.request import Request, Sampling, derive_seed
    from lagzero.types import Sample

    prompts = peers.chat_prompts(policy.tokenizer, options.prompts)
    num = options.prompts * options.samples
    longest = max(map(len, prompts)) + options.new_tokens
    limits = EngineLimits(max_running=num, kv_cache_tokens=num * (longest + 32))
    engine = Engine(policy, policy.tokenizer, limits)
    begun = time.perf_counter()
    for number, prompt in enumerate(prompts):
        seeds = tuple(derive_seed("bench", number, k) for k in range(options.samples))
        engine.add(Request(number, tuple(prompt), seeds, Sampling(options.new_tokens)))
    done = []
    while engine.has_work:
        done += engine.step()
    seconds = time.perf_counter() - begun
    return [
        Sample(
            each.request_id,
            each.member,
            tuple(prompts[each.request_id]),
            each.tokens,
            np.ones(len(each.tokens), np.float32),
            0.0,
        )
        for each in done
    ], seconds


def step(policy: Any, samples: list[Any], backward: bool) -> tuple[np.ndarray, float]:
    """Return trainer minus sampler log-probs, and the seconds of the passes."""
    import torch

    from lagzero.prepare.pack import pack
    from lagzero.train.logprobs import chunked_logprobs
    from lagzero.train.rows import on_device, predictor_hidden

    gaps = []
    begun = time.perf_counter()
    for row in pack(samples, 1024, True, np.ones(len(samples))):
        with torch.set_grad_enabled(backward):
            logprobs, _ = chunked_logprobs(
                predictor_hidden(policy, row),
                policy.logits,
                on_device(row.targets, policy.device),
                1.0,
                1024,
                exact=policy.exact is not None,
            )
        if backward:
            logprobs.sum().backward()
        gaps.append(logprobs.detach().double().numpy() - row.behaviour_logprobs)
    return np.concatenate(gaps), time.perf_counter() - begun


def cost(options: argparse.Namespace) -> None:
    """Alternate fast and exact."""
    policies = {numerics: load(options, numerics) for numerics in ("fast", "exact")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    for number in range(options.repeats + 1):
        for name, policy in policies.items():
            samples, sampled_s = rollout(policy, options)
            gaps, stepped_s = step(policy, samples, backward=True)
            policy.module.zero_grad(set_to_none=True)
            if number:  # the first round warms up
                times[name].append((sampled_s, stepped_s))
            print(
                f"{number} {name:5s} rollout {sampled_s:6.2f} s  forward and backward "
                f"{stepped_s:6.2f} s  largest gap {np.abs(gaps).max():.2g}",
                flush=True,
            )
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }
    for place, what in enumerate(("rollout", "forward and backward")):
        fast, exact = medians["fast"][place], medians["exact"][place]
        print(f"{what}: fast {fast:.2f} s, exact {exact:.2f} s, exact / fast = {exact / fast:.2f}")


def mismatch(options: argparse.Namespace) -> None:
    """Print one line of the table an option."""
    print("numerics   mean |gap|   max |gap|   KL (k3)   tokens that differ")
    for numerics, fp32_head in (("fast", False), ("fast", True), ("exact", False)):
        if fp32_head and options.dtype == "float32":
            continue
        policy = load(options, numerics, fp32_head)
        gaps, _ = step(policy, rollout(policy, options)[0], backward=False)
        kl = float((np.expm1(gaps) - gaps).mean())
        size = np.abs(gaps)
        print(
            f"{options.dtype} {numerics}{' fp32_head' if fp32_head else ''}: {size.mean():.2g}  "
            f"{size.max():.2g}  {kl:.2g}  {(gaps != 0).sum()} of {len(gaps)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
