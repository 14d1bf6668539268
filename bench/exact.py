"""What exact numerics cost, and what each numeric option leaves of the mismatch.

    python bench/exact.py                   cost: exact and fast in turn, in one process
    python bench/exact.py --mismatch        sampler against trainer, option by option, as Markdown
    python bench/exact.py --mismatch --dtype bfloat16 --option fp32_head exact       some of it

Cost is of a rollout (32 sequences of a fixed number of tokens, log-probs recorded) and of a
training step's forward and backward pass over the same sequences, packed. The figures are medians
over the repeats; each ratio is of neighbours in time. Mismatch is measured at equal weights on
chat prompts, temperature 1: d = log p (trainer) - log p (sampler) of each sampled token. Its
options:

    fast              each as fast as it can; logits of the model's type, softmax in float32
    torch_decoder     engine.decoder: torch, where fast decodes in C
    fp32_head         model.fp32_head: the head multiplies in float32, on both sides
    rounded_softmax   the trainer's softmax in the type of the logits, as log_softmax(logits) of a
                      model's output is; lagzero has no such setting
    float32_trainer   engine.dtype is the type, the trainer is float32
    exact             model.numerics: exact
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import peers

DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = ("fast", "torch_decoder", "fp32_head", "rounded_softmax", "float32_trainer", "exact")
NO_OPTIONS = {
    "float32": ("fp32_head", "float32_trainer"),
    "bfloat16": (),
    "float16": ("torch_decoder",),  # there is no other
}
"""What changes nothing in a type; rounded_softmax is of bfloat16 logits for float32."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", nargs="*", choices=DTYPES)
    parser.add_argument("--option", nargs="*", choices=OPTIONS, default=OPTIONS)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--decoder", choices=("auto", "torch"), default="auto")
    parser.add_argument("--mismatch", action="store_true", help="the table in place of the cost")
    options = parser.parse_args()
    from lagzero.numerics.allocator import keep_freed_memory
    from lagzero.numerics.quiet import quiet_libraries

    keep_freed_memory()
    quiet_libraries()
    if options.mismatch:
        mismatch(options)
    else:
        for dtype in options.dtype or ("float32",):
            cost(options, dtype)


def load(
    options: argparse.Namespace, dtype: Any, numerics: str = "fast", fp32_head: bool = False
) -> Any:
    """Return a policy; tells on stderr how it was made exact, and in what time."""
    import torch

    from lagzero.config import ModelConfig
    from lagzero.train.exactness import make_exact
    from lagzero.train.model import load_policy

    policy = load_policy(
        ModelConfig(path=options.model, dtype=dtype, device="cpu", fp32_head=fp32_head)
    )
    if numerics == "exact":
        begun = time.perf_counter()
        policy = make_exact(policy, decoder=options.decoder)
        print(
            f"exact after {time.perf_counter() - begun:.1f} s, {torch.get_num_threads()} threads; "
            f"{policy.exact}",
            file=sys.stderr,
        )
    return policy


def rollout(policy: Any, options: argparse.Namespace) -> tuple[list[Any], float]:
    """Sample and return one Sample a sequence, and the seconds it took."""
    from lagzero.engine.engine import Engine, EngineLimits
    from lagzero.engine.request import Request, Sampling, derive_seed
    from lagzero.native.decoder import make_native
    from lagzero.types import Sample

    if options.decoder == "auto" and policy.exact is None and policy.native is None:
        make_native(policy)
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


def step(
    policy: Any, samples: list[Any], backward: bool, softmax: Any = None
) -> tuple[np.ndarray, float]:
    """Return trainer minus sampler log-probs, and the seconds of the passes.

    ``softmax`` is the type in which logits are kept and normalised; None: lagzero's own.
    """
    import torch

    from lagzero.prepare.pack import pack
    from lagzero.train.logprobs import chunked_logprobs
    from lagzero.train.rows import on_device, predictor_hidden

    gaps = []
    begun = time.perf_counter()
    for row in pack(samples, 1024, True, np.ones(len(samples))):
        with torch.set_grad_enabled(backward):
            hidden = predictor_hidden(policy, row)
            targets = on_device(row.targets, policy.device)
            if softmax is None:
                logprobs, _ = chunked_logprobs(
                    hidden, policy.logits, targets, 1.0, 1024, tail=policy.tail
                )
            else:
                whole = policy.logits(hidden).to(softmax).log_softmax(-1)
                logprobs = whole.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
        if backward:
            logprobs.sum().backward()
        gaps.append(logprobs.detach().double().numpy() - row.behaviour_logprobs)
    return np.concatenate(gaps), time.perf_counter() - begun


def cost(options: argparse.Namespace, dtype: str) -> None:
    """Alternate fast and exact; the order turns round each time."""
    policies = {numerics: load(options, dtype, numerics) for numerics in ("fast", "exact")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    for number in range(options.repeats + 1):
        for name in sorted(policies, reverse=number % 2 == 0):
            policy = policies[name]
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
    for place, what in enumerate(("rollout", "forward and backward")):
        fast, exact = ([row[place] for row in times[name]] for name in ("fast", "exact"))
        ratio = statistics.median(e / f for e, f in zip(exact, fast, strict=True))
        print(
            f"{what}: fast {statistics.median(fast):.2f} s, exact {statistics.median(exact):.2f} "
            f"s, exact / fast = {ratio:.2f} in the median round"
        )


def mismatch(options: argparse.Namespace) -> None:
    """Print a row of the table for each type and option."""
    print("| weights and products | option | mean gap | largest gap | KL | tokens that differ |")
    print("|---|---|---|---|---|---|")
    for dtype in options.dtype or DTYPES:
        plain: list[Any] = []  # what fast numerics sampled, and the policy; it takes long enough
        for option in options.option:
            if option in NO_OPTIONS[dtype]:
                continue
            begun = time.perf_counter()
            print(mismatch_row(dtype, option, gaps_of(options, dtype, option, plain)), flush=True)
            seconds = time.perf_counter() - begun
            print(f"{dtype} {option}: {seconds:.0f} s", file=sys.stderr, flush=True)


def gaps_of(options: argparse.Namespace, dtype: str, option: str, plain: list[Any]) -> np.ndarray:
    """Sample with a type and option, and return what its trainer says otherwise."""
    import torch

    if option in ("torch_decoder", "fp32_head", "exact"):
        numerics = "exact" if option == "exact" else "fast"
        policy = load(options, dtype, numerics, option == "fp32_head")
        if option == "torch_decoder":
            options = argparse.Namespace(**{**vars(options), "decoder": "torch"})
        return step(policy, rollout(policy, options)[0], backward=False)[0]
    if not plain:
        policy = load(options, dtype)
        plain += [policy, rollout(policy, options)[0]]
    policy, samples = plain
    if option == "float32_trainer":
        return step(load(options, "float32"), samples, backward=False)[0]
    rounded = torch.bfloat16 if dtype == "float32" else policy.dtype
    softmax = rounded if option == "rounded_softmax" else None
    return step(policy, samples, backward=False, softmax=softmax)[0]


def mismatch_row(dtype: str, option: str, gaps: np.ndarray) -> str:
    """Return the table's row for gaps log p (trainer) - log p (sampler)."""
    kl = float((np.expm1(gaps) - gaps).mean())
    size = np.abs(gaps)
    cells = (dtype, f"`{option}`", f"{size.mean():.2g}", f"{size.max():.2g}", f"{kl:.2g}")
    return f"| {' | '.join(cells)} | {(gaps != 0).sum()} of {len(gaps)} |"


if __name__ == "__main__":
    main()
