"""A real model in a real process: the same tokens as in this one, and weights that change."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lagzero.engine.request import Sampling
from lagzero.generate.native_backend import NativeBackend
from lagzero.generate.process_backend import ProcessBackend
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.runtime.process_handle import ProcessPlan
from lagzero.runtime.process_pool import DeathRule, EnginePool
from lagzero.sync.shared_memory import Manifest, SlotWeights, WeightSlots
from lagzero.types import Finish

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # spawned processes inherit it
import process_factories as served  # pyright: ignore[reportMissingImports]

PROMPT = tuple(range(20, 60))
TOLERANCE = 5e-5  # float32, two layers, other orders of summation; as in the engine's own tests


class Bench:
    """One engine process for all tests here; version v is that of the v-th update so far."""

    def __init__(self):
        self.states = [dict(served.make_llama(seed).named_parameters()) for seed in range(2)]
        self.weights = {name: tensor.clone() for name, tensor in self.states[0].items()}
        self.slots = WeightSlots(Manifest.of(self.weights))
        # It starts from weights that are neither of the two, which nobody may see.
        plan = ProcessPlan(functools.partial(served.serve_llama, 9), self.slots.reader)
        self.reports: list[str] = []
        self.pool = EnginePool([plan], DeathRule(), self.reports.append)
        self.backend = ProcessBackend(self.pool)
        self.compute = ComputeThread()
        self.link = SlotWeights(self.weights, self.slots, self.pool, self.compute)
        self.version = -1
        self.which: dict[int, int] = {}  # version -> the state that it is
        self.loop = asyncio.new_event_loop()

    def run(self, main):
        return self.loop.run_until_complete(asyncio.wait_for(main, 120))

    async def publish(self, which: int) -> int:
        self.version += 1
        self.which[self.version] = which
        for name, tensor in self.weights.items():
            tensor.copy_(self.states[which][name])
        await self.link.publish(self.version)
        return self.version

    def ask(self, seed: int, new: int, prompt=PROMPT, members: int = 1, **options):
        seeds = [seed + member for member in range(members)]
        return asyncio.ensure_future(
            self.backend.complete(prompt, seeds, Sampling(new), **options), loop=self.loop
        )


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    try:
        bench.run(bench.backend.start())
        yield bench
        assert bench.reports == []
    finally:
        bench.run(bench.backend.close())
        bench.loop.close()
        bench.compute.close()
        bench.slots.close()


def test_same_seeds_and_weights_give_the_tokens_of_an_engine_in_this_process(bench: Bench):
    async def in_process(which: int, asked):
        compute = ComputeThread()
        backend = NativeBackend(served.llama_engine(served.make_llama(which)), compute)
        try:
            return await asyncio.gather(
                *(backend.complete(prompt, seeds, sampling) for prompt, seeds, sampling in asked)
            )
        finally:
            compute.close()

    asked = [
        (PROMPT[: 5 + 3 * n], list(range(10 * n, 10 * n + 3)), Sampling(4 + n, temperature=n % 3))
        for n in range(8)
    ]

    async def main(which: int):
        await bench.publish(which)
        return await asyncio.gather(*(bench.backend.complete(*each) for each in asked))

    texts: list[list[str]] = []
    for which in (1, 0):
        ours = bench.run(main(which))
        theirs = asyncio.run(in_process(which, asked))
        for mine, other in zip(ours, theirs, strict=True):
            for a, b in zip(mine, other, strict=True):
                assert (a.member, a.text, a.finish) == (b.member, b.text, b.finish)
                assert a.tokens["id"].tolist() == b.tokens["id"].tolist()
                np.testing.assert_allclose(
                    a.tokens["logprob"], b.tokens["logprob"], rtol=0, atol=TOLERANCE
                )
        texts.append([each.text for group in ours for each in group])
    assert texts[0] != texts[1]


def twin_logprobs(bench: Bench, twin, prompt, tokens) -> list[float]:
    """Transformers' own cache, one token at a time, with the weights that each token was tagged."""
    past, row = None, torch.tensor([prompt])
    parameters = dict(twin.named_parameters())
    logprobs, loaded = [], None
    for token, version in zip(tokens["id"].tolist(), tokens["version"].tolist(), strict=True):
        if loaded != (loaded := bench.which[version]):
            for name, tensor in bench.states[loaded].items():
                parameters[name].copy_(tensor)
        with torch.no_grad():
            out = twin(input_ids=row, past_key_values=past, use_cache=True)
        logprobs.append(float(out.logits[0, -1].log_softmax(-1)[token]))
        past, row = out.past_key_values, torch.tensor([[token]])
    return logprobs


