"""Seconds of one GRPO step by stage, beside ``model.generate`` on the same prompts, in one run.

    python bench/step.py                  8 prompts x 8 samples x up to 128 tokens, bfloat16

Every rollout is trained on: a reward of alternating 0 and 1 gives every group a spread. Each
measurement is a process of its own; the figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import peers

STAGES = ("generate", "prepare", "forward", "backward", "optimizer", "sync")


def main() -> None:
    """Measure, or be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", choices=("lagzero", "generate"), help="measure one, print JSON")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(measure_step(options) if options.peer == "lagzero" else rollout(options)))
        return
    shared = [
        f"--{name}={getattr(options, name.replace('-', '_'))}"
        for name in ("model", "dtype", "prompts", "samples", "max-new-tokens")
    ]
    steps: list[dict[str, float]] = []
    rollouts: list[dict[str, float]] = []
    for number in range(options.repeats):
        steps.append(peers.child(__file__, [*shared, "--peer=lagzero"]))
        rollouts.append(peers.child(__file__, [*shared, "--peer=generate"]))
        print(f"{number + 1}  step {steps[-1]['step']:.1f} s", flush=True)
    step, peer = peers.medians(steps), peers.medians(rollouts)
    dtype = peers.dtype_name(options.dtype)
    print(f"{options.prompts} prompts x {options.samples} samples, {dtype}; medians:")
    for stage in STAGES:
        print(f"  {stage:10s} {step[stage]:7.2f} s  {step[stage] / step['step']:4.0%}")
    print(f"  {'step':10s} {step['step']:7.2f} s, peak {step['peak_gb']:.2f} GB")
    print(
        f"  rollout {step['tokens'] / step['generate']:.0f} tok/s; "
        f"training {step['train_tokens'] / (step['forward'] + step['backward']):.0f} input tok/s, "
        f"{step['tokens'] / (step['forward'] + step['backward']):.0f} sampled tok/s"
    )
    print(
        f"  model.generate alone: {peer['seconds']:.2f} s for {peer['tokens']:.0f} tokens, "
        f"{peer['tok_per_s']:.0f} tok/s, peak {peer['peak_gb']:.2f} GB; "
        f"rollout speed ratio {step['tokens'] / step['generate'] / peer['tok_per_s']:.2f}"
    )


def rollout(options: argparse.Namespace) -> dict[str, float]:
    """Sample with the peer."""
    from lagzero.config import ModelConfig
    from lagzero.train.model import load_policy, stop_ids

    policy = load_policy(ModelConfig(path=options.model, dtype=options.dtype))
    prompts = peers.chat_prompts(policy.tokenizer, options.prompts)
    ends = set(stop_ids(policy.module, policy.tokenizer))
    tokens, seconds = peers.generate(policy, prompts, options.samples, options.max_new_tokens, ends)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tok_per_s": tokens / seconds,
        "peak_gb": peers.peak_memory_gb(),
    }


def measure_step(options: argparse.Namespace) -> dict[str, float]:
    """Take two steps with the loop's own parts and report the second."""
    from lagzero import build
    from lagzero.build_serving import build_serving
    from lagzero.config_load import parse_config
    from lagzero.types import Outcome, Prompt, Score, ScoredGroup

    config = parse_config(
        {
            "model": {"path": options.model, "dtype": options.dtype},
            "data": {"train": [{"kind": "arithmetic", "size": 1}]},
            "score": {"rewards": [{"use": "number_answer"}]},
            "rollout": {
                "group_size": options.samples,
                "max_new_tokens": options.max_new_tokens,
            },
            "schedule": {"groups_per_step": options.prompts},
            "eval": {"before": False, "after": False},
        }
    )
    config = build.prepare_process(config)
    policy = build.build_policy(config)
    compute = build.ComputeThread()
    serving = build_serving(config, policy, compute, print)
    training = build.build_training(config, policy, compute)
    prompts = [
        Prompt(str(number), tuple(ids), "")
        for number, ids in enumerate(peers.chat_prompts(policy.tokenizer, options.prompts))
    ]

    async def one(number: int) -> dict[str, float]:
        times: dict[str, float] = {}
        begun = time.perf_counter()
        groups = await asyncio.gather(
            *(serving.train.play(number * len(prompts) + i, p) for i, p in enumerate(prompts))
        )
        times["generate"] = time.perf_counter() - begun
        scored = [
            ScoredGroup(
                group,
                tuple(Score(Outcome.SCORED, float(r.member % 2)) for r in group.rollouts),
            )
            for group in groups
        ]
        mark = time.perf_counter()
        batch = await training.preparer.prepare(scored)
        times["prepare"] = time.perf_counter() - mark
        stats = await training.on_thread.step(batch)
        for stage in ("forward", "backward", "optimizer"):
            times[stage] = stats.metrics[f"train/{stage}_s"]
        mark = time.perf_counter()
        await serving.link.publish(stats.version)
        times["sync"] = time.perf_counter() - mark
        times["step"] = time.perf_counter() - begun
        times["tokens"] = sum(len(r.tokens) for g in groups for r in g.rollouts)
        times["train_tokens"] = stats.metrics["train/num_tokens"]
        return times

    async def two() -> dict[str, float]:
        await one(0)
        return await one(1)

    times = asyncio.run(two())
    compute.close()
    return {**times, "peak_gb": peers.peak_memory_gb()}


if __name__ == "__main__":
    main()
