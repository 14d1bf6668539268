"""How far cached decode is from one full forward pass of the same weights, on a real model.

    python recipes/mismatch/measure.py    SmolLM2-135M-Instruct; writes results/numerics.json

The embedded engine samples and records its log-probs; the trainer scores the same tokens in one
pass. d = log p (trainer) - log p (engine), in nats.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lagzero.config import LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Request, Sampling, derive_seed
from lagzero.losses.objective import make_loss
from lagzero.prepare.pack import pack, unpack
from lagzero.train.model import Policy, load_policy
from lagzero.train.step import LocalTrainer
from lagzero.types import Array, Sample

RESULTS = Path(__file__).parent / "results"
PROMPTS = (
    "Tell a long story about a lighthouse keeper and a storm.",
    "Explain in detail how bread is made, step by step.",
    "Describe the history of a small town over a hundred years.",
    "List as many uses of a paper clip as you can, with reasons.",
)
# dtype of the model, float32 head, tokens of a sequence, sequences a prompt
SETTINGS: tuple[tuple[Literal["float32", "bfloat16"], bool, int, int], ...] = (
    ("float32", False, 256, 2),
    ("bfloat16", False, 128, 1),
    ("bfloat16", True, 128, 1),
)


def main() -> None:
    """Measure all settings and write them down."""
    parser = argparse.ArgumentParser(description="Measure cached decode against one pass.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=RESULTS / "numerics.json")
    parser.add_argument("--max-tokens", type=int, default=256, help="limit of a sequence's length")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype, head, length, members in SETTINGS:
        began = time.perf_counter()
        config = ModelConfig(path=options.model, dtype=dtype, fp32_head=head, threads=1)
        differences = measure(load_policy(config), min(length, options.max_tokens), members)
        rows.append({"dtype": dtype, "fp32_head": head, **summary(differences)})
        print(json.dumps(rows[-1]), f"{time.perf_counter() - began:.0f} s", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"model": options.model, "rows": rows}, indent=1) + "\n")


def measure(policy: Policy, length: int, members: int) -> Array:
    """Sample ``members`` sequences of ``length`` tokens a prompt; return d [sequences, length]."""
    samples = sampled(policy, length, members)
    train = TrainConfig(optimizer=OptimizerConfig(), share_prompt=False, micro_batch_tokens=512)
    trainer = LocalTrainer(policy, make_loss(LossConfig()), train, master_weights=False)
    rows = pack(samples, train.micro_batch_tokens, train.share_prompt, np.zeros(len(samples)))
    scored = unpack([trainer.logprobs(row) for row in rows], rows, samples)
    return np.stack([d - s.tokens["logprob"] for d, s in zip(scored, samples, strict=True)])


def sampled(policy: Policy, length: int, members: int) -> list[Sample]:
    """Let the embedded engine write, past ends of text too, so that all are of one length."""
    engine = Engine(policy, policy.tokenizer, EngineLimits(kv_cache_tokens=16384))
    prompts: list[tuple[int, ...]] = []
    for number, text in enumerate(PROMPTS):
        chat = [{"role": "user", "content": text}]
        rendered = policy.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        prompts.append(tuple(policy.tokenizer(rendered, add_special_tokens=False)["input_ids"]))
        seeds = tuple(derive_seed(0, number, member) for member in range(members))
        engine.add(Request(number, prompts[-1], seeds, Sampling(max_new_tokens=length)))
    done = []
    while engine.has_work:
        done += engine.step()
    return [
        Sample(c.request_id, c.member, prompts[c.request_id], c.tokens, np.zeros(length), 0.0)
        for c in sorted(done, key=lambda c: (c.request_id, c.member))
    ]


def summary(differences: Array) -> dict[str, Any]:
    """Reduce d [S, T]: size of a token's, and how the spread of a sequence's sum grows with T.

    The sum over T tokens is taken over every stretch of T tokens that does not overlap another;
    its standard deviation is taken about 0. ``exponent`` is the slope of log std over log T: 1/2
    where a token's d is independent of its neighbours', 1 where all have one sign.
    """
    lengths = [2**power for power in range(12) if 2**power * 2 <= differences.shape[1]]
    growth: dict[int, float] = {}
    for length in lengths:
        count = differences.shape[1] // length
        sums = differences[:, : count * length].reshape(-1, length).sum(axis=1, dtype=np.float64)
        growth[length] = float(np.sqrt(np.mean(sums**2)))
    slope = np.polyfit(np.log(lengths), np.log([growth[length] for length in lengths]), 1)[0]
    return {
        "num_tokens": int(differences.size),
        "mean_abs": float(np.abs(differences).mean(dtype=np.float64)),
        "max_abs": float(np.abs(differences).max()),
        "std_of_sum": growth,
        "exponent": float(slope),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
