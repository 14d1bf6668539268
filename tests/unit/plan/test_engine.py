"""The modelled engine against hand-worked numbers and against its slow twin."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.plan.clock import run_virtual
from lagzero.plan.engine import Engine, Visit
from lagzero.plan.meter import Meter
from lagzero.plan.pace import Lanes, Measured, Pace, Roofline, parse_measured
from lagzero.plan.per_token import PerTokenEngine
from lagzero.plan.timeline import Recorder

# Odd overheads: no arrival of these tests falls on a step boundary to the last bit.
SMALL = Roofline(1e9, 2e9, 5e4, 1e12, 1e14, 0.5, 1.2345678e-4)
COMPUTE = Roofline(1e9, 2e7, 5e4, 1e12, 1e13, 0.5, 1.2345678e-4)  # bound by arithmetic at first


def visit(index: int, lengths: list[float], prompt_tokens: int = 10) -> Visit:
    return Visit(index, lengths, prompt_tokens, asyncio.get_running_loop().create_future())


def slow_span(pace: Roofline, n: int, context: float, steps: int) -> float:
    return sum(pace.step_s(n, context + n * j) for j in range(steps))


# --- pace --------------------------------------------------------------------------------------


def test_a_decode_step_by_hand():
    """7e9 parameters in bf16 at 3.35e12 B/s: 14e9 / 3.35e12 = 4.179 ms whatever the batch."""
    pace = Roofline(7e9, 14e9, 57344, 3.35e12, 989e12, 1.0, 0.0)
    assert pace.step_s(1, 0) == pytest.approx(4.179e-3, rel=1e-4)
    assert pace.step_s(64, 0) == pytest.approx(4.179e-3, rel=1e-4)
    assert pace.step_s(512, 0) == pytest.approx(2 * 7e9 * 512 / 989e12)  # arithmetic
    read = (14e9 + 57344 * 64 * 16384) / 3.35e12  # 60 GB of KV cache beside the weights
    assert pace.step_s(64, 64 * 16384) == pytest.approx(read)


@given(
    st.sampled_from([SMALL, COMPUTE, Roofline(kv_bytes_per_token=0)]),
    st.integers(1, 300),
    st.integers(0, 200_000),
    st.integers(0, 800),
)
@settings(deadline=None, max_examples=80)
def test_the_closed_form_is_the_sum_of_its_steps(pace: Roofline, n: int, context: int, steps: int):
    fast = pace.span_s(n, context, steps)
    assert fast == pytest.approx(slow_span(pace, n, context, steps), rel=1e-11)


@pytest.mark.parametrize(
    ("n", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.0), (5, 2.5), (9, 4.5), (13, 6.5)]
)
def test_timed_steps_lie_on_lines_between_the_timings(n: int, seconds: float):
    pace = parse_measured("3:2,1:1,9:4.5,7:3.5")
    if n == 5:
        seconds = 2.75  # halfway between 2 at 3 and 3.5 at 7
    assert pace.step_s(n) == pytest.approx(seconds)
    assert pace.span_s(n, 1e6, 4) == pytest.approx(4 * seconds)


def test_one_timing_stands_for_all_sizes():
    assert parse_measured("8:0.25").step_s(100) == 0.25


@pytest.mark.parametrize("text", ["", "8", "8:x", "0:1", "1:1,1:2", "1:0", "1:inf"])
def test_timings_that_cannot_be_are_refused(text: str):
    with pytest.raises(ValueError, match="must"):
        parse_measured(text)


@given(
    st.sampled_from(
        [SMALL, COMPUTE, Roofline(kv_bytes_per_token=0), Measured(((1, 0.01), (9, 0.013)))]
    ),
    st.integers(1, 300),
    st.integers(0, 200_000),
    st.floats(0, 40),
)
def test_steps_until_is_the_inverse_of_the_span(pace: Pace, n: int, context: int, seconds: float):
    steps = pace.steps_until(n, context, seconds)
    assert steps == int(steps)
    assert pace.span_s(n, context, steps) >= seconds
    assert steps == 0 or pace.span_s(n, context, steps - 1) < seconds


# --- lanes, by hand ----------------------------------------------------------------------------


def finishing(pace: Pace, max_running: int, arrivals: list[tuple[float, list[float]]], **how: Any):
    """When each group finishes on a fast engine, the meter, and the engine."""
    cap, version_at = how.get("cap"), how.get("version_at", ())

    async def main() -> tuple[list[float], Meter, Engine, list[Visit]]:
        loop = asyncio.get_running_loop()
        meter = Meter(max_running)
        limits = (how.get("kv_tokens"), how.get("prefill_tok_per_s"))
        engine = Engine(0, pace, max_running, meter, cap, how.get("recorder"), *limits)
        return await drive(engine, arrivals, version_at, loop, meter)

    return run_virtual(main())


def slow_finishing(
    pace: Roofline, max_running: int, arrivals: list[tuple[float, list[float]]], **how: Any
):
    async def main() -> Any:
        limits = (how.get("kv_tokens"), how.get("prefill_tok_per_s"))
        engine = PerTokenEngine(pace, max_running, how.get("cap"), *limits)
        loop = asyncio.get_running_loop()
        return await drive(engine, arrivals, how.get("version_at", ()), loop, None)

    return run_virtual(main())


async def drive(engine: Any, arrivals: Any, version_at: Any, loop: Any, meter: Any) -> Any:
    visits = [visit(i, lengths) for i, (_, lengths) in enumerate(arrivals)]
    times = [0.0] * len(arrivals)
    for each, (at, _) in zip(visits, arrivals, strict=True):
        loop.call_at(at, engine.submit, each)

        def note(_: Any, index: int = each.index) -> None:
            times[index] = loop.time()

        each.done.add_done_callback(note)
    for version, at in enumerate(version_at, start=1):
        loop.call_at(at, engine.take_weights, version)
    await asyncio.gather(*[each.done for each in visits])
    if meter is not None:
        meter.advance(loop.time())
    return times, meter, engine, visits


def test_lanes_serve_first_in_first_out():
    arrivals = [(0.0, [1.0]), (0.0, [3.0]), (0.0, [1.0]), (0.5, [1.0])]
    times, meter, _, _ = finishing(Lanes(), 2, arrivals)
    assert times == [1.0, 3.0, 2.0, 3.0]
    assert meter.busy_slot_s == 6.0
    assert meter.slot_idle_s == dict.fromkeys(meter.slot_idle_s, 0.0)


def test_a_lane_takes_work_in_the_middle_of_another_lanes_work():
    times, meter, _, _ = finishing(Lanes(2.0), 3, [(0.0, [2.0]), (1.25, [1.0, 0.5])])
    assert times == [4.0, 3.25]
    assert meter.busy_slot_s == 4.0 + 2.0 + 1.0
    assert meter.slot_idle_s["tail"] == pytest.approx(3 * 4.0 - 7.0)


def test_a_group_is_done_when_its_last_rollout_is():
    times, _, engine, _ = finishing(Lanes(), 4, [(0.0, [1.0, 5.0, 2.0])])
    assert times == [5.0]
    assert engine.num_tokens == 8.0


def test_bars_take_the_lowest_free_lane():
    recorder = Recorder()
    finishing(
        Lanes(), 2, [(0.0, [1.0]), (0.0, [3.0]), (0.0, [1.0]), (0.0, [4.0])], recorder=recorder
    )
    rows = {span.label: (span.row, span.start_s, span.end_s) for span in recorder.spans}
    assert rows == {
        "r0": ("engine 0/0", 0.0, 1.0),
        "r1": ("engine 0/1", 0.0, 3.0),
        "r2": ("engine 0/0", 1.0, 2.0),
        "r3": ("engine 0/0", 2.0, 6.0),
    }


# --- roofline ----------------------------------------------------------------------------------


def test_a_newcomer_joins_at_the_next_step_boundary():
    """Steps of exactly 1 s: what arrives at 2.5 s begins at 3 s."""
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)
    times, _, _, _ = finishing(pace, 8, [(0.0, [10.0]), (2.5, [4.0]), (4.0, [2.0])])
    assert times == [10.0, 7.0, 6.0]


def test_a_full_engine_makes_newcomers_wait_for_a_slot():
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)
    times, _, _, _ = finishing(pace, 2, [(0.0, [3.0, 7.0]), (0.5, [2.0, 2.0])])
    assert times == [7.0, 7.0]  # slots free at 3 and, for the second, at 5


arrivals_of = st.lists(
    st.tuples(
        st.floats(0, 1).map(lambda s: round(s, 3)),
        st.lists(st.integers(1, 150).map(float), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=12,
)


@given(
    st.sampled_from([SMALL, COMPUTE]),
    arrivals_of,
    st.integers(1, 20),
    st.sampled_from([None, 7.0, 40.0]),
    st.lists(st.floats(0.01, 1).map(lambda s: round(s, 3) + 4.1e-4), max_size=4),
    st.sampled_from([None, 100, 500]),
    st.sampled_from([None, 777.7, 12345.6]),
)
@settings(deadline=None, max_examples=100)
def test_the_engine_equals_its_token_by_token_twin(
    pace: Roofline,
    arrivals: list[tuple[float, list[float]]],
    max_running: int,
    cap: float | None,
    updates: list[float],
    kv_tokens: int | None,
    prefill_tok_per_s: float | None,
):
    """Times to 1e-9: both add up to some 2,000 steps, in another order."""
    how = {"cap": cap, "version_at": sorted(updates), "kv_tokens": kv_tokens}
    how["prefill_tok_per_s"] = prefill_tok_per_s
    arrivals = [(at + 1e-5 * i, lengths) for i, (at, lengths) in enumerate(arrivals)]  # no ties
    fast, _, engine, visits = finishing(pace, max_running, arrivals, **how)
    slow, _, twin, others = slow_finishing(pace, max_running, arrivals, **how)
    assert fast == pytest.approx(slow, rel=1e-9)
    assert engine.num_carried == twin.num_carried
    assert engine.num_evicted == twin.num_evicted
    assert engine.num_tokens == sum(sum(lengths) for _, lengths in arrivals)
    for one, other in zip(visits, others, strict=True):
        assert (one.oldest, one.newest) == (other.oldest, other.newest)
        assert one.start_versions == other.start_versions
        assert one.token_versions == pytest.approx(other.token_versions, abs=1e-6)


def test_versions_are_counted_token_by_token():
    """Steps of 1 s. Weights come at 3.5 s and count from the boundary at 4 s."""
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)
    _, _, _, visits = finishing(pace, 4, [(0.0, [10.0]), (5.5, [2.0])], version_at=[3.5])
    assert [each.oldest for each in visits] == [0, 1]
    assert [each.token_versions for each in visits] == [6.0, 2.0]


def test_a_capped_rollout_waits_for_new_weights_with_its_cache():
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)
    arrivals = [(0.0, [6.0]), (0.0, [3.0, 20.0])]
    times, _, engine, _ = finishing(pace, 4, arrivals, cap=4.0, version_at=[7.5])
    # both long ones stop at 4 s; the engine is empty then, so they go on at once
    assert times == [6.0, 20.0]
    assert engine.num_carried == 1 + 4


def test_a_full_cache_sends_the_last_one_back_and_computes_its_context_again():
    """Steps of 1 s, 10 tokens of prompt each, 40 in the cache, 20 of them computed a second.

    Both prompts, two groups, take 1 s; at 1 s two rollouts with 20 tokens of context run. After 10
    steps, at 11 s, 40 are full: the second leaves with 10 of 15 tokens. The first ends at 13 s; the
    second computes 20 tokens again, 1 s, and ends at 14 + 5 s.
    """
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)
    arrivals = [(0.0, [12.0]), (0.0, [15.0])]
    how = {"kv_tokens": 40, "prefill_tok_per_s": 20.0}
    times, _, engine, _ = finishing(pace, 4, arrivals, **how)
    assert times == [13.0, 19.0]
    assert engine.num_evicted == 1
    assert engine.num_tokens == 27.0


def test_what_does_not_fit_waits_and_one_alone_always_runs():
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)
    times, _, engine, _ = finishing(pace, 4, [(0.0, [30.0, 3.0])], kv_tokens=5)
    assert times == [33.0]
    assert engine.num_evicted == 0


def test_a_groups_prompt_is_computed_once():
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)
    times, _, _, _ = finishing(pace, 4, [(0.0, [3.0, 3.0, 3.0])], prefill_tok_per_s=5.0)
    assert times == [2.0 + 3.0]


def test_an_engine_that_is_held_stands_still_and_goes_on():
    pace = Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)

    async def main() -> tuple[float, int | None]:
        loop = asyncio.get_running_loop()
        engine = Engine(0, pace, 4, Meter(4))
        first, second = visit(0, [5.0]), visit(1, [1.0])
        engine.submit(first)
        loop.call_at(1.5, engine.hold)
        loop.call_at(3.0, engine.submit, second)
        loop.call_at(8.0, lambda: (engine.take_weights(1), engine.release()))
        await first.done
        return loop.time(), second.oldest

    assert run_virtual(main()) == (11.0, 1)  # two steps, a pause from 2 s to 8 s, three steps


@pytest.mark.parametrize("pace", [Lanes(), Roofline(0, 1e12, 0, 1e12, 1, 1, 0.0)])
def test_a_group_that_is_taken_back_frees_its_slots(pace: Pace):
    async def main() -> tuple[float, float, bool]:
        loop = asyncio.get_running_loop()
        meter = Meter(2)
        engine = Engine(0, pace, 2, meter)
        gone, waiting, next_one = visit(0, [50.0, 50.0]), visit(1, [3.0]), visit(2, [2.0, 50.0])
        for each in (gone, waiting, next_one):
            engine.submit(each)
        loop.call_at(4.0, engine.abort, gone)
        loop.call_at(4.0, engine.abort, next_one)
        await waiting.done
        meter.advance(loop.time())
        return loop.time(), meter.busy_slot_s, gone.done.done()

    assert run_virtual(main()) == (7.0, 8.0 + 3.0, False)


def test_a_group_that_is_taken_back_takes_its_context_along():
    """Each step reads 1e9 bytes and 1e7 a token of context at 1e12 B/s: alone, 1 ms and growing."""
    pace = Roofline(0, 1e9, 1e7, 1e12, 1, 1, 0.0)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        engine = Engine(0, pace, 8, Meter(8))
        stays, gone = visit(0, [50.0], 20), visit(1, [500.0], 1000)
        engine.submit(stays)
        engine.submit(gone)
        loop.call_at(0.1, engine.abort, gone)
        await stays.done
        return loop.time()

    expected, context, both = 0.0, [20, 1000], True
    for _ in range(50):
        both = both and expected < 0.1  # they part at the first boundary after 0.1 s
        expected += (1e9 + 1e7 * (sum(context) if both else context[0])) / 1e12
        context = [each + 1 for each in context]
    assert run_virtual(main()) == pytest.approx(expected, rel=1e-12)


# --- the published rollout of 1,024 answers ----------------------------------------------------


def tail_lengths() -> list[float]:
    from math import log

    draw = random.Random(0)
    return [
        float(min(16384, max(64, int(draw.lognormvariate(log(1500), 0.9))))) for _ in range(1024)
    ]


def test_the_engine_costs_microseconds_a_rollout_whatever_its_length():
    lengths = [each * 1000 for each in tail_lengths()]  # two billion tokens

    async def main() -> int:
        loop: Any = asyncio.get_running_loop()
        engine = Engine(0, Roofline(), 512, Meter(512))
        each = visit(0, lengths, 512)
        engine.submit(each)
        await each.done
        return loop.num_callbacks

    assert run_virtual(main()) < 1024 + 10
