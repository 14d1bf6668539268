"""The last rollouts of modelled engines move together, as those of live engines do."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.errors import ConfigError
from lagzero.plan.clock import run_virtual
from lagzero.plan.engine import Engine, Visit
from lagzero.plan.meter import Meter
from lagzero.plan.models import ModelGenerator
from lagzero.plan.pace import Roofline
from lagzero.plan.per_token import PerTokenEngine
from lagzero.plan.report import table
from lagzero.plan.scenario import Scenario, with_keys
from lagzero.plan.simulate import simulate
from lagzero.schedule.router import Repacking
from lagzero.types import Prompt

SECOND = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)  # steps of 1 s, whatever runs


@dataclass
class Lengths:
    """A source of groups with these lengths."""

    groups: list[list[float]]

    def lengths(self, index: int) -> list[float]:
        return self.groups[index]


@dataclass
class Play:
    """What came of a number of groups, each played on one of the engines."""

    ends: list[float]
    visits: list[Visit]
    engines: list[Any]
    meter: Meter
    generator: ModelGenerator

    @property
    def moved(self) -> tuple[int, float]:
        packer = self.generator.packer
        assert packer is not None
        return packer.num_moved, packer.num_reread


def play(
    groups: list[list[float]],
    rule: Repacking | None,
    at: list[float] | None = None,
    *,
    prompt_tokens: int = 10,
    paces: list[Roofline] | None = None,
    slow: bool = False,
    cancel: dict[int, float] | None = None,
    weights: list[float] | None = None,
    **limits: Any,
) -> Play:
    """Play groups that begin at the times ``at``; cancel some; new weights come at times."""
    times, ends = at or [0.0] * len(groups), [0.0] * len(groups)
    meter = Meter(8 * len(paces or (1, 2)))
    most = limits.pop("max_running", 8)

    def engine(number: int, pace: Roofline) -> Any:
        if slow:
            return PerTokenEngine(pace, most, **limits, number=number)
        return Engine(number, pace, most, meter, **limits)

    async def one(generator: ModelGenerator, index: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(times[index])
        task = asyncio.ensure_future(generator.play(index, Prompt("", (), "")))
        if cancel and index in cancel:
            loop.call_later(cancel[index], task.cancel)
        with suppress(asyncio.CancelledError):
            await task
        ends[index] = loop.time()

    async def main() -> Play:
        loop = asyncio.get_running_loop()
        engines = [engine(n, pace) for n, pace in enumerate(paces or [SECOND] * 2)]
        source: Any = Lengths(groups)
        generator = ModelGenerator(source, [engines], "least_loaded", prompt_tokens, 1, rule)
        for version, when in enumerate(weights or (), start=1):
            for each in engines:
                loop.call_at(when, each.take_weights, version)
        await asyncio.gather(*[one(generator, index) for index in range(len(groups))])
        await asyncio.sleep(1)  # what is taken back leaves at a boundary
        meter.advance(loop.time())
        visits = [generator.visits[index] for index in range(len(groups))]
        return Play(ends, visits, engines, meter, generator)

    return run_virtual(main())


# --- by hand -----------------------------------------------------------------------------------


def test_a_rollout_that_moves_keeps_its_tokens_and_its_engine_is_free():
    """Groups 0 and 2 are on engine 0, groups 1 and 3 on engine 1. Group 2 ends at 3 s; engine 0
    has one left, fewer than two, and hands it over: it goes on at once, beside the other two."""
    done = play([[10.0], [20.0], [3.0], [6.0]], Repacking(below=2, most=8))
    assert done.ends == [10.0, 20.0, 3.0, 6.0]
    assert [visit.engine for visit in done.visits] == [1, 1, 0, 1]
    assert done.moved == (1, 13.0)  # 10 tokens of prompt and 3 that it had written
    assert [engine.num_tokens for engine in done.engines] == [3 + 3, 7 + 20 + 6]
    assert done.meter.idle_engine_s == (20 - 3) + 2 * 1  # and the second after the end


def test_its_context_is_computed_again_and_everybody_there_waits():
    """5 tokens of prompt a second: each engine reads two prompts in 4 s. Group 2 ends at 7 s; the
    13 tokens of group 0 take 2.6 s on engine 1. Then 7, 17 and 3 steps are left."""
    groups, rule = [[10.0], [20.0], [3.0], [6.0]], Repacking(below=2, most=8)
    done = play(groups, rule, prefill_tok_per_s=5.0)
    assert done.ends == pytest.approx([9.6 + 7, 9.6 + 17, 7.0, 9.6 + 3])
    assert done.moved == (1, 13.0)
    stayed = play(groups, None, prefill_tok_per_s=5.0)
    assert stayed.ends == pytest.approx([14, 24, 7, 10])


LATE = {"paces": [replace(SECOND, weight_bytes=4e12), SECOND], "at": [0.0, 0.25]}
"""Engine 0 makes steps of 4 s, engine 1 of 1 s from 0.25 s on."""


def test_it_leaves_at_the_step_boundary_of_its_engine_and_joins_at_that_of_the_other():
    """A rollout ends on engine 1 at 3.25 s, and that on engine 0 is to move: it leaves at 4 s with
    one token, joins at 4.25 s and has 49 steps left."""
    done = play([[50.0], [20.0, 20.0, 3.0]], Repacking(below=2, most=8), **LATE)
    assert done.ends == [4.25 + 49, 20.25]
    assert done.moved == (1, 11.0)
    assert done.engines[0].num_tokens == 1


def test_a_group_that_is_taken_back_while_it_moves_ends_where_it_is():
    """It is cancelled at 3.5 s, between the decision and the boundary. Group 2 comes to engine 0
    at 6 s; its first rollout ends at 14 s, and then the second can move."""
    groups = [[50.0], [20.0, 20.0, 3.0], [2.0, 30.0]]
    how = {**LATE, "at": [0.0, 0.25, 6.0]}
    done = play(groups, Repacking(below=2, most=8), **how, cancel={0: 3.5})
    assert done.ends[:2] == [3.5, 20.25]
    assert done.ends[2] == 14.25 + 28
    assert done.visits[0].written == 1
    assert done.moved == (1, 12.0)


def test_what_ends_before_the_boundary_does_not_move():
    done = play([[1.0], [20.0, 20.0, 3.0]], Repacking(below=2, most=8), **LATE)
    assert done.ends == [4.0, 20.25]
    assert done.moved == (0, 0.0)


@pytest.mark.parametrize(("rule", "places"), [(Repacking(2, 8), [0, 0]), (None, [0, 1])])
def test_new_groups_go_to_the_engine_that_is_free(rule: Repacking | None, places: list[int]):
    groups = [[30.0], [30.0], [3.0], [6.0], [5.0, 5.0], [5.0, 5.0]]
    done = play(groups, rule, [0, 0, 0, 0, 7.0, 7.0])
    assert [visit.engine for visit in done.visits[4:]] == places


# --- against the slow twin, and what must hold always ------------------------------------------

groups_of = st.lists(
    st.tuples(
        st.floats(0, 0.6).map(lambda s: round(s, 3)),
        st.lists(st.integers(1, 150).map(float), min_size=1, max_size=4),
    ),
    min_size=2,
    max_size=12,
)
ways = st.fixed_dictionaries(
    {
        "cap": st.sampled_from([None, 7.0, 40.0]),
        "kv_tokens": st.sampled_from([None, 100, 500]),
        "prefill_tok_per_s": st.sampled_from([None, 777.7, 12345.6]),
        "max_running": st.integers(2, 8),
        "weights": st.lists(st.floats(0.01, 1).map(lambda s: round(s, 3) + 4.1e-4), max_size=3).map(
            sorted
        ),
    }
)


def no_ties(num: int) -> list[Roofline]:
    """Engines whose steps never end at the same moment."""
    usual = Roofline(1e9, 2e9, 5e4, 1e12, 1e14, 0.5, 1.2345678e-4)
    return [replace(usual, overhead_s=usual.overhead_s * (1 + 0.0137 * n)) for n in range(num)]


@given(groups_of, ways, st.integers(2, 4), st.integers(2, 6))
@settings(deadline=None, max_examples=100)
def test_moving_is_as_with_engines_that_go_token_by_token(
    arrivals: list[tuple[float, list[float]]], how: dict[str, Any], num: int, below: int
):
    """Times to 1e-9: both add up to some 2,000 steps, in another order."""
    groups = [lengths for _, lengths in arrivals]
    at = [when + 1.7e-5 * i for i, (when, _) in enumerate(arrivals)]
    rule = Repacking(below, how["max_running"])
    fast = play(groups, rule, at, paces=no_ties(num), **how)
    slow = play(groups, rule, at, paces=no_ties(num), slow=True, **how)
    assert fast.ends == pytest.approx(slow.ends, rel=1e-9)
    assert fast.moved == slow.moved
    for one, other in zip(fast.visits, slow.visits, strict=True):
        assert (one.engine, one.oldest, one.newest) == (other.engine, other.oldest, other.newest)
        assert one.start_versions == other.start_versions
        assert one.token_versions == pytest.approx(other.token_versions, abs=1e-6)
    for one, other in zip(fast.engines, slow.engines, strict=True):
        assert (one.num_carried, one.num_evicted) == (other.num_carried, other.num_evicted)


@given(
    groups_of,
    ways,
    st.integers(2, 4),
    st.integers(2, 6),
    st.dictionaries(st.integers(0, 11), st.floats(0, 0.5), max_size=4),
)
@settings(deadline=None, max_examples=100)
def test_each_rollout_ends_once_with_all_its_tokens(
    arrivals: list[tuple[float, list[float]]],
    how: dict[str, Any],
    num: int,
    below: int,
    cancel: dict[int, float],
):
    groups, at = [lengths for _, lengths in arrivals], [when for when, _ in arrivals]
    rule = Repacking(below, how["max_running"])
    done = play(groups, rule, at, paces=no_ties(num), cancel=cancel, **how)
    for visit in done.visits:
        if visit.left:
            assert visit.index in cancel
            assert visit.written < sum(visit.lengths)
        else:
            assert visit.written == pytest.approx(sum(visit.lengths), abs=1e-6)
    written = sum(engine.num_tokens for engine in done.engines)
    assert written == pytest.approx(sum(visit.written for visit in done.visits))
    assert (done.meter.busy, done.meter.queued, done.meter.idle_engines) == (0, 0, num)
    packer = done.generator.packer
    assert packer is not None
    assert packer._loads == [0] * num
    assert packer._moving == 0
    assert [done.generator._routers[0].load(n) for n in range(num)] == [0] * num


# --- a whole run -------------------------------------------------------------------------------


def scenario(**keys: Any) -> Scenario:
    plain = {"steps": 6, "max_lag": 1, "groups_per_step": 16, "group_size": 4, "max_running": 16}
    return with_keys(Scenario(), [(name, str(value)) for name, value in (plain | keys).items()])


def test_a_run_frees_engines_and_says_what_that_took():
    stays, moves = simulate(scenario()), simulate(scenario(repack_below=8))
    assert stays.num_moved == 0 < moves.num_moved
    assert moves.engine_idle > stays.engine_idle > 0
    assert moves.num_reread > 512 * moves.num_moved  # at least the prompt of each
    assert moves.tokens == stays.tokens
    for each in (stays, moves):
        assert each.slot_use + sum(each.slot_idle.values()) == pytest.approx(1)
        assert each.trainer_use + sum(each.trainer_idle.values()) == pytest.approx(1)
    text = table([stays, moves], ["stays", "moves"])
    assert "engines with nothing to do" in text
    assert f"{moves.num_moved:,}" in text
    assert "rollouts moved" not in table([stays], [""])
    told = json.loads(json.dumps(moves.as_json()))
    assert told["num_moved"] == moves.num_moved
    assert told["scenario"]["repack_below"] == "8"


def test_reading_what_was_left_behind_takes_time():
    free = simulate(scenario(repack_below=8))
    slow = simulate(scenario(repack_below=8, prefill_tok_per_s=3000))
    assert slow.time_s > free.time_s


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"placement": "colocated"}, "no two engines"),
        ({"placement": "swap", "window": 1}, "no two engines"),
        ({"lanes": 4}, "no two engines"),
        ({"engines": 1}, "no two engines"),
        ({"max_lag": 0}, "nothing to begin"),
    ],
)
def test_where_nothing_could_move_or_nothing_be_won_it_is_refused(
    keys: dict[str, Any], complaint: str
):
    with pytest.raises(ConfigError, match=complaint):
        scenario(repack_below=4, **keys)


def test_it_is_for_runs_that_carry_too():
    assert scenario(repack_below=4, max_lag=0, sync_every=2).repack_below == 4
    assert scenario(repack_below=4, max_lag=0, window="none", extra_groups=1).repack_below == 4
