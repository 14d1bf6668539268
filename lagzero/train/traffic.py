"""Plays random traffic on an engine and scores what it sampled again, as training does.

The traffic holds what can change a batch: prompts of all lengths, some with a common start, groups,
chunked prefill, preemption, guessed tokens that are judged together, requests that are taken back
and begun again, memory that is given back, and new weights while sequences run. Scoring packs the
sequences at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Completion, Request, Sampling, derive_seed
from lagzero.engine.speculation import NgramProposer, Speculation
from lagzero.prepare.pack import pack
from lagzero.train.logprobs import chunked_logprobs
from lagzero.train.model import Policy
from lagzero.train.rows import on_device, predictor_hidden
from lagzero.types import Array, Finish, Sample

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Traffic:
    """How lively the traffic is. Lengths in tokens."""

    num_tokens: int  # to sample, at least
    longest_prompt: int = 90
    longest_response: int = 48
    temperature: float = 0.8
    num_open: int = 10  # requests at a time
    most_running: int = 32  # sequences at a time; what an engine has is drawn up to it
    weight_change: float = 0.03  # probability before a step
    take_back: float = 0.06  # of one request, before a step
    release: float = 0.02  # of all keys and values, before a step


@dataclass(slots=True)
class Played:
    """What an engine sampled, and the weights that each version had."""

    samples: list[Sample] = field(default_factory=list[Sample])
    weights: list[Weights] = field(default_factory=list[Weights])  # by version; {}: as they are
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    batch_sizes: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Sampler against trainer, at equal weights."""

    num_tokens: int
    num_different: int  # not equal bit for bit
    gap_max: float  # nats
    gap_mean: float
    kl_k3: float  # mean of rho - 1 - log rho, rho = trainer / sampler


class _NoText:
    """A decoder for traffic whose text nobody reads."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return ""


def play(policy: Policy, traffic: Traffic, seed: int = 0) -> Played:
    """Sample at least ``traffic.num_tokens`` tokens. The policy's weights are as before, after."""
    rng = np.random.default_rng(seed)
    played = Played(weights=[_snapshot(policy) if traffic.weight_change else {}])
    engine = _engine(policy, traffic, rng)
    requests: dict[int, Request] = {}
    common = rng.integers(3, _vocabulary(policy), traffic.longest_prompt).tolist()
    done, started = 0, 0
    while done < traffic.num_tokens or requests:
        while done < traffic.num_tokens and len(requests) < traffic.num_open:
            request = _request(policy, traffic, rng, started, common)
            requests[request.id] = request
            engine.add(request)
            started += 1
        _disturb(policy, engine, requests, traffic, rng, played)
        running = sum(u.num_running for u in engine.unfinished.values())
        played.batch_sizes.add(running)
        for completion in engine.step():
            played.samples.append(_sample(requests[completion.request_id], completion))
            done += len(completion.tokens)
        unfinished = engine.unfinished
        requests = {i: r for i, r in requests.items() if i in unfinished}
    played.num_preemptions = engine.counters.num_preemptions
    played.num_cached_tokens = engine.counters.num_cached_tokens
    _load(policy, played.weights[0])
    return played


