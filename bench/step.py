"""Seconds and memory of one GRPO step by stage, beside TRL's GRPOTrainer in the same run.

    python bench/step.py --trl-python /path/to/venv/bin/python --dtype float32

8 prompts x 8 samples x up to 128 tokens of SmolLM2-135M-Instruct, the same prompts, the same loss
(advantages of each group divided by its standard deviation, clipped ratios, a mean over each
sequence, no KL) and the same optimiser. Every rollout is trained on: rewards of alternating 0 and 1
give every group a spread. TRL samples with ``model.generate`` and trains 8 sequences at a time, its
default; lagzero's packed rows are cut to 512 tokens, which bounds its memory.

A step on the first prompt alone warms up and is not counted. Each measurement is a process of its
own, lagzero and TRL in turn; the figures are medians. TRL's virtual environment is made with
``pip install torch "trl==1.16.*"``; without ``--trl-python`` lagzero is measured alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import peers

STAGES = ("generate", "prepare", "forward", "backward", "optimizer", "sync")
_TRL = str(Path(__file__).with_name("trl_step.py"))


def main() -> None:
    """Measure, or be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--products", default="same", choices=("same", "int16"), help="of lagzero")
    parser.add_argument(
        "--no-master-weights", action="store_true", help="lagzero without float32 weights, as TRL"
    )
    parser.add_argument(
        "--moments", default="float32", choices=("float32", "bfloat16"), help="of lagzero"
    )
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="of lagzero; TRL's is on"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=512, help="of lagzero")
    parser.add_argument("--logprob-chunk-tokens", type=int, default=1024, help="of lagzero")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--trl-python", help="interpreter of a virtual environment that has TRL")
    parser.add_argument("--measure", action="store_true", help="measure once, print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_step(options)))
        return
    sizes = [
        f"--{name}={getattr(options, name.replace('-', '_'))}"
        for name in ("prompts", "samples", "max-new-tokens")
    ]
    dtype = peers.dtype_name(options.dtype)
    runs: dict[str, list[dict[str, float]]] = {"lagzero": []}
    if options.trl_python:
        runs["TRL"] = []
    for number in range(options.repeats):
        for peer, done in runs.items():
            if peer == "lagzero":
                own = [*sizes, f"--model={options.model}", f"--dtype={dtype}", "--measure"]
                own += [
                    f"--micro-batch-tokens={options.micro_batch_tokens}",
                    f"--products={options.products}",
                    f"--moments={options.moments}",
                    f"--logprob-chunk-tokens={options.logprob_chunk_tokens}",
                ]
                own += ["--no-master-weights"] * options.no_master_weights
                own += ["--activation-checkpointing"] * options.activation_checkpointing
                done.append(peers.child(__file__, own))
            else:
                theirs = [*sizes, f"--folder={_folder(options.model)}", f"--dtype={dtype}"]
                done.append(peers.child(_TRL, theirs, options.trl_python))
            step_s, tokens = done[-1]["step"], done[-1]["tokens"]
            print(f"{number + 1}  {peer:8s} {step_s:6.1f} s, {tokens:.0f} tokens", flush=True)
    print(f"{options.prompts} prompts x {options.samples} samples, {dtype}; medians:")
    report({peer: peers.medians(done) for peer, done in runs.items()})


def report(steps: dict[str, dict[str, float]]) -> None:
    """Print a table of the peers, and what lagzero's step takes of TRL's."""
    names = {**{stage: f"{stage} s" for stage in STAGES}, "step": "step s", "peak_gb": "peak GB"}
    print(f"{'':22s}" + "".join(f"{peer:>10s}" for peer in steps))
    for name, label in names.items():
        cells = (f"{s[name]:10.2f}" if name in s else f"{'-':>10s}" for s in steps.values())
        print(f"  {label:20s}" + "".join(cells))
    for label, share, of in (
        ("sampled tokens", "tokens", None),
        ("sampled tok/s", "tokens", ("generate",)),
        ("trained tok/s", "tokens", ("forward", "backward")),
        ("tokens a step s", "tokens", ("step",)),
    ):
        cells = (s[share] / (sum(s[n] for n in of) if of else 1) for s in steps.values())
        print(f"  {label:20s}" + "".join(f"{cell:10.1f}" for cell in cells))
    if "TRL" in steps:
        ours, theirs = steps["lagzero"], steps["TRL"]
        pace = (ours["tokens"] / ours["step"]) / (theirs["tokens"] / theirs["step"])
        print(
            f"lagzero against TRL: {theirs['step'] / ours['step']:.2f} times as fast "
            f"({pace:.2f} per sampled token), with {ours['peak_gb'] / theirs['peak_gb']:.2f} of "
            "its memory"
        )


def _folder(model: str) -> str:
    from lagzero.train.model import model_source

    return model_source(model)


def measure_step(options: argparse.Namespace) -> dict[str, float]:
    """Take two steps with the loop's own parts, a small one first, and report the second."""
    from lagzero.runtime.cores import limit_spinning

    limit_spinning()  # as the command line does, before torch is loaded
    from lagzero import build
    from lagzero.build_serving import build_serving
    from lagzero.config_load import parse_config
    from lagzero.types import Outcome, Prompt, Score, ScoredGroup

    config = build.prepare_process(parse_config(_settings(options)))
    policy = build.build_policy(config)
    compute = build.ComputeThread()
    serving = build_serving(config, policy, compute, print)
    training = build.build_training(config, policy, compute)
    prompts = [
        Prompt(str(number), tuple(ids), "")
        for number, ids in enumerate(peers.chat_prompts(policy.tokenizer, options.prompts))
    ]

    async def one(number: int, chosen: list[Prompt]) -> dict[str, float]:
        times: dict[str, float] = {}
        begun = time.perf_counter()
        first = number * len(prompts)
        groups = await asyncio.gather(
            *(serving.train.play(first + i, prompt) for i, prompt in enumerate(chosen))
        )
        times["generate"] = time.perf_counter() - begun
        scored = [
            ScoredGroup(
                group,
                tuple(Score(Outcome.SCORED, float(r.member % 2)) for r in group.rollouts),
            )
            for group in groups
        ]
        async with serving.gate.exclusive("train"):
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
        await one(0, prompts[:1])
        return await one(1, prompts)

    async def run() -> dict[str, float]:
        async with serving.running():
            return await two()

    times = asyncio.run(run())
    compute.close()
    return {**times, "peak_gb": peers.peak_memory_gb()}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": {
            "path": options.model,
            "dtype": options.dtype,
            "products": options.products,
            "master_weights": not options.no_master_weights,
            "activation_checkpointing": options.activation_checkpointing,
        },
        "data": {"train": [{"kind": "arithmetic", "size": 1}]},
        "score": {"rewards": [{"use": "number_answer"}]},
        "rollout": {"group_size": options.samples, "max_new_tokens": options.max_new_tokens},
        "schedule": {"groups_per_step": options.prompts},
        "loss": {"reduction": "sequence_mean"},
        "train": {
            "micro_batch_tokens": options.micro_batch_tokens,
            "logprob_chunk_tokens": options.logprob_chunk_tokens,
            "optimizer": {"moments": options.moments},
        },
        "eval": {"before": False, "after": False},
    }


if __name__ == "__main__":
    main()
