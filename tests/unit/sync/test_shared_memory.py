"""Weights in shared memory: whole or not at all, never overwritten while someone may read them."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lagzero.engine.request import Sampling
from lagzero.errors import LagzeroError, WeightSyncError
from lagzero.generate.process_backend import ProcessBackend
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.runtime.process_handle import ProcessPlan
from lagzero.runtime.process_pool import DeathRule, EnginePool
from lagzero.sync.segment import Segment, remove_abandoned
from lagzero.sync.shared_memory import Manifest, SlotWeights, WeightSlots
from lagzero.types import Finish

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # spawned processes inherit it
import process_factories as served  # pyright: ignore[reportMissingImports]

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm")


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def source(value: float, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The trainer's weights: another type, and requiring gradients."""
    return parameters(served.make_module(value).to(dtype))


@pytest.fixture
def slots_of() -> Iterator[Callable[..., WeightSlots]]:
    made: list[WeightSlots] = []

    def make(tensors=None, dtype=torch.float32, changing=None) -> WeightSlots:
        manifest = Manifest.of(source(0.0) if tensors is None else tensors, dtype)
        made.append(WeightSlots(manifest, changing))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_places_are_aligned_and_do_not_overlap():
    tensors = {
        "a": torch.zeros(3, dtype=torch.float64),
        "b": torch.zeros(5, 7, dtype=torch.float64),
        "empty": torch.zeros(0, 4, dtype=torch.float64),
        "scalar": torch.zeros((), dtype=torch.float64),
        "count": torch.zeros(9, dtype=torch.int32),
    }
    manifest = Manifest.of(tensors, torch.bfloat16)
    # 6, 70, 0, 2 and 36 bytes, each rounded up to 64
    assert [place.offset for place in manifest.places] == [0, 64, 192, 192, 256]
    assert [place.num_bytes for place in manifest.places] == [6, 70, 0, 2, 36]
    assert manifest.places[4].dtype == torch.int32
    assert manifest.header_bytes == 64  # 7 numbers of 8 bytes
    assert manifest.slot_bytes == 64 + 320


def test_parameters_lie_in_the_slot_and_tied_ones_stay_tied(slots_of):
    module = served.make_module(1.0)
    slots = slots_of()
    attached = slots.reader.attach(parameters(module))
    values = torch.arange(150).reshape(30, 5) / 7
    wanted = source(0.25)
    wanted["embed.weight"].data.copy_(values)
    slots.write(1, 8, wanted)
    attached.take(8, 1)
    assert torch.equal(module.embed.weight, values.float())
    assert module.norm.bias.tolist() == [0.25] * 7
    assert module.head.weight is module.embed.weight
    assert module.head.weight.data_ptr() % 64 == 0
    # No copy lies between: what is written there is what the module computes with.
    slots._slots[1].tensors["embed.weight"].fill_(3.0)
    assert module.head(torch.ones(5)).tolist() == [15.0] * 30


def test_bfloat16_is_the_nearest_value(slots_of):
    module = served.make_module().bfloat16()
    slots = slots_of(dtype=torch.bfloat16)
    attached = slots.reader.attach(parameters(module))
    slots.write(0, 0, source(1.004))  # the middle of 1 and 1 + 2^-7 is 1.0039
    attached.take(0, 0)
    assert module.norm.weight.unique().tolist() == [1.0078125]


def test_only_what_changes_is_copied_once_both_slots_are_full(slots_of):
    module = served.make_module()
    slots = slots_of(changing={"norm.weight"})
    attached = slots.reader.attach(parameters(module))
    for version, fresh in enumerate([1.0, 2.0, 3.0, 4.0]):
        weights = source(fresh)
        weights["norm.bias"].data.fill_(fresh * 10)
        slots.write(version % 2, version, weights)
        attached.take(version, version % 2)
        assert module.norm.weight.unique().tolist() == [fresh]
        # Written into each slot once, and never looked at again.
        assert module.norm.bias.unique().tolist() == [10.0 * min(fresh, 1 + version % 2)]


def wrong_name(weights):
    weights["norm.wieght"] = weights.pop("norm.weight")


def wrong_shape(weights):
    weights["norm.weight"] = torch.zeros(7, 6)


def missing(weights):
    del weights["norm.bias"]


