"""What happens inside an engine process, seen without one: the order of messages and steps."""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.engine.request import Request, Sampling
from lagzero.errors import WeightSyncError
from lagzero.runtime.engine_process import EngineLoop
from lagzero.runtime.messages import (
    Abort,
    AddRequest,
    Completions,
    Failed,
    ForgetPrefixes,
    Pause,
    Paused,
    RequestRefused,
    Resume,
    Stop,
    TakeBack,
    TakeWeights,
    Together,
    WeightsRefused,
    WeightsTaken,
)
from lagzero.runtime.weight_fence import WeightFence
from lagzero.types import Finish

sys.path.append(str(Path(__file__).parent))
import process_factories as served


class Taker:
    def __init__(self):
        self.taken: list[tuple[int, int]] = []

    def take(self, version: int, slot: int) -> None:
        if slot > 1:
            raise WeightSyncError(f"there is no slot {slot}")
        self.taken.append((version, slot))


class Bench:
    """An engine loop whose inbox is filled by hand, before a run and before chosen steps."""

    def __init__(self, folder, taker=None):
        self.engine = served.FakeEngine(folder)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: list = []
        self.before: dict[int, list] = {}  # step -> messages that come while the one before runs
        self.loop = EngineLoop(self.engine, taker, self.inbox, self)
        self.after_reset: list = []
        step, reset = self.engine.step, self.engine.reset

        def scripted():
            done = step()
            for message in self.before.pop(self.engine.num_steps, ()):
                self.inbox.put(message)
            return done

        def scripted_reset():
            reset()
            for message in self.after_reset:
                self.inbox.put(message)

        self.engine.step, self.engine.reset = scripted, scripted_reset

    def send(self, message) -> None:
        self.sent.append(message)

    def run(self, *messages):
        for message in messages:
            self.inbox.put(message)
        self.loop.run()
        return self.sent


def ask(number: int, new: int = 3, first: int = 1, members: int = 1) -> AddRequest:
    return AddRequest(Request(number, (first,), tuple(range(members)), Sampling(new)))


def test_messages_take_effect_between_two_steps_in_their_order(tmp_path):
    bench = Bench(tmp_path, Taker())
    bench.before = {2: [TakeWeights(7, 1), ask(2, 2)], 4: [ForgetPrefixes(), Stop()]}
    taken, first, second = bench.run(ask(1, 3))
    assert (taken.version, taken.slot) == (7, 1)
    assert taken.counters.num_steps == 2
    assert first.completions[0].tokens["version"].tolist() == [0, 0, 7]
    assert second.completions[0].tokens["version"].tolist() == [7, 7]
    assert first.version == second.version == 7
    assert (bench.engine.num_announcements, bench.engine.num_forgotten) == (1, 1)
    assert bench.engine.num_steps == 4


def test_what_cannot_be_taken_is_refused_and_the_old_version_stays(tmp_path):
    bench = Bench(tmp_path, Taker())
    orders = [TakeWeights(1, 0), TakeWeights(2, 5), Stop()]
    taken, refused = bench.run(*orders)
    assert isinstance(taken, WeightsTaken)
    assert refused == WeightsRefused(2, 5, "there is no slot 5")
    assert bench.engine.version == 1
    (none,) = Bench(tmp_path).run(TakeWeights(1, 0), Stop())
    assert "no shared memory" in none.reason


def test_a_failure_names_what_the_engine_had_and_no_more(tmp_path):
    bench = Bench(tmp_path)
    bench.before = {1: [ask(4, 9), ask(5, 1, served.BREAK)], 2: [Stop()]}
    bench.after_reset = [ask(6, 1)]
    sent = bench.run(ask(1, 1), ask(2, 9, members=2), ask(3, 9, served.REFUSE))
    refused, done, failed, later = sent
    assert isinstance(refused, RequestRefused)
    assert refused.request_id == 3
    assert done.completions[0].request_id == 1
    assert isinstance(failed, Failed)
    assert failed.request_ids == (2, 4, 5)
    assert failed.failure.kind == "ArithmeticError"
    assert "process_factories.py" in failed.failure.trace
    assert later.completions[0].request_id == 6


def test_taking_back_reports_and_aborting_does_not(tmp_path):
    bench = Bench(tmp_path)
    bench.before = {2: [Abort((1,)), TakeBack((2, 77)), Stop()]}
    (stopped,) = bench.run(ask(1, 9), ask(2, 9, members=2))
    assert isinstance(stopped, Completions)
    found = [(c.request_id, c.member, len(c.tokens), c.finish) for c in stopped.completions]
    assert found == [(2, 0, 2, Finish.ABORT), (2, 1, 2, Finish.ABORT)]


def test_a_paused_engine_obeys_everything_and_takes_no_step(tmp_path):
    bench = Bench(tmp_path, Taker())
    taken: list[int] = []
    take = bench.loop._taker.take

    def note(version: int, slot: int) -> None:
        taken.append(bench.engine.num_steps)
        take(version, slot)

    bench.loop._taker.take = note
    bench.before = {1: [Pause(), TakeWeights(4, 1), ask(2, 2), TakeBack((1,)), Resume()]}
    bench.before |= {3: [Pause(), ask(3, 1), Stop()]}
    paused, weights, back, done, again = bench.run(ask(1, 9))
    assert isinstance(paused, Paused)
    assert isinstance(weights, WeightsTaken)
    assert back.completions[0].tokens["version"].tolist() == [0]
    assert done.completions[0].tokens["version"].tolist() == [4, 4]
    assert isinstance(again, Paused)
    assert taken == [1]
    assert bench.engine.num_steps == 3  # request 3 was never begun


def test_an_unknown_message_is_not_swallowed(tmp_path):
    with pytest.raises(TypeError, match="does not know the message 'hello'"):
        Bench(tmp_path).run("hello")


# --- who may read which slot ---------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("oatrjx"), st.integers(0, 2), st.integers(0, 1))))
def test_the_fence_knows_every_slot_that_an_engine_could_still_read(moves):
    """Against engines that really hold a slot and a line of orders."""
    fence = WeightFence()
    holds: dict[int, int | None] = {}
    line: dict[int, list[int]] = {}
    for move, engine, slot in moves:
        if move == "j" and engine not in holds:
            fence.joined(engine)
            holds[engine], line[engine] = None, []
        elif move == "x":
            fence.lost(engine)
            holds.pop(engine, None)
            line.pop(engine, None)
        elif move == "o" and engine in holds:
            fence.ordered(engine, slot)
            line[engine].append(slot)
        elif move in "ta" and line.get(engine):
            holds[engine] = line[engine].pop(0)
            fence.taken(engine)
        elif move == "r" and line.get(engine):
            line[engine].pop(0)
            fence.refused(engine)
        could = {each for each in holds.values() if each is not None}
        could |= {each for orders in line.values() for each in orders}
        assert fence.readable() == could
        assert fence.is_quiet == (not any(line.values()))
        assert all(fence.is_settled(each) == (not line.get(each)) for each in range(3))
        assert all(fence.used(each) == held for each, held in holds.items())


def test_messages_of_one_moment_are_all_seen_by_the_first_step(tmp_path):
    """Also when the engine was already waiting for the first of them."""
    bench = Bench(tmp_path)
    bench.before = {3: [Stop()]}
    answers = bench.run(Together((ask(1, 2), ask(2, 3))), Together((ask(3, 3),)))
    ended = [sorted(c.request_id for c in m.completions) for m in answers]
    assert ended == [[1], [2, 3]]
    assert bench.engine.num_steps == 3
