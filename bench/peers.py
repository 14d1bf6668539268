"""What the benchmarks share: prompts, child processes, medians, and the transformers peer.

Peers of other virtual environments import this file, so it needs the standard library alone until
a function is called.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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


@dataclass(frozen=True)
class Job:
    """One rollout, the same for every peer.

    ``ends`` are the ids after which a sample ends; without any, each has ``max_new_tokens``.
    """

    folder: str  # config.json and model.safetensors
    gguf: str  # the same weights as GGUF; empty where no peer reads it
    dtype: str  # of weights and activations: float32 or bfloat16
    prompts: list[list[int]]
    samples: int  # of each prompt
    max_new_tokens: int
    ends: list[int]
    temperature: float
    threads: int

    @property
    def num_sequences(self) -> int:
        """Sequences that are decoded together."""
        return len(self.prompts) * self.samples

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, its prompt included."""
        return max(map(len, self.prompts)) + self.max_new_tokens

    def save(self, file: Path) -> None:
        """Write it for a child."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def of_arguments(cls) -> tuple[Job, str]:
        """Read the job that a child was given, and which variant of the peer to be."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--job", type=Path, required=True)
        parser.add_argument("--peer", required=True)
        options = parser.parse_args()
        return cls(**json.loads(options.job.read_text())), options.peer

    def warm_up(self) -> Job:
        """Return the few tokens that a peer samples before it counts as ready."""
        prompts = [prompt[::-1] for prompt in self.prompts[:1]]  # no prefix of a real one
        small = {"prompts": prompts, "samples": 1, "max_new_tokens": 4, "ends": []}
        return Job(**{**asdict(self), **small})


@dataclass(frozen=True)
class Rollout:
    """What a peer sampled, prompt by prompt: ids up to the end id, and their log-probs in nats."""

    rows: list[list[int]]
    logprobs: list[list[float]] | None  # None where the peer records none


def report(
    job: Job, rollout: Rollout, seconds: float, ready_s: float, peak_gb: float, **more: Any
) -> None:
    """Check a rollout and print a child's figures, as its last line.

    Raises ValueError when it is not what the job asked for.
    """
    rows, sums = rollout.rows, rollout.logprobs
    if len(rows) != job.num_sequences:
        raise ValueError(f"{len(rows)} samples, but {job.num_sequences} were asked for")
    for number, row in enumerate(rows):
        early = [at for at, token in enumerate(row[:-1]) if token in job.ends]
        whole = len(row) == job.max_new_tokens or (bool(row) and row[-1] in job.ends)
        if early or not whole or len(row) > job.max_new_tokens:
            raise ValueError(f"sample {number} has {len(row)} tokens and ends at none of the ends")
        if sums is not None and len(sums[number]) != len(row):
            raise ValueError(f"sample {number}: {len(row)} tokens, {len(sums[number])} log-probs")
    tokens = sum(map(len, rows))
    figures = {
        "tokens": tokens,
        "seconds": seconds,
        "tok_per_s": tokens / seconds,
        "ready_s": ready_s,
        "peak_gb": peak_gb,
    }
    if sums is not None:
        figures["mean_logprob"] = sum(map(sum, sums)) / tokens
    print(json.dumps({"figures": figures, "rows": rows, **more}))


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
    policy: Any,
    prompts: Sequence[Sequence[int]],
    samples: int,
    max_new_tokens: int,
    ends: set[int],
    temperature: float = 1.0,
) -> tuple[list[list[int]], float]:
    """Sample with ``model.generate``; return the ids of each sample up to its end, and seconds.

    No log-probs: to have them, ``generate`` keeps the scores of every token of the vocabulary.
    """
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    policy.module.set_attn_implementation("sdpa")
    policy.module.generation_config.eos_token_id = sorted(ends) or None
    drawn: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(0)
    begun = time.perf_counter()
    with torch.inference_mode():
        out = policy.module.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=temperature > 0,
            max_new_tokens=max_new_tokens,
            num_return_sequences=samples,
            pad_token_id=0,
            **(drawn if temperature > 0 else {}),
        )
    seconds = time.perf_counter() - begun
    return [up_to_end(row, ends) for row in out[:, width:].tolist()], seconds


def up_to_end(row: list[int], ends: Sequence[int] | set[int]) -> list[int]:
    """Return the ids up to and with the first that ends a sample."""
    stop = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: stop + 1]


def peak_memory_gb() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def child(script: str, arguments: Sequence[str], python: str = sys.executable) -> dict[str, Any]:
    """Run one measurement in a process of its own: peers share neither memory nor settings."""
    command = [python, script, *arguments]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def median_s(call: Callable[[], Any], repeats: int = 3) -> float:
    """Return the median time of a call, after one that warms up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