def not_finite(weights):
    weights["norm.bias"].data[3] = float("nan")


BAD = {
    wrong_name: "norm.wieght: the engine has no such tensor; the nearest is 'norm.weight'",
    wrong_shape: "norm.weight: shape [7, 6], the engine's is [7, 5]",
    missing: "norm.bias: missing from the update",
    not_finite: "norm.bias: holds NaN or infinity",
}


@pytest.mark.parametrize(("spoil", "message"), BAD.items(), ids=lambda x: getattr(x, "__name__", x))
def test_a_bad_update_is_refused_before_anything_is_announced(slots_of, spoil, message):
    """WS6, at the publisher: no announcement, and the slot cannot be taken by mistake."""
    slots = slots_of()
    module = served.make_module()
    attached = slots.reader.attach(parameters(module))
    slots.write(0, 4, source(1.0))
    attached.take(4, 0)
    weights = source(2.0)
    spoil(weights)
    with pytest.raises(WeightSyncError, match=re.escape(message)):
        slots.write(1, 5, weights)
    with pytest.raises(WeightSyncError, match="slot 1 holds version -1, not 5"):
        attached.take(5, 1)
    assert module.norm.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight", "norm.bias"])
def test_a_corrupted_byte_is_found_in_any_tensor(slots_of, name):
    slots = slots_of()
    module = served.make_module()
    attached = slots.reader.attach(parameters(module))
    slots.write(0, 1, source(1.0))
    data = slots._slots[0].tensors[name].view(torch.uint8)
    data.view(-1)[-1] ^= 1
    with pytest.raises(WeightSyncError, match=f"wrong checksums for: {name}"):
        attached.take(1, 0)
    assert module.norm.weight.unique().tolist() == [0.0]
    data.view(-1)[-1] ^= 1
    slots._slots[0].header[1] = 2
    with pytest.raises(WeightSyncError, match="holds 2 tensors, not 3"):
        attached.take(1, 0)
    slots._slots[0].header[1] = 3
    with pytest.raises(WeightSyncError, match="holds version 1, not 2"):
        attached.take(2, 0)
    attached.take(1, 0)
    assert module.norm.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize(("spoil", "message"), list(BAD.items())[:3])
def test_an_engine_that_has_other_tensors_does_not_start(slots_of, spoil, message):
    weights = source(0.0)
    spoil(weights)
    slots = slots_of(weights)
    with pytest.raises(WeightSyncError, match=re.escape(message)):
        slots.reader.attach(parameters(served.make_module()))


def test_an_engine_of_another_type_or_with_copies_does_not_start(slots_of):
    module = served.make_module()
    slots = slots_of(dtype=torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"norm.bias: torch.bfloat16 in shared memory"):
        slots.reader.attach(parameters(module))
    copies = {name: tensor.detach() for name, tensor in parameters(module).items()}
    with pytest.raises(WeightSyncError, match=r"norm.bias: is not the module's own parameter"):
        slots_of().reader.attach(copies)


@linux
def test_too_little_shared_memory_is_said_at_once():
    before = set(os.listdir("/dev/shm"))
    huge = {"w": torch.empty(1 << 40, 1, device="meta")}
    with pytest.raises(LagzeroError, match=r"need 4\.4e\+03 GB.*--shm-size"):
        WeightSlots(Manifest.of(huge, torch.bfloat16))
    assert set(os.listdir("/dev/shm")) == before


ABANDON = """
import os, sys
from multiprocessing import resource_tracker
from lagzero.sync.segment import Segment
segment = Segment(1000)
resource_tracker.unregister(segment.memory._name, "shared_memory")  # as if killed as well
print(segment.name, flush=True)
sys.stdin.read()
os._exit(1)
"""


@linux
def test_memory_of_the_dead_is_removed_and_that_of_the_living_is_not():
    mine = Segment(1000)
    command = [sys.executable, "-c", ABANDON]
    owners = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    names = [owner.stdout.readline().strip() for owner in owners]
    owners[0].communicate("")
    try:
        assert names[0] in os.listdir("/dev/shm")
        assert names[0] in remove_abandoned()
        assert names[0] not in os.listdir("/dev/shm")
        assert {names[1], mine.name} <= set(os.listdir("/dev/shm"))
    finally:
        owners[1].communicate("")
        mine.close()
    mine.close()
    assert names[1] in remove_abandoned()
    assert mine.name not in os.listdir("/dev/shm")


