"""What spawned processes serve in tests. Imported there by name, so it lies on ``sys.path``.

No torch here at the top: most tests are about processes, which then start at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

from lagzero.engine.request import Completion, Request
from lagzero.errors import LagzeroError, WeightSyncError
from lagzero.runtime.engine_process import Served
from lagzero.types import Finish, sampled_tokens

BREAK, REFUSE, EXIT = 1001, 1002, 1003  # first prompt tokens with which a step or ``add`` fails


@dataclass(frozen=True)
class Totals:
    num_steps: int
    num_sampled_tokens: int
    max_used_pages: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_parked: int = 0


def expected(seed: int, num: int) -> list[int]:
    """The tokens that any engine here samples with a seed."""
    return [(seed * 31 + place * 7) % 997 for place in range(num)]


@dataclass
class Running:
    request: Request
    member: int
    logprobs: list[float]
    versions: list[int]


class FakeEngine:
    """Samples what the seed says. Steps wait while ``folder/hold`` is there."""

    def __init__(self, folder: Path, version: int = 0):
        self.folder = folder
        self.version = version
        self.num_steps = self.num_tokens = self.num_announcements = self.num_forgotten = 0
        self.running: list[Running] = []
        self.in_step = False

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    @property
    def counters(self) -> Any:
        return Totals(self.num_steps, self.num_tokens, max_used_pages=os.getpid() % 100)

    def add(self, request: Request) -> None:
        if request.prompt_ids[0] == REFUSE:
            raise LagzeroError(f"request of {len(request.seeds)} members refused")
        for member in range(len(request.seeds)):
            begun = request.begun[member] if request.begun else sampled_tokens([], [], [])
            had = begun["logprob"].tolist(), begun["version"].tolist()
            self.running.append(Running(request, member, *had))

    def logprob(self) -> float:
        return -0.5

    def step(self) -> list[Completion]:
        self.in_step = True
        if (self.folder / "hold").exists():
            (self.folder / f"held-{os.getpid()}").touch()
            while (self.folder / "hold").exists():
                time.sleep(0.002)
        first = {each.request.prompt_ids[0] for each in self.running}
        if BREAK in first:
            raise ArithmeticError("the step broke")
        if EXIT in first:
            os._exit(3)
        self.num_steps += 1
        ended: list[Completion] = []
        for each in self.running:
            each.logprobs.append(self.logprob())
            each.versions.append(self.version)
            if len(each.versions) == each.request.sampling.max_new_tokens:
                ended.append(self.completion(each, Finish.LENGTH))
        self.num_tokens += len(self.running)
        done = {(c.request_id, c.member) for c in ended}
        self.running = [r for r in self.running if (r.request.id, r.member) not in done]
        self.in_step = False
        return ended

    def completion(self, each: Running, finish: Finish) -> Completion:
        ids = expected(each.request.seeds[each.member], len(each.versions))
        tokens = sampled_tokens(ids, each.logprobs, each.versions)
        return Completion(each.request.id, each.member, tokens, "", finish, self.version)

    def abort(self, request_ids: Iterable[int]) -> list[Completion]:
        gone = [r for r in self.running if r.request.id in set(request_ids)]
        self.running = [r for r in self.running if r not in gone]
        return [self.completion(each, Finish.ABORT) for each in gone]

    def weights_changed(self, version: int) -> None:
        assert not self.in_step
        self.version = version
        self.num_announcements += 1

    def forget_prefixes(self) -> None:
        assert not self.in_step
        self.num_forgotten += 1

    def reset(self) -> None:
        self.in_step = False
        self.running.clear()


def serve_fake(folder: Path) -> Served:
    """Serve; a start waits while ``folder/hold-start`` is there."""
    while (folder / "hold-start").exists():
        time.sleep(0.002)
    return Served(FakeEngine(folder), {})


def serve_once(folder: Path) -> Served:
    """Serve the first time; raise ever after."""
    if (folder / "served").exists():
        raise OSError("the model's file is gone")
    (folder / "served").touch()
    return Served(FakeEngine(folder), {})


def serve_what_it_sees(folder: Path) -> Served:
    """Write down the process's cores and threads, then serve."""
    cores = sorted(os.sched_getaffinity(0))
    (folder / "seen").write_text(f"{cores} {os.environ['OMP_NUM_THREADS']}")
    return Served(FakeEngine(folder), {})


def fail(path: str) -> Served:
    raise FileNotFoundError(f"there is no model {path!r}")


@dataclass(frozen=True)
class OpensMemory:
    """Opens shared memory as a reader of weights does; refuses orders while it does not hold 0."""

    segment: str

    def attach(self, weights: object) -> OpenMemory:
        return OpenMemory(self.segment)


class OpenMemory:
    def __init__(self, segment: str):
        self.memory = SharedMemory(segment)
        self.view = np.frombuffer(self.memory.buf, np.int64)  # like tensors, it pins the memory

    def take(self, version: int, slot: int) -> None:
        if self.view[slot]:
            raise WeightSyncError(f"{os.getpid()} sees {self.view[slot]} in slot {slot}")


class ReadingEngine(FakeEngine):
    """Its log-probs are minus the value that all of its parameters hold."""

    def __init__(self, folder: Path, module: Any):
        super().__init__(folder)
        self.module = module

    def logprob(self) -> float:
        parts = [p.detach().flatten()[::50] for p in self.module.parameters()]
        values = {float(x) for part in parts for x in part}
        assert len(values) == 1, f"torn weights: {values}"
        return -values.pop()


def make_module(value: float = 0.0) -> Any:
    """A module with two layers whose weights are tied, and a bias."""
    import torch

    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(30, 5)
    module.norm = torch.nn.Linear(5, 7)
    module.head = torch.nn.Linear(5, 30, bias=False)
    module.head.weight = module.embed.weight
    for parameter in module.parameters():
        parameter.data.fill_(value)
    return module


def serve_module(folder: Path) -> Served:
    module = make_module()
    return Served(ReadingEngine(folder, module), dict(module.named_parameters()))


class Words:
    """A tokenizer whose token i reads as <i>."""

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return "".join(f"<{i}>" for i in token_ids)


def make_llama(seed: int, plain: bool = False) -> Any:
    """A tiny random Llama in float32, under lagzero's attention or under transformers' own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lagzero.numerics.attention import ATTENTION, register

    register()
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.12,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    module: Any = LlamaForCausalLM._from_config(
        config, attn_implementation="sdpa" if plain else ATTENTION
    )
    return module.eval().requires_grad_(False)


def llama_engine(module: Any) -> Any:
    from lagzero.engine.engine import Engine, EngineLimits
    from lagzero.train.model import Policy

    limits = EngineLimits(max_running=32, page_size=8, kv_cache_tokens=16384)
    return Engine(Policy(module, Words()), Words(), limits)


def serve_llama(seed: int) -> Served:
    module = make_llama(seed)
    return Served(llama_engine(module), dict(module.named_parameters()))
