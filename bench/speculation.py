"""The tail of a rollout with and without speculative decoding, in turn, in one process.

    python bench/speculation.py                      prompts that ask to copy a list
    python bench/speculation.py --prompts chat       ordinary questions
    python bench/speculation.py --draft-layers 15    a draft: the policy's own first 15 layers

8 sequences are sampled, of which 2 go on long after the others have ended; the tail begins there.
Lengths are fixed, so that every measurement samples as many tokens, and the tokens are compared:
they are the same but where rounding moves a draw.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import peers


@dataclass(frozen=True)
class Run:
    """One measurement."""

    tail_s: float
    tail_tokens: int
    tail_steps: int
    num_proposed: int
    num_accepted: int
    ids: dict[tuple[int, int], list[int]]


def main() -> None:
    """Measure A B A B ... and print the medians."""
    parser = argparse.ArgumentParser(description="The tail with and without guesses.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--prompts", default="copy", choices=("copy", "chat"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--long", type=int, default=2, help="of them, last")
    parser.add_argument("--short-tokens", type=int, default=32)
    parser.add_argument("--long-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8, help="engine.speculate.tokens")
    parser.add_argument("--match", type=int, default=3, help="engine.speculate.match")
    parser.add_argument("--draft-layers", type=int, help="kind draft; else ngram")
    parser.add_argument("--decoder", default="auto", choices=("auto", "torch"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    import torch

    from lagzero.config import ModelConfig
    from lagzero.native.decoder import make_native
    from lagzero.numerics.allocator import keep_freed_memory
    from lagzero.train.model import load_policy

    keep_freed_memory()
    policy = load_policy(ModelConfig(path=options.model, dtype=options.dtype))
    if options.decoder == "auto" and (reason := make_native(policy)) is not None:
        print(f"decoder torch: {reason}")
    with_, without = [], []
    for number in range(options.repeats):
        for runs, speculates in ((without, False), (with_, True)):
            runs.append(measure(policy, options, speculates))
            print(f"{number + 1} {describe(runs[-1])}", flush=True)
    print(f"{policy.dtype}, {torch.get_num_threads()} threads, {vars(options)}")
    slow, fast = (median(run.tail_s for run in runs) for runs in (without, with_))
    one, plain = with_[0], without[0]
    same = sum(one.ids[key] == ids for key, ids in plain.ids.items())
    print(f"tail without {slow:.2f} s, with {fast:.2f} s: {slow / fast:.2f} times as fast")
    print(f"accepted {one.num_accepted} of {one.num_proposed} proposed tokens")
    print(f"sequences with the same tokens: {same} of {len(plain.ids)}")


def describe(run: Run) -> str:
    """Return one line."""
    return (
        f"{run.tail_tokens} tokens in {run.tail_s:.2f} s and {run.tail_steps} steps, "
        f"{run.num_accepted} of {run.num_proposed} accepted"
    )


def requests(policy: Any, options: argparse.Namespace) -> list[Any]:
    """Return the sequences, each a request of its own, the long ones last."""
    from lagzero.engine.request import Request, Sampling, derive_seed

    num, first_long = options.sequences, options.sequences - options.long
    prompts = peers.chat_prompts(policy.tokenizer, num)
    if options.prompts == "copy":
        prompts = [copy_prompt(policy.tokenizer, number) for number in range(num)]
    asked = []
    for number in range(num):
        length = options.long_tokens if number >= first_long else options.short_tokens
        sampling = Sampling(length, temperature=options.temperature)
        seeds = (derive_seed("speculation", number),)
        asked.append(Request(number, tuple(prompts[number]), seeds, sampling))
    return asked


def copy_prompt(tokenizer: Any, number: int) -> list[int]:
    """Ask for a list of people as it stands."""
    names = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Leslie", "Niklaus", "Tony")
    towns = ("Turin", "Lyon", "Graz", "Oslo", "Ghent", "Porto", "Basel", "Leeds", "Cork", "Riga")
    rows = [
        f"{row + 1}. {names[(row * 5 + number) % 9]} from {towns[(row * 3 + number) % 10]}, "
        f"room {100 + (row * 37 + number) % 90}"
        for row in range(16)
    ]
    text = "Copy this list exactly, without any change:\n" + "\n".join(rows)
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def speculation(policy: Any, options: argparse.Namespace) -> Any:
    """Return what the engine guesses with, while at most the long sequences run."""
    from lagzero.engine.speculation import DraftProposer, NgramProposer, Speculation
    from lagzero.native.decoder import make_native

    proposer = NgramProposer(options.match)
    if options.draft_layers is not None:
        module = copy.deepcopy(policy.module)
        module.model.layers = module.model.layers[: options.draft_layers]
        draft = replace(policy, module=module, native=None)
        if options.decoder == "auto":
            make_native(draft)
        num_ids = module.get_output_embeddings().weight.shape[0]
        proposer = DraftProposer(draft, 256, 32, num_ids)
    return Speculation(proposer, options.tokens, options.long)


def measure(policy: Any, options: argparse.Namespace, speculates: bool) -> Run:
    """Sample all sequences in a fresh engine, and time the steps of the tail."""
    from lagzero.engine.engine import Engine, EngineLimits

    guesses = speculation(policy, options) if speculates else None
    limits = EngineLimits(kv_cache_tokens=16384, prefix_cache=False)
    engine = Engine(policy, policy.tokenizer, limits, speculation=guesses)
    for request in requests(policy, options):
        engine.add(request)
    ids: dict[tuple[int, int], list[int]] = {}
    begun, before = 0.0, engine.counters
    while engine.has_work:
        for done in engine.step():
            ids[done.request_id, done.member] = done.tokens["id"].tolist()
        if len(ids) == options.sequences - options.long and not begun:
            begun, before = time.perf_counter(), engine.counters
    after = engine.counters
    return Run(
        time.perf_counter() - begun,
        after.num_sampled_tokens - before.num_sampled_tokens,
        after.num_steps - before.num_steps,
        after.num_proposed,
        after.num_accepted,
        ids,
    )


if __name__ == "__main__":
    main()
