"""Published worked examples of asynchrony and of the long tail, reproduced to the last digit."""

from __future__ import annotations

import asyncio
import math
import random
import statistics

import pytest

from lagzero.plan.clock import run_virtual
from lagzero.plan.engine import Engine, Visit
from lagzero.plan.meter import Meter
from lagzero.plan.pace import Roofline
from lagzero.plan.report import draw
from lagzero.plan.scenario import Scenario, with_keys
from lagzero.plan.simulate import simulate
from lagzero.plan.timeline import Recorder


def scenario(text: str) -> Scenario:
    words = [word.partition("=") for word in text.split()]
    return with_keys(Scenario(), [(name, value) for name, _, value in words])


# --- two lanes, batches of two, two steps ------------------------------------------------------

TWO_LANES = (
    "lanes=2 group_size=1 groups_per_step=2 steps=2 lengths=list:1,3,1 train_s=1 "
    "train_token_s=0 sync_s=0 window=none"
)


def test_two_lanes_in_turn():
    result = simulate(scenario(TWO_LANES + " max_lag=0"), record=True)
    assert (result.time_s, result.slot_use) == (6.0, 0.5)
    assert [each.metrics["lag/max"] for each in result.steps] == [0, 0]
    assert draw(result).splitlines() == [
        "time     0   1   2   3   4   5   6",
        "lane A   [r0]............[r2]....",
        "lane B   [----r1----]....[r3]....",
        "trainer  ............[s0]....[s1]",
    ]


def test_two_lanes_one_step_ahead():
    result = simulate(scenario(TWO_LANES + " max_lag=1"), record=True)
    assert (result.time_s, result.slot_use) == (4.0, 1.0)
    s0, s1 = result.steps
    assert (s0.at_s, s1.at_s) == (3.0, 4.0)
    assert (s0.metrics["lag/max"], s0.metrics["tokens"]) == (0, 2)  # r0 and r2
    assert (s1.metrics["lag/mean"], s1.metrics["lag/max"]) == (1, 1)  # r1 and r3, both by one
    assert s1.metrics["tokens"] == 4
    assert draw(result).splitlines() == [
        "time     0   1   2   3   4",
        "lane A   [r0][r2][r3][r4]",
        "lane B   [----r1----][r5]",
        "trainer  ........[s0][s1]",
    ]


# --- N exponential lengths on N lanes: utilisation 1 / H_N --------------------------------------


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_the_expected_order_statistics_use_exactly_one_over_h_n(n: int):
    """The i-th shortest of N exponential lengths of mean m is expected at m (H_N - H_(N-i)):
    they sum to N m and the longest is m H_N."""
    expected = [10 * (harmonic(n) - harmonic(n - i)) for i in range(1, n + 1)]
    lengths = "cycle:" + ",".join(repr(each) for each in expected)
    text = f"lanes={n} group_size=1 groups_per_step={n} steps=5 train_token_s=0 sync_s=0"
    result = simulate(scenario(f"{text} lengths={lengths}"))
    assert result.slot_use == pytest.approx(1 / harmonic(n), rel=1e-12)


def test_64_drawn_exponential_lengths_use_about_21_percent():
    """Longest of 64: mean 4.744 m, standard deviation 1.28 m; over 1,000 steps the share has a
    standard error of 0.9 % of itself, and 2.6 % is three of them."""
    text = "lanes=64 group_size=1 groups_per_step=64 steps=1000 train_token_s=0 sync_s=0"
    result = simulate(scenario(f"{text} lengths=exponential:mean=10"))
    assert result.slot_use == pytest.approx(1 / harmonic(64), rel=0.026)
    assert round(result.slot_use, 2) == 0.21
    assert result.slot_idle["tail"] == pytest.approx(1 - result.slot_use)


# --- one rollout of 1,024 answers on one device -------------------------------------------------

MODEL = Roofline(7.6e9, 15.2e9, 57344, 3.35e12, 989e12, 0.5, 0.4e-3)


def answers() -> list[float]:
    draws = random.Random(0)
    raw = (int(draws.lognormvariate(math.log(1500), 0.9)) for _ in range(1024))
    return [float(min(16384, max(64, each))) for each in raw]


def rollout(cap: float | None = None) -> tuple[Meter, Engine, Recorder]:
    recorder = Recorder()

    async def main() -> tuple[Meter, Engine]:
        loop = asyncio.get_running_loop()
        meter = Meter(512)
        engine = Engine(0, MODEL, 512, meter, cap, recorder)
        visit = Visit(0, answers(), 512, loop.create_future())
        engine.submit(visit)
        await visit.done
        meter.advance(loop.time())
        return meter, engine

    return (*run_virtual(main()), recorder)


def test_the_answers_are_the_published_ones():
    assert sorted(answers())[512] == 1549
    assert max(answers()) == 16384


def test_the_rollout_takes_203_s_where_a_full_batch_would_take_102_s():
    meter, engine, _ = rollout()
    assert engine.num_tokens == sum(answers())
    assert round(meter.at_s) == 203
    full_tok_per_s = 512 / MODEL.step_s(512, 512 * (512 + 1500))
    assert round(engine.num_tokens / full_tok_per_s) == 102


def test_for_54_percent_of_the_time_fewer_than_128_run():
    meter, _, _ = rollout()
    assert round(100 * meter.low_s / meter.at_s) == 54


def test_the_figures_are_those_of_the_loop_over_decode_steps():
    """The slow twin of the rollout, one iteration a decode step."""
    queue, running = list(reversed(answers())), list[list[float]]()
    elapsed = low = 0.0
    while queue or running:
        while queue and len(running) < 512:
            running.append([queue.pop(), 0])
        step = MODEL.step_s(len(running), sum(512 + done for _, done in running))
        elapsed += step
        low += step if len(running) < 128 else 0
        running = [[length, done + 1] for length, done in running if done + 1 < length]
    meter, _, _ = rollout()
    assert meter.at_s == pytest.approx(elapsed, rel=1e-12)
    assert meter.low_s == pytest.approx(low, rel=1e-12)


def test_capped_at_4096_the_round_takes_96_s_and_145_are_carried():
    _, engine, recorder = rollout(cap=4096)
    first_round = recorder.spans[:1024]  # the carried ones start once nothing else is left
    assert len({span.label for span in first_round}) == 1024
    assert round(max(span.end_s or 0 for span in first_round)) == 96
    carried = [label for label, n in counts(recorder).items() if n > 1]
    assert len(carried) == sum(each > 4096 for each in answers()) == 145
    assert engine.num_tokens == sum(answers())


def counts(recorder: Recorder) -> dict[str, int]:
    labels = [span.label for span in recorder.spans]
    return {label: labels.count(label) for label in set(labels)}


def test_the_median_is_the_513th_of_the_sorted_answers():
    """The even count has two middle values; the published median is the upper one."""
    assert statistics.median_high(answers()) == 1549