# --- with real processes: two for all tests, because one with torch starts slowly -------------


class Bench:
    """Engines whose log-probs are minus the value of their weights: W_v is full of v."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.reports: list[str] = []
        self.weights = source(0.0)
        self.slots = WeightSlots(Manifest.of(self.weights, torch.float32))
        plan = ProcessPlan(functools.partial(served.serve_module, folder), self.slots.reader)
        self.pool = EnginePool([plan, plan], DeathRule(), self.reports.append)
        self.backend = ProcessBackend(self.pool)
        self.compute = ComputeThread()
        self.link = SlotWeights(self.weights, self.slots, self.pool, self.compute)
        self.version = -1
        self.corrupted: set[int] = set()  # versions in whose slot a byte flips once it is written
        self._write = self.slots.write
        self.slots.write = self.write
        self.loop = asyncio.new_event_loop()

    def run(self, main):
        try:
            return self.loop.run_until_complete(asyncio.wait_for(main, 60))
        finally:
            (self.folder / "hold").unlink(missing_ok=True)  # a test that failed holds up no other

    def write(self, number: int, version: int, weights) -> None:
        self._write(number, version, weights)
        if version in self.corrupted:
            self.slots._slots[number].tensors["norm.weight"].view(torch.uint8)[0, 0] ^= 1

    async def publish(self) -> int:
        self.version += 1
        with torch.no_grad():
            for tensor in self.weights.values():
                tensor.fill_(self.version)
        await self.link.publish(self.version)
        return self.version

    def held(self, version: int) -> int:
        """Return the slot that holds a version."""
        return [int(slot.header[0]) for slot in self.slots._slots].index(version)

    def content(self, slot: int) -> list[float]:
        return self.slots._slots[slot].tensors["norm.bias"].unique().tolist()

    async def until_ordered(self) -> None:
        """Wait until engines have been told to take a slot, and have not answered."""
        await until(lambda: not self.pool._fence.is_quiet)

    def ask(self, number: int, new: int) -> asyncio.Future:
        return asyncio.ensure_future(
            self.backend.complete((1,), [number], Sampling(new), label=f"group {number}")
        )

    async def on_each(self) -> list[list[int]]:
        """The trails of two short requests, one for each engine."""
        return [trail(await task) for task in [self.ask(1, 3), self.ask(2, 3)]]

    async def hold(self, new: int) -> list[asyncio.Future]:
        """Put a request of so many tokens on each engine, and stop both in a step."""
        for marker in self.folder.glob("held-*"):
            marker.unlink()
        (self.folder / "hold").touch()
        tasks = [self.ask(number, new) for number in range(2)]
        markers = [self.folder / f"held-{pid}" for pid in self.pool.pids.values()]
        await until(lambda: all(marker.exists() for marker in markers))
        return tasks

    def let_go(self) -> None:
        (self.folder / "hold").unlink()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def trail(rollouts) -> list[int]:
    """The versions of a rollout, after checking each token against the weights of its tag."""
    (rollout,) = rollouts
    assert rollout.finish is Finish.LENGTH
    np.testing.assert_array_equal(rollout.tokens["logprob"], -rollout.tokens["version"])
    assert (np.diff(rollout.tokens["version"]) >= 0).all()
    return sorted(set(rollout.tokens["version"].tolist()))


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    try:
        bench.run(bench.backend.start())
        bench.run(bench.publish())
        yield bench
    finally:
        bench.run(bench.backend.close())
        bench.loop.close()
        bench.compute.close()
        bench.slots.close()


def test_updates_reach_all_engines_between_two_steps(bench: Bench):
    async def main():
        first = bench.version
        tasks = await bench.hold(3000)
        publishing = asyncio.ensure_future(bench.publish())
        await bench.until_ordered()
        bench.let_go()
        await publishing
        for _ in range(4):
            await bench.publish()
        for task in tasks:
            versions = trail(await task)
            assert versions[0] == first
            assert versions[-1] > first  # some may have passed between two steps
        last = bench.version
        assert last == first + 5
        assert await bench.on_each() == [[last], [last]]

    bench.run(main())


def test_a_slow_reader_never_sees_its_slot_overwritten(bench: Bench):
    """WS7: it has not read the first of three orders; the others wait for it."""

    async def main():
        first = bench.version
        tasks = await bench.hold(2000)
        publishing = asyncio.ensure_future(bench.publish())
        await bench.until_ordered()
        # Its caller gives up; the order is on its way all the same.
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing

        async def two_more():
            await bench.publish()
            await bench.publish()

        later = asyncio.ensure_future(two_more())
        for _ in range(100):
            await asyncio.sleep(0)
        await bench.compute.call(lambda: None)
        assert bench.version == first + 2
        assert bench.content(bench.held(first)) == [first]
        assert bench.content(bench.held(first + 1)) == [first + 1]
        bench.let_go()
        await later
        assert [trail(await task)[0] for task in tasks] == [first, first]
        assert await bench.on_each() == [[first + 3], [first + 3]]

    bench.run(main())


def test_a_corrupted_slot_is_refused_by_all_and_the_run_can_go_on(bench: Bench):
    """WS6: the version does not advance, what runs goes on with the old weights."""

    async def main():
        old = bench.version
        bench.corrupted = {old + 1}
        tasks = await bench.hold(100)
        publishing = asyncio.ensure_future(bench.publish())
        await bench.until_ordered()
        slot = bench.held(old + 1)
        bench.let_go()
        with pytest.raises(WeightSyncError) as refused:
            await publishing
        for engine in range(2):
            text = f"engine {engine}, version {old + 1}: slot {slot} has wrong checksums for: "
            assert f"{text}norm.weight" in str(refused.value)
        assert [trail(await task) for task in tasks] == [[old], [old]]
        assert await bench.on_each() == [[old], [old]]
        await bench.publish()
        assert await bench.on_each() == [[old + 2], [old + 2]]

    bench.run(main())


def test_when_one_engine_refuses_the_other_goes_back(bench: Bench):
    """All or nothing: the one that had taken the new weights is given the old slot again."""

    async def main():
        old = bench.version
        tasks = await bench.hold(5)
        publishing = asyncio.ensure_future(bench.publish())
        await bench.until_ordered()
        before, after = bench.held(old), bench.held(old + 1)
        # Stopped, the second reads its order only when the first has carried it out.
        os.kill(bench.pool.pids[1], signal.SIGSTOP)
        bench.let_go()
        await until(lambda: bench.pool._fence.used(0) == after)
        bench.slots._slots[after].header[0] = 77
        os.kill(bench.pool.pids[1], signal.SIGCONT)
        with pytest.raises(WeightSyncError, match=f"engine 1, version {old + 1}: slot {after}"):
            await publishing
        assert [bench.pool._fence.used(engine) for engine in range(2)] == [before, before]
        assert trail(await tasks[1]) == [old]
        await tasks[0]
        assert await bench.on_each() == [[old], [old]]

    bench.run(main())


@pytest.mark.parametrize(
    ("spoil", "message"), BAD.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_a_bad_update_changes_no_engine(bench: Bench, spoil, message):
    """WS6: wrong name, wrong shape, a tensor missing, NaN."""

    async def main():
        old = await bench.publish()
        weights = source(old + 1.0)
        spoil(weights)
        link = SlotWeights(weights, bench.slots, bench.pool, bench.compute)
        with pytest.raises(WeightSyncError, match=re.escape(message)):
            await link.publish(old + 1)
        assert await bench.on_each() == [[old], [old]]
        await bench.publish()
        assert await bench.on_each() == [[old + 1], [old + 1]]

    bench.run(main())


def test_a_dead_engine_holds_no_publication_up_and_its_successor_is_up_to_date(bench: Bench):
    async def main():
        old = bench.version
        tasks = await bench.hold(3000)
        publishing = asyncio.ensure_future(bench.publish())
        await bench.until_ordered()
        os.kill(bench.pool.pids[1], signal.SIGKILL)
        await until(lambda: len(bench.reports) == 1)
        bench.let_go()
        await publishing
        assert [trail(await task)[-1] for task in tasks] == [old + 1, old + 1]
        await until(lambda: len(bench.reports) == 2)
        assert bench.reports[1].endswith(f"with version {old + 1}")
        assert await bench.on_each() == [[old + 1], [old + 1]]
        await bench.publish()
        assert await bench.on_each() == [[old + 2], [old + 2]]

    bench.run(main())
