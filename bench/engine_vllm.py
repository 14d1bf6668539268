"""The vLLM peer of ``bench/engine.py``; runs in the environment that vLLM is in."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import peers

SPARE_TOKENS = 4096  # the cache holds more than the sequences, so that none is ever put back


def main() -> None:
    """Sample once."""
    job, _ = peers.Job.of_arguments()
    result = os.dup(1)
    os.dup2(2, 1)  # what vLLM and its processes print, at their end too, is not the result
    begun = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_CPU_KVCACHE_SPACE=str(cache_gib(job)),
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():  # vLLM's manual advises it; its processes, which compute, start with it
        os.environ["LD_PRELOAD"] = str(openmp)
    from vllm import LLM

    llm = LLM(
        model=job.folder,
        dtype=job.dtype,  # pyright: ignore
        max_model_len=job.longest + 32,
        block_size=32,  # its own 128 would share no prompt among samples
        max_num_seqs=job.num_sequences,
        max_num_batched_tokens=max(2048, job.longest + 32),
        disable_log_stats=True,
    )
    sample(llm, job.warm_up())
    ready_s = time.perf_counter() - begun
    begun = time.perf_counter()
    rollout = sample(llm, job)
    seconds = time.perf_counter() - begun
    processes = [os.getpid(), *descendants(os.getpid())]
    memory_gb = sum(map(peak_gb, processes))
    sys.stdout = os.fdopen(result, "w")
    peers.report(job, rollout, seconds, ready_s, memory_gb)
    sys.stdout.flush()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(each) for thread in threads for each in thread.read_text().split()]
    return [each for child in own for each in (child, *descendants(child))]


def peak_gb(pid: int) -> float:
    """Return the most memory that a process has held."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1e6


def cache_gib(job: peers.Job) -> int:
    """Return the whole GiB that keys and values of all sequences take at most."""
    config: dict[str, Any] = json.loads((Path(job.folder) / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size
    token_bytes = numbers * (2 if job.dtype == "bfloat16" else 4)
    tokens = job.num_sequences * (job.longest + 128) + SPARE_TOKENS
    return -(-tokens * token_bytes // (1 << 30))


def sample(llm: Any, job: peers.Job) -> peers.Rollout:
    """Sample with the log-prob of each token that was drawn."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(
        n=job.samples,
        temperature=job.temperature,
        max_tokens=job.max_new_tokens,
        stop_token_ids=job.ends,
        ignore_eos=True,  # its own ids; those of the job stop
        logprobs=0,
        detokenize=False,
    )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job.prompts]
    outputs = [
        each for done in llm.generate(prompts, params, use_tqdm=False) for each in done.outputs
    ]
    rows = [list(each.token_ids) for each in outputs]
    logprobs = [
        [place[token].logprob for token, place in zip(each.token_ids, each.logprobs, strict=True)]
        for each in outputs
    ]
    return peers.Rollout(rows, logprobs)


if __name__ == "__main__":
    main()
