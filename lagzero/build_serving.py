"""From configuration to engines: where they run, how weights reach them, who takes turns.

``build`` makes what learns, this makes what samples; the two are the only importers of backends.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from lagzero.config import Config
from lagzero.engine.attention import KVCache
from lagzero.engine.engine import Engine, EngineCounters, EngineLimits
from lagzero.engine.request import Sampling
from lagzero.engine.runner import cache_dtype, probe_kv_shapes
from lagzero.engine.speculation import DraftProposer, NgramProposer, Speculation
from lagzero.errors import LagzeroError
from lagzero.generate.native_backend import NativeBackend
from lagzero.generate.patient import PatientGenerator
from lagzero.generate.process_backend import ProcessBackend
from lagzero.generate.rollout import SamplingBackend, SingleTurnGenerator
from lagzero.generate.turns import TurnsGenerator
from lagzero.native.decoder import make_native, why_not
from lagzero.numerics.allocator import keep_freed_memory
from lagzero.numerics.memory import free_bytes
from lagzero.numerics.precision import pick_dtype
from lagzero.numerics.quiet import quiet_libraries
from lagzero.protocols import Gate, Generator, WeightLink
from lagzero.runtime.cores import CoreSets, core_halves, core_sets, move_threads, stay_on
from lagzero.runtime.engine_process import Served
from lagzero.runtime.local_runtime import (
    ComputeThread,
    FreeGate,
    PauseGate,
    SwapGate,
    TurnGate,
)
from lagzero.runtime.process_handle import ProcessPlan
from lagzero.runtime.process_pool import DeathRule, EnginePool
from lagzero.schedule.check import runs_on
from lagzero.schedule.router import Repacking
from lagzero.sync.memory import CopiedWeights, SharedWeights
from lagzero.sync.quantised import QuantisedWeights, RequantisedWeights
from lagzero.sync.shared_memory import Manifest, SlotWeights, WeightSlots
from lagzero.train.exactness import DecoderChoice, make_exact
from lagzero.train.light import load_light_policy
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy, load_beside, load_policy, stop_ids
from lagzero.train.quantised import quantisable, quantised_copy


class Backend(SamplingBackend, Protocol):
    """A sampling backend as a run uses it, wherever its engines are."""

    @property
    def counters(self) -> EngineCounters:
        """Totals of all engines."""
        ...

    @property
    def num_moved(self) -> int:
        """Responses that went on at another engine than they had begun at, so far."""
        ...

    async def forget_prefixes(self) -> None:
        """Let no later request find a cached prefix."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """What samples: the engines' backend, generators for each purpose, and how weights come in.

    ``running`` is entered for as long as the engines are needed.
    """

    backend: Backend
    link: WeightLink
    gate: Gate
    running: Callable[[], AbstractAsyncContextManager[object]]
    train: Generator
    eval_greedy: Generator
    eval_sampled: Generator


def build_serving(
    config: Config, policy: Policy, compute: ComputeThread, report: Callable[[str], None]
) -> Serving:
    """Make the engines that serve a policy, and the generators that play prompts on them.

    ``report`` hears, in words, how exact numerics are kept, of engines that die and of groups that
    do not end.
    """
    if policy.exact is not None:
        report(f"exact numerics: {policy.exact}")
    match config.placement.kind:
        case "colocated":
            serving_policy = build_serving_policy(config, policy)
            engine = _engine(config, serving_policy)
            native = NativeBackend(engine, compute)
            link = _link(config, policy, serving_policy, engine, compute)
            gate = _turns(config, native)
            return _serving(config, policy, native, (native,), link, gate, nullcontext, report)
        case "disaggregated" | "swap":
            return _in_processes(config, policy, compute, report)


def _turns(config: Config, backend: NativeBackend) -> Gate:
    goes_on, release = runs_on(config), config.placement.release_kv
    if release is None:
        release = not goes_on
    if goes_on:
        return PauseGate(FreeGate(), backend, release)
    return PauseGate(TurnGate(), backend, release) if release else TurnGate()


def _in_processes(
    config: Config, policy: Policy, compute: ComputeThread, report: Callable[[str], None]
) -> Serving:
    placement = config.placement
    dtype, staged = _engine_dtype(config, policy), _staged(config, policy)
    if staged is None:
        source, layout, changing = policy.weights(), policy.weights(), policy.trainable().keys()
    else:
        source, layout, changing = staged.tensors, staged.layout(dtype), staged.changing
    manifest = Manifest.of(layout, dtype if staged is None else None)
    slots = WeightSlots(manifest, changing)
    atexit.register(slots.close)  # should the run fail before it has begun
    places = _core_places(config)
    cores = [each for place in places for each in place.engines] or [None] * placement.engines
    plans = [
        ProcessPlan(
            functools.partial(serve_engine, config, exact_decoder(policy)),
            slots.reader,
            placement.engine_threads,
            each,
        )
        for each in cores
    ]
    rule = DeathRule(
        placement.on_engine_death, placement.max_engine_restarts, placement.engine_silence_s
    )
    pool = EnginePool(plans, rule, report)
    num_parts = 2 if placement.kind == "swap" else 1
    below = placement.repack_below
    repacking = None if below is None else Repacking(below, config.engine.max_running)
    backend = ProcessBackend(pool, num_parts=num_parts, repacking=repacking)
    link: WeightLink = SlotWeights(source, slots, pool, compute)
    if staged is not None:
        link = RequantisedWeights(staged.refresh, link, compute)
    gate = FreeGate() if num_parts == 1 else _swaps(pool, places)

    @asynccontextmanager
    async def running() -> AsyncGenerator[None]:
        async with AsyncExitStack() as closing:
            closing.callback(slots.close)
            if places:
                await compute.call(stay_on, places[0].trainer)
            await backend.start()
            closing.push_async_callback(backend.close)
            yield

    parts = [backend.part(number) for number in range(num_parts)]
    return _serving(config, policy, backend, parts, link, gate, running, report)


def _core_places(config: Config) -> tuple[CoreSets, ...]:
    """Return the cores of each place where the trainer may work; empty where none are its own."""
    placement = config.placement
    if not placement.pin_cores:
        return ()
    if placement.kind == "swap":
        return core_halves(placement.engines, placement.engine_threads) or ()
    cores = core_sets(placement.engines, placement.engine_threads)
    return () if cores is None else (cores,)


def _swaps(pool: EnginePool, places: Sequence[CoreSets]) -> Gate:
    half = pool.num_engines // 2
    halves = (range(half), range(half, 2 * half))

    def move(number: int) -> None:
        if places:
            move_threads(places[1 - number].trainer, places[number].trainer)

    return SwapGate(halves, pool, move)


def exact_decoder(policy: Policy) -> DecoderChoice | None:
    """Return which decoder an engine's process must use to be exact with the trainer's policy.

    None where the policy is not exact.
    """
    if policy.exact is None:
        return None
    return "native" if policy.exact.native else "torch"


def serve_engine(config: Config, decoder: DecoderChoice | None) -> Served:
    """Make the engine of one process; its weights are replaced before anything is sampled.

    ``decoder`` is ``exact_decoder`` of the trainer's policy: two processes must not decide apart
    how, and whether, numerics are exact.
    """
    keep_freed_memory()
    quiet_libraries()
    policy = _sampling_policy(config, decoder)
    if decoder is not None:
        policy = make_exact(policy, decoder=decoder)
    engine = _engine(config, policy)
    return Served(engine, dict(policy.module.named_parameters()))


def _sampling_policy(config: Config, decoder: DecoderChoice | None) -> Policy:
    """Load what an engine samples with: the light way where it then decodes in C."""
    if config.model.lora is None and "torch" not in (decoder, config.engine.decoder):
        light = load_light_policy(config.model)
        if light is not None:
            policy = build_serving_policy(config, light)
            if why_not(policy) is None:
                return policy
    policy = load_policy(config.model)
    if config.model.lora is not None:
        policy = add_lora(policy, config.model.lora, config.seed)
    return build_serving_policy(config, policy)


def _serving(
    config: Config,
    policy: Policy,
    backend: Backend,
    parts: Sequence[SamplingBackend],
    link: WeightLink,
    gate: Gate,
    running: Callable[[], AbstractAsyncContextManager[object]],
    report: Callable[[str], None],
) -> Serving:
    rollout = config.rollout
    ends = frozenset(stop_ids(policy.module, policy.tokenizer))
    greedy = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=0.0,
        stop_ids=ends,
        stop_strings=tuple(rollout.stop),
        include_stop=rollout.include_stop,
    )
    sampled = replace(
        greedy,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )

    def patient(generator: Generator) -> Generator:
        if rollout.timeout_s is None:
            return generator
        return PatientGenerator(generator, rollout.timeout_s, rollout.retries, report)

    def generators(sampling: Sampling, size: int, stream: str) -> list[Generator]:
        return [SingleTurnGenerator(each, sampling, size, config.seed, stream) for each in parts]

    def generator(sampling: Sampling, size: int) -> Generator:
        return TurnsGenerator(generators(sampling, size, "eval"), 1)

    train = [patient(each) for each in generators(sampled, rollout.group_size, "train")]
    return Serving(
        backend,
        link,
        gate,
        running,
        TurnsGenerator(train, config.schedule.groups_per_step),
        eval_greedy=generator(greedy, 1),
        eval_sampled=generator(sampled, config.eval.samples),
    )


def _link(
    config: Config, policy: Policy, serving: Policy, engine: Engine, compute: ComputeThread
) -> WeightLink:
    if serving is policy:
        return SharedWeights(engine, compute)
    staged, target = _staged(config, policy), serving.weights()
    if staged is None:
        changing = policy.trainable().keys()
        return CopiedWeights(policy.weights(), target, engine, compute, changing)
    link = CopiedWeights(staged.tensors, target, engine, compute, staged.changing)
    return RequantisedWeights(staged.refresh, link, compute)


def _staged(config: Config, policy: Policy) -> QuantisedWeights | None:
    kind = config.engine.weights
    if kind == "same":
        return None
    matrices = [f"{name}.weight" for name in quantisable(policy)]
    return QuantisedWeights(policy.weights(), matrices, kind, policy.trainable().keys())


def build_serving_policy(config: Config, policy: Policy) -> Policy:
    """Return the policy itself where the engine can use its tensors, else a copy as it wants it."""
    wanted, kind = _engine_dtype(config, policy), config.engine.weights
    if kind != "same":
        return quantised_copy(policy, kind, wanted)
    return policy if wanted in (None, policy.dtype) else policy.cast_copy(wanted)


def _engine_dtype(config: Config, policy: Policy) -> torch.dtype | None:
    """Return the type to cast to, or None where each tensor keeps its own."""
    match config.engine.dtype:
        case "same":
            return None
        case "float32" | "bfloat16" | "float16" as dtype:
            return pick_dtype(dtype, policy.device)


def _engine(config: Config, policy: Policy) -> Engine:
    if config.engine.decoder != "torch" and policy.exact is None:
        reason = make_native(policy)
        if reason is not None and config.engine.decoder == "native":
            raise LagzeroError(f"engine.decoder: native cannot decode here: {reason}; use auto")
    limits = _engine_limits(config, policy)
    speculation = _speculation(config, policy, limits)
    return Engine(policy, policy.tokenizer, limits, speculation=speculation)


def _speculation(config: Config, policy: Policy, limits: EngineLimits) -> Speculation | None:
    asked = config.engine.speculate
    match asked.kind:
        case "none":
            return None
        case "ngram":
            proposer = NgramProposer(asked.match)
        case "draft":
            draft = load_beside(config.model, str(asked.path), policy, "engine.speculate.path")
            most = min(limits.kv_cache_tokens, asked.max_running * draft.context_limit)
            num_ids = policy.module.get_output_embeddings().weight.shape[0]
            pages = -(-most // limits.page_size)
            if config.engine.decoder != "torch":
                make_native(draft)
            proposer = DraftProposer(draft, pages, limits.page_size, num_ids)
    return Speculation(proposer, asked.tokens, asked.max_running)


def _engine_limits(config: Config, policy: Policy) -> EngineLimits:
    """Size the KV cache: as configured, else a share of free memory, at most what can be used."""
    engine = config.engine
    most = engine.max_running * policy.context_limit
    tokens = engine.kv_cache_tokens
    if tokens is None:
        shapes = probe_kv_shapes(policy).shapes
        per_token = KVCache.bytes_per_token(shapes, cache_dtype(policy))
        share = engine.kv_cache_share / config.placement.engines
        tokens = int(free_bytes(policy.device) * share) // per_token
    return EngineLimits(
        max_running=engine.max_running,
        page_size=engine.page_size,
        kv_cache_tokens=max(engine.page_size, min(tokens, most)),
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache=engine.prefix_cache,
        round_tokens=config.rollout.tokens_per_round,
        kv_on_update=engine.kv_on_update,
        kv_reserve=engine.kv_reserve,
    )
