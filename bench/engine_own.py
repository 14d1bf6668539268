"""The peers of ``bench/engine.py`` that run in this environment: the engine, and ``generate``."""

from __future__ import annotations

import functools
import time
from typing import Any

import engine_breakdown
import peers

from lagzero.runtime.cores import limit_spinning


def main() -> None:
    """Sample once as one peer, or once with the engine under the stopwatch."""
    job, peer = peers.Job.of_arguments()
    if peer != "generate":
        limit_spinning()  # as the command line does, before torch is loaded
    import torch

    torch.set_num_threads(job.threads)
    begun = time.perf_counter()
    if peer == "generate":
        sample = functools.partial(generate, load_policy(job))
    else:
        engine = make_engine(job, peer)
        sample = functools.partial(run_engine, engine)
    sample(job.warm_up())
    ready_s = time.perf_counter() - begun
    watched = engine_breakdown.watch_engine() if peer == "profile" else None
    rollout, seconds = sample(job)
    peak_gb = peers.peak_memory_gb()
    more = {} if watched is None else {"profile": profile(engine.policy, watched, seconds)}
    peers.report(job, rollout, seconds, ready_s, peak_gb, **more)


def load_policy(job: peers.Job) -> Any:
    """Load the model as a run does."""
    from lagzero.config import ModelConfig
    from lagzero.numerics.quiet import quiet_libraries
    from lagzero.train.model import load_policy

    quiet_libraries()
    return load_policy(ModelConfig(path=job.folder, dtype=job.dtype, device="cpu"))  # pyright: ignore


def generate(policy: Any, job: peers.Job) -> tuple[peers.Rollout, float]:
    """Sample with transformers."""
    rows, seconds = peers.generate(
        policy, job.prompts, job.samples, job.max_new_tokens, set(job.ends), job.temperature
    )
    return peers.Rollout(rows, None), seconds


def make_engine(job: peers.Job, peer: str) -> Any:
    """Return a run's engine, in which all sequences run at once and none waits for pages.

    It takes its cache's memory before it is ready, as vLLM does.

    What follows ``engine-`` in the peer's name is how it stores the weights, ``engine.weights``,
    or int16: what it multiplies in, ``model.products``.
    """
    from lagzero.runtime.collector import without_collector

    with without_collector():  # as an engine process starts
        return serve(job, peer)


def serve(job: peers.Job, peer: str) -> Any:
    """Import what serves, and make the engine."""
    from lagzero.build_serving import serve_engine
    from lagzero.config_load import parse_config

    num = job.num_sequences
    engine: dict[str, Any] = {
        "max_running": num,
        "kv_cache_tokens": num * (job.longest + 32),
        "kv_reserve": True,
    }
    model: dict[str, Any] = {"path": job.folder, "dtype": job.dtype, "device": "cpu"}
    kind = peer.partition("-")[2]
    if kind == "int16":
        model["products"] = kind
    elif kind:
        engine["weights"] = kind
    config = parse_config(
        {
            "model": model,
            "engine": engine,
            "rollout": {"max_new_tokens": job.max_new_tokens},
            "data": {"train": [{"kind": "arithmetic", "size": 1}]},
            "score": {"rewards": [{"use": "number_answer"}]},
            "eval": {"before": False, "after": False},
        }
    )
    return serve_engine(config, None).engine


def run_engine(engine: Any, job: peers.Job) -> tuple[peers.Rollout, float]:
    """Sample with the engine, as its backend drives it."""
    from lagzero.engine.request import Request, Sampling, derive_seed

    begun = time.perf_counter()
    sampling = Sampling(job.max_new_tokens, job.temperature, stop_ids=frozenset(job.ends))
    for number, prompt in enumerate(job.prompts):
        seeds = tuple(derive_seed("bench", number, k) for k in range(job.samples))
        engine.add(Request(number, tuple(prompt), seeds, sampling))
    done: list[Any] = []
    while engine.has_work:
        done += engine.step()
    seconds = time.perf_counter() - begun
    done.sort(key=lambda each: (each.request_id, each.member))
    rows = [each.tokens["id"].tolist() for each in done]
    return peers.Rollout(rows, [each.tokens["logprob"].tolist() for each in done]), seconds


def profile(policy: Any, watched: engine_breakdown.Watched, wall_s: float) -> dict[str, Any]:
    """Return where the time went, and the bounds of the steps that were taken."""
    import roofline

    shares = watched.shares(wall_s)
    bounds = roofline.measure(policy, watched.steps)
    return {"shares": shares, "not_found": watched.missing, **bounds}


if __name__ == "__main__":
    main()
