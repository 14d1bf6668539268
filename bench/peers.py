"""What the benchmarks share: prompts, child processes, medians, and the transformers peer."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis in simple words.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Name three programming languages and what they are used for.",
    "What is gravity?",
    "Tell me a story about a fox.",
    "Why is the sky blue?",
    "List five fruits.",
    "How does a bicycle stay upright?",
    "What is machine learning?",
    "Give me tips for better sleep.",
    "Who was Albert Einstein?",
    "How are rainbows formed?",
    "Describe a typical day in Tokyo.",
    "What is the difference between a virus and a bacterium?",
)


def dtype_name(name: str) -> str:
    """Return the type that ``auto`` is on this machine."""
    import torch

    from lagzero.numerics.precision import pick_dtype

    return str(pick_dtype(name, torch.device("cpu"))).removeprefix("torch.")


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Render ``count`` questions with the tokenizer's template."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS[:count]
    ]


def generate(
    policy: Any, prompts: Sequence[Sequence[int]], samples: int, max_new_tokens: int, ends: set[int]
) -> tuple[int, float]:
    """Sample with ``model.generate`` at temperature 1; return (tokens up to the end, seconds)."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    policy.module.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    begun = time.perf_counter()
    with torch.inference_mode():
        out = policy.module.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            num_return_sequences=samples,
            eos_token_id=sorted(ends),
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begun
    num_tokens = 0
    for row in out[:, width:].tolist():
        stops = [at for at, token in enumerate(row) if token in ends]
        num_tokens += stops[0] + 1 if stops else len(row)
    return num_tokens, seconds


def peak_memory_gb() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def child(script: str, arguments: Sequence[str]) -> dict[str, float]:
    """Run one measurement in a process of its own: peers share neither memory nor settings."""
    command = [sys.executable, script, *arguments]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}