def test_tokens_are_of_exactly_the_weights_of_their_tag(bench: Bench):
    """WS4: 50 switches while three stream; a token of half-new weights would match neither."""

    async def main():
        first = await bench.publish(0)
        done = asyncio.Event()

        async def stream(number: int):
            rollouts = []
            while not done.is_set():
                rollouts += await bench.ask(number + 10 * len(rollouts), 40, PROMPT[: 3 + number])
            return [(PROMPT[: 3 + number], rollout) for rollout in rollouts]

        streams = [asyncio.ensure_future(stream(number)) for number in range(3)]
        for switch in range(50):
            await bench.publish(1 - switch % 2)
        done.set()
        return first, [each for stream in streams for each in await stream]

    first, streamed = bench.run(main())
    twin = served.make_llama(0, plain=True)
    seen: set[int] = set()
    for prompt, rollout in streamed:
        assert len(rollout.tokens) == 40
        assert np.isfinite(rollout.tokens["logprob"]).all()
        expected = twin_logprobs(bench, twin, prompt, rollout.tokens)
        np.testing.assert_allclose(rollout.tokens["logprob"], expected, rtol=0, atol=TOLERANCE)
        seen |= set(rollout.tokens["version"].tolist())
    assert len(seen - {first}) >= 3  # how many pass unseen, between two requests, is chance
    prompt, rollout = streamed[0]
    wrong = rollout.tokens.copy()
    wrong["version"] += np.where(wrong["version"] > first, -1, 1)  # the other of the two states
    gap = np.abs(np.array(twin_logprobs(bench, twin, prompt, wrong)) - wrong["logprob"])
    assert gap.max() > 0.1


def test_publishing_aborts_nothing_and_leaves_a_trail(bench: Bench):
    """AS3: 16 long generations in flight."""

    async def main():
        before = await bench.publish(0)
        tasks = [bench.ask(seed, 200, PROMPT[: 4 + seed]) for seed in range(16)]
        await bench.ask(99, 1)  # last in the line, so all others have begun
        after = await bench.publish(1)
        return before, after, await asyncio.gather(*tasks)

    before, after, groups = bench.run(main())
    assert len(groups) == 16
    for (rollout,) in groups:
        assert rollout.finish is Finish.LENGTH
        versions = rollout.tokens["version"]
        assert len(versions) == 200
        assert set(versions.tolist()) == {before, after}
        assert (np.diff(versions) >= 0).all()


def test_begun_tokens_are_gone_on_with(bench: Bench):
    async def main():
        await bench.publish(0)
        whole = await bench.ask(5, 20, members=2)
        begun = [rollout.tokens[:num] for rollout, num in zip(whole, (8, 0), strict=True)]
        return whole, await bench.ask(5, 20, members=2, begun=begun)

    whole, again = bench.run(main())
    assert [r.tokens["id"].tolist() for r in again] == [r.tokens["id"].tolist() for r in whole]


def test_prefixes_are_forgotten_on_demand(bench: Bench):
    async def cached() -> int:
        before = bench.backend.counters.num_cached_tokens
        await bench.ask(1, 2)
        return bench.backend.counters.num_cached_tokens - before

    async def main():
        await bench.publish(0)
        counts = [await cached(), await cached()]
        await bench.backend.forget_prefixes()
        return [*counts, await cached()]

    assert bench.run(main()) == [0, 32, 0]