def _engine(policy: Policy, traffic: Traffic, rng: np.random.Generator) -> Engine:
    longest = traffic.longest_prompt + traffic.longest_response
    page = int(rng.choice([8, 16, 24, 32, 64]))
    limits = EngineLimits(
        max_running=int(rng.integers(3, traffic.most_running + 1)),
        page_size=page,
        kv_cache_tokens=int(-(-longest // page) * page * rng.uniform(1.5, 9)),  # tight
        prefill_chunk_tokens=int(rng.integers(5, 100)),
        round_tokens=int(rng.integers(4, 20)) if rng.random() < 0.3 else None,
        kv_on_update="recompute",
    )
    speculation = None
    if rng.random() < 0.5:
        speculation = Speculation(NgramProposer(1), 5, limits.max_running)
    return Engine(policy, _NoText(), limits, speculation=speculation)


def _request(
    policy: Policy, traffic: Traffic, rng: np.random.Generator, number: int, common: list[int]
) -> Request:
    length = int(rng.integers(1, traffic.longest_prompt + 1))
    shared = int(rng.integers(0, length + 1)) if rng.random() < 0.6 else 0
    own: list[int] = rng.integers(3, _vocabulary(policy), length - shared).tolist()
    size = int(rng.choice([1, 1, 2, 4]))
    sampling = Sampling(
        max_new_tokens=int(rng.integers(1, traffic.longest_response + 1)),
        temperature=traffic.temperature,
    )
    seeds = tuple(derive_seed("traffic", number, member) for member in range(size))
    return Request(number, (*common[:shared], *own), seeds, sampling)


def _disturb(
    policy: Policy,
    engine: Engine,
    requests: dict[int, Request],
    traffic: Traffic,
    rng: np.random.Generator,
    played: Played,
) -> None:
    if rng.random() < traffic.weight_change:
        _move(policy, rng)
        played.weights.append(_snapshot(policy))
        engine.weights_changed(len(played.weights) - 1)
    if rng.random() < traffic.release:
        engine.suspend(release=True)
    if requests and rng.random() < traffic.take_back:
        request = requests[int(rng.choice(list(requests)))]
        taken = sorted(engine.abort([request.id]), key=lambda completion: completion.member)
        ended = {c.member for c in taken if c.finish is not Finish.ABORT}
        for completion in taken:
            if completion.member in ended:
                played.samples.append(_sample(request, completion))
        left = [c for c in taken if c.member not in ended]
        again = Request(
            request.id,
            request.prompt_ids,
            tuple(request.seeds[c.member] for c in left),
            request.sampling,
            tuple(c.tokens for c in left),
        )
        requests[request.id] = again
        engine.add(again)


def _move(policy: Policy, rng: np.random.Generator) -> None:
    """Change every trained weight a little, as a step does."""
    random = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    with torch.no_grad():
        for parameter in policy.trainable().values():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.add_((noise * 0.02 * parameter.float().std().clamp(min=0.05)).to(parameter))


def _snapshot(policy: Policy) -> Weights:
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


def _load(policy: Policy, weights: Weights) -> None:
    with torch.no_grad():
        parameters = policy.trainable()
        for name, value in weights.items():
            parameters[name].copy_(value)


def _vocabulary(policy: Policy) -> int:
    return int(policy.module.get_input_embeddings().weight.shape[0])


def _sample(request: Request, completion: Completion) -> Sample:
    return Sample(
        group_index=request.id,
        member=completion.member,
        prompt_ids=request.prompt_ids,
        tokens=completion.tokens,
        advantages=np.ones(len(completion.tokens), np.float32),
        reward=0.0,
    )


def compare(policy: Policy, played: Played, traffic: Traffic, seed: int = 0) -> Comparison:
    """Score every sampled token under the weights of its version, in rows packed at random.

    The forward pass is that of a training step, gradients included.
    """
    rng = np.random.default_rng(seed)
    gaps: list[Array] = []
    different = 0
    samples = [sample for sample in played.samples if len(sample.tokens)]
    for version, weights in enumerate(played.weights):
        wanted = [s for s in samples if (s.tokens["version"] == version).any()]
        if not wanted:
            continue
        _load(policy, weights)
        order = [wanted[int(i)] for i in np.argsort(rng.random(len(wanted)))]
        rows = pack(
            order,
            int(rng.integers(150, 1200)),
            share_prompt=bool(rng.random() < 0.7),
            weights=np.ones(len(order)),
        )
        for row in rows:
            scored = _score(policy, row, traffic.temperature, int(rng.integers(20, 300)))
            same = row.versions == version
            different += int((scored != row.behaviour_logprobs)[same].sum())
            gaps.append((scored.astype(np.float64) - row.behaviour_logprobs)[same])
    _load(policy, played.weights[0])
    gap = np.concatenate(gaps)
    return Comparison(
        len(gap),
        different,
        float(np.abs(gap).max()),
        float(np.abs(gap).mean()),
        float((np.expm1(gap) - gap).mean()),
    )


def _score(policy: Policy, row: Any, temperature: float, chunk: int) -> Array:
    with torch.enable_grad():
        logprobs, _ = chunked_logprobs(
            predictor_hidden(policy, row),
            policy.logits,
            on_device(row.targets, policy.device),
            temperature,
            chunk,
            tail=policy.tail,
        )
    return logprobs.detach().float().cpu().numpy()
