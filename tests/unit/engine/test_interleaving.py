"""Whatever is done to an engine between its steps, its members get the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.engine.request import Request, Sampling, derive_seed
from lagzero.engine.speculation import NgramProposer, Speculation

TRUNK = tuple(range(30, 60))
SIZES = [(5, 2), (11, 4), (16, 1)]  # prompt tokens and members of each request
NEW = 10
STEPS = st.tuples(st.just("step"), st.integers(1, 7))
OTHERS = st.sampled_from(["add", "abort", "sleep", "stand by", "publish"])
ACTIONS = st.one_of(STEPS, st.tuples(OTHERS, st.integers(0, len(SIZES) - 1)))


def request(number: int, begun=()) -> Request:
    length, members = SIZES[number]
    seeds = tuple(derive_seed(number, member) for member in range(members))
    return Request(number, (*TRUNK[: length - 1], 100 + number), seeds, Sampling(NEW), begun)


class Caller:
    """Adds requests, takes them back, adds them again; knows what each member has so far."""

    def __init__(self, engine, publish=None):
        self.engine = engine
        self.publish = publish or engine.weights_changed
        self.version = 0
        self.done = {}
        self.open = set()
        self.taken = {}  # request -> tokens of its members when all had ended or were taken back

    def act(self, what: str, number: int) -> None:
        match what:
            case "step":
                for _ in range(number):
                    self.collect(self.engine.step())
                    self.engine.check_integrity()
            case "add":
                self.add(number)
            case "abort":
                self.collect(self.engine.abort([number]))
                assert number not in self.open, "a member is missing"
            case "sleep" | "stand by":
                self.engine.suspend(release=what == "sleep")
            case "publish":
                self.version += 1
                self.publish(self.version)
        self.engine.check_integrity()

    def add(self, number: int) -> None:
        if number not in self.open:
            self.open.add(number)
            self.engine.add(request(number, self.taken.pop(number, ())))

    def collect(self, completions) -> None:
        for completion in completions:
            key = completion.request_id, completion.member
            assert key not in self.done, f"{key} ended twice"
            self.done[key] = completion
            if all((key[0], m) in self.done for m in range(SIZES[key[0]][1])):
                self.open.discard(key[0])
                self.taken[key[0]] = tuple(
                    self.done.pop((key[0], m)).tokens for m in range(SIZES[key[0]][1])
                )

    def finish(self) -> dict[int, tuple[np.ndarray, ...]]:
        """Ask for what is missing, run to the end, and return all tokens."""
        for number in range(len(SIZES)):
            self.add(number)
        for _ in range(4000):
            if not self.engine.has_work:
                break
            self.act("step", 1)
        assert not self.engine.has_work, "the engine does not come to an end"
        assert not self.open
        assert self.engine._scheduler.pool.num_used == 0
        return self.taken


@pytest.fixture(scope="module")
def plain(model, engine_of, drain):
    """What an engine to which nothing is done returns."""
    policy, _ = model("llama")
    return drain(engine_of(policy), [request(n) for n in range(len(SIZES))])


LIMITS = st.fixed_dictionaries(
    {
        "page_size": st.just(4),
        "kv_cache_tokens": st.sampled_from([28, 44, 240]),
        "max_running": st.sampled_from([1, 3, 8]),
        "prefill_chunk_tokens": st.sampled_from([5, 512]),
        "round_tokens": st.sampled_from([1, 3, 5, None]),
        "prefix_cache": st.booleans(),
    }
)


def play(caller: Caller, actions) -> dict[int, tuple[np.ndarray, ...]]:
    caller.act("add", 1)
    for what, number in actions:
        caller.act(what, number)
    return caller.finish()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    actions=st.lists(ACTIONS, min_size=4, max_size=25),
    limits=LIMITS,
    kv=st.sampled_from(["keep", "recompute"]),
    wrong=st.sampled_from([None, 0, 1, 3]),
)
def test_any_interleaving_gives_the_same_tokens(
    actions, limits, kv, wrong, plain, model, engine_of, guesses
):
    """Adding, stepping, taking back and resuming, sleeping and publishing equal weights.

    With guesses too: none, right ones, wrong ones, and both.
    """
    policy, _ = model("llama")
    guess = None if wrong is None else Speculation(guesses(plain, wrong), 4, 6)
    caller = Caller(engine_of(policy, kv_on_update=kv, speculation=guess, **limits))
    for number, members in play(caller, actions).items():
        for member, tokens in enumerate(members):
            want = plain[number, member].tokens
            assert tokens["id"].tolist() == want["id"].tolist()
            np.testing.assert_allclose(tokens["logprob"], want["logprob"], rtol=0, atol=5e-5)
            assert (np.diff(tokens["version"]) >= 0).all()
            assert tokens["version"].max() <= caller.version


@settings(max_examples=8, deadline=None, derandomize=True)
@given(actions=st.lists(ACTIONS, min_size=8, max_size=25), limits=LIMITS)
def test_recomputing_each_token_is_of_its_version_alone_in_any_interleaving(
    actions, limits, versions_of, engine_of
):
    """WS3, WS4: what one pass over all ids with that version's weights says."""
    versions = versions_of("llama")
    copied = Speculation(NgramProposer(1), 4, 6)
    engine = engine_of(versions.policy, kv_on_update="recompute", speculation=copied, **limits)
    versions.publish(engine, 0)
    caller = Caller(engine, lambda version: versions.publish(engine, version))
    for number, members in play(caller, actions).items():
        for tokens in members:
            expected = versions.whole_logprobs(request(number), tokens)
            np.testing.assert_allclose(tokens["logprob"], expected, rtol=0, atol=5e-5)
