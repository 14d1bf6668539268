"""The real loop with modelled stages: what the schedule makes of lengths and service times."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.errors import LagzeroError
from lagzero.plan.lengths import parse_lengths
from lagzero.plan.scenario import Scenario, with_keys
from lagzero.plan.simulate import Result, simulate
from lagzero.schedule.staleness import provable_bound


def lanes(**keys: Any) -> Scenario:
    """Lanes of constant pace; no time for training or sync unless given."""
    plain = {"lanes": 4, "group_size": 1, "groups_per_step": 4, "train_token_s": 0, "sync_s": 0}
    return with_keys(Scenario(), [(name, str(value)) for name, value in (plain | keys).items()])


# --- accounting, by hand -----------------------------------------------------------------------


def test_time_goes_to_the_reasons_that_a_step_by_hand_gives():
    """4 lanes, lengths 1 1 1 5; then scoring 2, training 3, sync 0.5; twice.

    A step: 5 + 2 + 3 + 0.5 = 10.5. Lane-time: 8 busy, 12 tail; the scorer of the three short
    groups ends at 3, of the long one at 7. The trainer waits 5 for rollouts and 2 for scores.
    """
    result = simulate(
        lanes(steps=2, lengths="cycle:1,1,1,5", score="fixed:2", train_s=3, sync_s=0.5)
    )
    assert result.time_s == 21.0
    assert result.slot_use == pytest.approx(16 / 84)
    assert {k: v * 84 for k, v in result.slot_idle.items()} == pytest.approx(
        {"tail": 24, "weights": 24, "turn": 0, "sync": 4, "reward": 16, "data": 0, "routing": 0}
    )
    assert result.trainer_use == pytest.approx(6 / 21)
    assert {k: v * 21 for k, v in result.trainer_idle.items()} == pytest.approx(
        {"tail": 0, "weights": 0, "turn": 0, "sync": 1, "reward": 4, "data": 10, "routing": 0}
    )
    assert (result.tokens, result.num_trained, result.num_started) == (16, 8, 8)
    assert result.tok_per_s == pytest.approx(16 / 21)


@pytest.mark.parametrize("keys", [{}, {"max_lag": 2}, {"window": "none", "max_lag": 1}])
def test_use_and_idle_shares_of_a_pool_add_up_to_all_of_its_time(keys: dict[str, Any]):
    result = simulate(
        with_keys(
            Scenario(), [(k, str(v)) for k, v in {"steps": 6, "score": "fixed:3", **keys}.items()]
        )
    )
    assert result.slot_use + sum(result.slot_idle.values()) == pytest.approx(1)
    assert result.trainer_use + sum(result.trainer_idle.values()) == pytest.approx(1)


def test_the_trainer_takes_a_time_for_each_token():
    result = simulate(lanes(steps=3, lengths="cycle:1,1,1,5", train_s=1, train_token_s=0.25))
    assert result.time_s == 3 * (5 + 1 + 8 * 0.25)


def test_taking_turns_on_the_same_devices_never_overlaps():
    keys = {"steps": 3, "lengths": "cycle:1,2,3,4", "train_s": 2, "placement": "colocated"}
    result = simulate(lanes(**keys))
    assert result.time_s == 3 * (4 + 2)
    assert result.slot_idle["turn"] == pytest.approx(2 / 6)


def test_engines_that_stand_still_for_weights_lose_that_time():
    keys = {"steps": 4, "lengths": "fixed:4", "max_lag": 1, "sync_s": 1}
    flying = simulate(lanes(**keys))
    paused = simulate(lanes(**keys, sync_pauses="true"))
    # Step s is published at 4s + 1; the next groups run meanwhile, or wait for it.
    assert flying.time_s == 4 * 4 + 1
    assert paused.time_s == 4 * (4 + 1)
    assert paused.slot_idle["sync"] == pytest.approx(4 / 20)


def test_data_that_end_end_the_run():
    result = simulate(lanes(steps=99, prompts=10, lengths="fixed:1"))
    assert [s.metrics["groups"] for s in result.steps] == [4, 4, 2]


def test_a_trace_ends_the_data_where_it_ends(tmp_path: Any):
    file = tmp_path / "lengths.txt"
    file.write_text("1 2 3\n4 5 6 7 8 9\n")
    result = simulate(lanes(steps=99, lengths=f"trace:{file}", group_size=2))
    assert result.num_trained == 4  # the ninth number is no group of two
    assert result.tokens == 36


def test_groups_with_nothing_to_learn_from_are_dropped_and_counted():
    result = simulate(lanes(steps=100, lengths="fixed:1", empty_share=0.5))
    assert result.num_dropped / result.num_started == pytest.approx(0.5, abs=0.1)
    assert result.num_trained + result.num_dropped == result.num_started
    assert len(result.steps) == 100  # steps that were empty as a whole are taken again


def test_dynamic_sampling_plays_other_groups_for_those_with_nothing_to_learn_from():
    keys = {"steps": 100, "lengths": "fixed:1", "empty_share": 0.5}
    result = simulate(lanes(**keys, resample_limit=20))
    given_up = result.num_given_up["zero_spread"]
    assert result.num_dropped == 0
    assert result.num_trained == 100 * 4
    assert given_up + 400 == result.num_started
    assert given_up / result.num_started == pytest.approx(0.5, abs=0.1)
    assert result.lost_share == pytest.approx(given_up / result.num_started)
    bounded = simulate(lanes(**keys, resample_limit=1))
    assert 0 < bounded.num_dropped < simulate(lanes(**keys)).num_dropped
    assert bounded.num_given_up["zero_spread"] <= 4 * (100 + 1)


# --- lag ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 8, 9, 30])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_window_bounds_the_lag(max_lag: int, window: int):
    """Visit i leaves at most window - 1 places late: lag <= k + ceil((window - 1) / B)."""
    keys = {"steps": 60, "groups_per_step": 8, "max_lag": max_lag, "window": window}
    result = simulate(lanes(**keys, lanes=8, lengths="lognormal:median=40,sigma=1.5", train_s=9))
    assert result.lag_max <= max_lag + math.ceil((window - 1) / 8)
    if window == 1:
        assert result.lag_max == max_lag


def test_the_bound_of_a_window_is_reached():
    """B = 2, k = 1, window 2: visit 5 starts at version 1 and lasts long, visit 6 overtakes it
    into step 2, and so 5 is trained at version 3: a lag of k + 1."""
    keys = {"steps": 5, "groups_per_step": 2, "lanes": 4, "max_lag": 1, "train_s": 1}
    late = "list:1,1,1,1,1,20,1"
    assert simulate(lanes(**keys, lengths=late, window=2)).lag_max == 2
    assert simulate(lanes(**keys, lengths=late, window=1)).lag_max == 1


def test_first_finished_hand_over_lets_the_lag_exceed_k():
    """One rollout of 30 beside rollouts of 1: it is trained when it ends, 13 versions late."""
    keys = {"steps": 40, "groups_per_step": 2, "lanes": 4, "window": "none", "max_lag": 1}
    result = simulate(lanes(**keys, lengths="list:1,30,1,1", train_s=1))
    assert result.lag_max > 5
    by_step = {each.step: each.metrics["lag/max"] for each in result.steps}
    late = max(by_step, key=lambda step: by_step[step])
    assert result.steps[late - 1].at_s >= 31
    assert all(lag <= 1 for step, lag in by_step.items() if step != late)


def test_first_finished_hand_over_trains_short_ones_first():
    keys = {"lanes": 64, "groups_per_step": 16, "max_lag": 3, "steps": 60, "train_s": 1}
    for seed in range(5):
        early = simulate(
            lanes(**keys, lengths="exponential:mean=10", window="none", seed=seed)
        ).steps
        strict = simulate(lanes(**keys, lengths="exponential:mean=10", seed=seed)).steps
        # The first 16 of 64 exponential lengths to end have a mean of about 1.4, not 10.
        assert early[0].metrics["length/mean"] < 2.5
        assert strict[0].metrics["length/mean"] > 5
        later = [s.metrics["length/mean"] for s in early[20:]]
        assert sum(later) / len(later) == pytest.approx(10, rel=0.2)


def test_tokens_lag_less_than_their_rollout_where_weights_arrive_in_flight():
    result = simulate(lanes(steps=30, lengths="fixed:10", max_lag=2, train_s=4))
    assert 0 < result.lag_token_mean < result.lag_mean <= 2


def test_running_ahead_buys_time_until_the_slowest_part_is_busy():
    times = [
        simulate(
            lanes(
                steps=60,
                lanes=16,
                groups_per_step=16,
                lengths="exponential:mean=10",
                max_lag=k,
                train_s=8,
            )
        ).time_s
        for k in (0, 1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[1]
    assert times[-1] >= 60 * 10  # 16 lanes write 16 rollouts of mean 10 a step


def test_over_sampling_shortens_the_tail_and_carries_the_rest():
    keys = {"lanes": 24, "groups_per_step": 16, "steps": 40, "window": "none", "train_s": 1}
    plain = simulate(lanes(**keys, lengths="exponential:mean=10"))
    more = simulate(lanes(**keys, lengths="exponential:mean=10", extra_groups=8))
    assert more.time_s < 0.75 * plain.time_s
    assert plain.lag_max == 0 < more.lag_max
    assert more.num_started - more.num_trained == 8


def test_a_cap_lets_short_ones_pass_and_finishes_long_ones_later():
    keys = {"engines": 1, "max_running": 2, "groups_per_step": 2, "group_size": 1, "steps": 12}
    keys |= {"window": "none", "max_lag": 1, "lengths": "cycle:1500,1500,100,100", "sync_s": 0}
    scenario = with_keys(Scenario(), [(k, str(v)) for k, v in keys.items()])
    whole, capped = simulate(scenario), simulate(replace(scenario, partial_cap=200.0))
    assert whole.num_carried == 0 < capped.num_carried
    assert capped.steps[0].at_s < whole.steps[0].at_s / 4  # 300 tokens in, not 1,500
    assert capped.steps[0].metrics["length/mean"] == 100
    assert capped.num_trained == whole.num_trained == 24


def test_start_order_keeps_the_share_of_slow_prompts():
    """AS4: two kinds of prompt that last 1 and 5 steps, k = 2, 200 steps: none is lost, so both
    keep their share of a half; a window holds it in each step, first finished only over time."""
    keys = {"steps": 200, "groups_per_step": 4, "max_lag": 2, "train_s": 1, "lanes": 40}
    strict = simulate(lanes(**keys, lengths="cycle:1,5"))
    assert [each.metrics["length/mean"] for each in strict.steps] == [3.0] * 200
    first_finished = simulate(lanes(**keys, lengths="cycle:1,5", window="none"))
    assert first_finished.steps[0].metrics["length/mean"] == 1.0
    assert first_finished.length_mean == pytest.approx(3.0, rel=0.02)


any_scenario = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 6),
        "groups_per_step": st.integers(1, 6),
        "group_size": st.integers(1, 4),
        "max_lag": st.integers(0, 3),
        "window": st.sampled_from([1, 2, 5, "none"]),
        "extra_groups": st.integers(0, 4),
        "prompts": st.sampled_from(["none", 1, 9]),
        "lengths": st.sampled_from(["exponential:mean=30", "cycle:1,90,2", "fixed:7"]),
        "partial_cap": st.sampled_from(["none", 1, 20]),
        "lanes": st.sampled_from(["none", 1, 5]),
        "engines": st.integers(1, 3),
        "max_running": st.integers(1, 5),
        "router": st.sampled_from(["round_robin", "least_loaded"]),
        "train_s": st.sampled_from([0, 0.5, 20]),
        "sync_s": st.sampled_from([0, 0.1, 3]),
        "sync_pauses": st.sampled_from(["true", "false"]),
        "score": st.sampled_from(["none", "exponential:mean=2"]),
        "empty_share": st.sampled_from([0, 0.3]),
        "resample_limit": st.integers(0, 2),
        "placement": st.sampled_from(["colocated", "disaggregated", "swap"]),
        "surplus": st.sampled_from(["carry", "drop"]),
        "sync_every": st.integers(1, 3),
        "action": st.sampled_from(["wait", "drop", "recycle", "interrupt", "accept"]),
        "bound": st.integers(0, 3),
        "clock": st.sampled_from(["oldest_token", "newest_token", "start"]),
        "max_restarts": st.integers(0, 2),
        "kv_tokens": st.sampled_from(["none", 600, 2000]),
        "prefill_tok_per_s": st.sampled_from(["none", 1000]),
        "repack_below": st.sampled_from(["none", 2, 4]),
        "seed": st.integers(0, 5),
    }
)


def without_conflicts(keys: dict[str, Any]) -> dict[str, Any]:
    keys = dict(keys)
    if keys["placement"] == "swap":
        keys |= {"max_lag": 1, "window": 1, "sync_every": 1, "lanes": "none", "action": "accept"}
        keys |= {"engines": 2, "resample_limit": 0}
    if keys["window"] == 1:
        keys["extra_groups"] = 0
    if not keys["empty_share"]:
        keys["resample_limit"] = 0
    if not keys["extra_groups"] and not keys["max_lag"]:
        keys["surplus"] = "carry"
    apart = keys["placement"] == "disaggregated" and keys["lanes"] == "none"
    ahead = keys["max_lag"] or keys["sync_every"] > 1 or keys["extra_groups"]
    if not apart or keys["engines"] == 1 or not ahead or keys["surplus"] == "drop":
        keys["repack_below"] = "none"
    return keys


def run_or_refuse(of: Scenario) -> Result | None:
    """Simulate; None where every group is given up, so that the run cannot go on and says so."""
    try:
        return simulate(of)
    except LagzeroError as error:
        if "groups in a row were given up" not in str(error):
            raise
        return None


@given(any_scenario)
@settings(deadline=None, max_examples=200)
def test_any_scenario_ends_and_its_books_balance(keys: dict[str, Any]):
    keys = without_conflicts(keys)
    of = with_keys(Scenario(), [(name, str(value)) for name, value in keys.items()])
    result = run_or_refuse(of)
    if result is None:
        assert of.action in ("drop", "recycle", "interrupt") or of.surplus == "drop"
        return
    if result.time_s:
        assert result.slot_use + sum(result.slot_idle.values()) == pytest.approx(1)
        assert result.trainer_use + sum(result.trainer_idle.values()) == pytest.approx(1)
    consumed = result.num_trained + result.num_dropped
    gone = consumed + sum(result.num_given_up.values())
    assert len(result.steps) == of.steps or gone == of.prompts
    ahead = (of.max_lag + of.sync_every) * of.groups_per_step + of.extra_groups
    assert 0 <= result.num_pending <= ahead
    assert 0 <= result.lost_share <= 1
    assert 0 <= result.engine_idle <= 1
    assert result.num_moved == 0 or of.repack_below is not None
    assert result.lost_share < 1 or not result.num_trained
    for each in result.steps:
        lag = each.metrics
        assert 0 <= lag["lag/token_mean"] <= lag["lag/max"] + 1e-9
        assert 0 <= lag["lag/mean"] <= lag["lag/max"]
    check_lag(of, result.lag_max)


def check_lag(of: Scenario, lag_max: int) -> None:
    schedule = (of.max_lag, of.groups_per_step, of.window, of.extra_groups, of.sync_every)
    bound = provable_bound(*schedule)
    if bound is not None and of.action in ("wait", "accept") and of.surplus == "carry":
        assert lag_max <= bound
    # the metric counts from the oldest token, as this clock does
    if of.action in ("drop", "recycle", "interrupt") and of.clock == "oldest_token":
        assert of.bound is not None
        assert lag_max <= of.bound


# --- engines and routing -----------------------------------------------------------------------


def roofline(**keys: Any) -> Scenario:
    plain = {"engines": 4, "max_running": 8, "groups_per_step": 16, "group_size": 4, "steps": 5}
    return with_keys(Scenario(), [(name, str(value)) for name, value in (plain | keys).items()])


def test_the_router_matters_where_long_ones_come_in_step_with_the_engines():
    keys = {"group_size": 1, "max_running": 1, "max_lag": 2, "lengths": "cycle:2000,100,100,100"}
    turn = simulate(roofline(**keys, steps=12, router="round_robin"))
    load = simulate(roofline(**keys, steps=12, router="least_loaded"))
    assert load.time_s < turn.time_s
    assert load.slot_use > turn.slot_use
    assert turn.slot_idle["routing"] > 0


def test_a_scenario_gives_the_same_result_each_time_and_another_seed_another():
    scenario = roofline(max_lag=2, window="none", score="exponential:mean=3")
    first, again = simulate(scenario), simulate(scenario)
    assert json.dumps(first.as_json()) == json.dumps(again.as_json())
    assert simulate(replace(scenario, seed=1)).time_s != first.time_s


# --- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("fixed:7", [7, 7, 7, 7]),
        ("list:1,3,1", [1, 3, 1, 1]),
        ("1,3,2", [1, 3, 2, 2]),
        ("cycle:1,2", [1, 2, 1, 2]),
    ],
)
def test_listed_lengths(text: str, first: list[float]):
    assert parse_lengths(text).draws(0).part(0, 4) == first


def test_drawn_lengths_are_the_same_in_whatever_order_they_are_asked_for():
    spec = parse_lengths("lognormal:median=1500,sigma=0.9,min=64,max=16384")
    one, other = spec.draws(5), spec.draws(5)
    whole = list(one.part(0, 100))
    assert list(other.part(60, 40)) == whole[60:]
    assert list(other.part(0, 60)) == whole[:60]
    assert list(spec.draws(6).part(0, 100)) != whole
    assert all(64 <= each <= 16384 and each == int(each) for each in whole)


def test_exponential_lengths_have_their_mean():
    numbers = parse_lengths("exponential:mean=20").draws(0).part(0, 20_000)
    assert sum(numbers) / len(numbers) == pytest.approx(20, rel=0.03)  # 4 standard errors


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lognorml:median=3", "did you mean 'lognormal'"),
        ("lognormal:medan=3,sigma=1", "did you mean 'median'"),
        ("lognormal:median=3", "needs sigma=NUMBER"),
        ("exponential", "needs mean=NUMBER"),
        ("exponential:mean=-1", "one number above 0"),
        ("fixed:1,2", "needs numbers above 0"),
        ("fixed:", "needs numbers above 0"),
        ("list:1,nan", "needs numbers above 0"),
        ("1,0", "is no distribution"),
        ("trace:/none/such", "cannot be read: No such file"),
        ("lognormal:median=3,sigma=1,min=9,max=8", "min=9 is above max=8"),
    ],
)
def test_a_distribution_that_cannot_be_read_says_what_would_be(text: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        parse_lengths(text)


# --- contract, transfers, placement, by hand ----------------------------------------------------


def test_what_still_runs_pauses_while_a_step_trains_on_its_devices():
    """Lengths 2 and 6; at 2 s a step trains for 3 s; the other has 4 left then and ends at 9 s."""
    keys = {"lanes": 2, "groups_per_step": 1, "max_lag": 1, "train_s": 3, "steps": 2}
    result = simulate(lanes(**keys, lengths="list:2,6,1", placement="colocated"))
    assert [each.at_s for each in result.steps] == [5, 12]
    assert [each.metrics["lag/max"] for each in result.steps] == [0, 1]
    apart = simulate(lanes(**keys, lengths="list:2,6,1"))
    assert [each.at_s for each in apart.steps] == [5, 9]


def one_second_steps(**keys: Any) -> Scenario:
    """Engines whose decode steps take 1 s each, whatever runs."""
    plain = {"params": 0, "weight_bytes": 1e12, "kv_bytes_per_token": 0, "overhead_s": 0}
    plain |= {"bandwidth_bytes_per_s": 1e12, "group_size": 1, "train_token_s": 0, "sync_s": 0}
    return with_keys(Scenario(), [(name, str(value)) for name, value in (plain | keys).items()])


def test_two_halves_that_swap_work_on_two_steps_at_once():
    """A step is generated in 4 s and trained in 4 s. Both halves generate at first; then each
    trains 4 s and generates 4 s, against the other: a step every 4 s instead of every 8."""
    keys = {"groups_per_step": 1, "lengths": "fixed:4", "train_s": 4, "steps": 6, "engines": 2}
    swapped = simulate(one_second_steps(**keys, placement="swap", max_lag=1))
    assert [each.at_s for each in swapped.steps] == [8, 12, 16, 20, 24, 28]
    assert [each.metrics["lag/max"] for each in swapped.steps] == [0, 1, 1, 1, 1, 1]
    together = simulate(one_second_steps(**keys, placement="colocated"))
    assert together.time_s == 6 * 8


def test_a_half_that_trains_does_not_generate():
    """Step 2 belongs to half 0, which trains step 0 until 8 s, although its group may start
    then only: admission and placement say the same."""
    keys = {"groups_per_step": 2, "lengths": "fixed:4", "train_s": 4, "steps": 4, "engines": 2}
    result = simulate(one_second_steps(**keys, placement="swap", max_lag=1, max_running=1))
    # one slot a half, two groups a step: 8 s to generate, 4 s to train
    assert [each.at_s for each in result.steps] == [12, 16, 24, 28]
    assert result.slot_idle["turn"] == pytest.approx(4 * 4 / (2 * 28))


LONG_SECOND = {"lanes": 2, "groups_per_step": 1, "max_lag": 1, "train_s": 1, "window": "none"}


def test_an_interrupted_group_leaves_its_lane_to_the_next():
    """The second group would take 50 s. Version 1 is out at 2 s, and it is too old then."""
    keys = {**LONG_SECOND, "lengths": "list:1,50,1", "steps": 6, "bound": 0, "max_restarts": 0}
    result = simulate(lanes(**keys, action="interrupt"))
    assert result.num_given_up["interrupted"] >= 1
    assert result.given_up_length > 1
    assert result.lag_max == 0
    assert result.time_s < 20
    waited = simulate(lanes(**{**keys, "window": 1}, action="wait"))
    assert waited.time_s > 50


def test_an_interrupted_group_is_played_again_as_often_as_the_contract_says():
    keys = {**LONG_SECOND, "lengths": "list:1,50,1", "steps": 12, "bound": 0, "max_restarts": 2}
    result = simulate(lanes(**keys, action="interrupt"))
    assert result.num_restarts >= 2
    assert result.num_given_up["interrupted"] >= 1


def test_a_group_that_is_too_old_when_it_ends_is_dropped_with_its_tokens():
    """The second group ends at 9 s, versions later; its 9 tokens were written for nothing."""
    keys = {**LONG_SECOND, "lengths": "list:1,9,1", "steps": 20, "bound": 1}
    result = simulate(lanes(**keys, action="drop"))
    assert result.num_given_up == {"stale": 1}
    assert result.given_up_length == 9
    assert result.lag_max <= 1
    assert result.lost_share * (result.tokens + 9) == pytest.approx(9, rel=0.2)
    assert result.length_mean == 1.0
    kept = simulate(lanes(**keys, action="accept"))
    assert (kept.num_given_up, kept.lag_max > 1) == ({}, True)


def test_surplus_is_carried_or_dropped():
    """Three start, two are needed: the long one is carried into a later step, or never trained.

    What starts in its place does so while the step trains, so it has lag 1 in the next one.
    """
    keys = {"lanes": 3, "groups_per_step": 2, "extra_groups": 1, "window": "none", "steps": 9}
    carried = simulate(lanes(**keys, lengths="cycle:1,1,9", train_s=1))
    dropped = simulate(lanes(**keys, lengths="cycle:1,1,9", train_s=1, surplus="drop"))
    assert carried.length_mean > 2
    assert (dropped.length_mean, dropped.lag_max) == (1.0, 1)
    assert carried.lag_max > 1
    assert set(dropped.num_given_up) == {"surplus"}


def test_weights_travel_after_every_nth_step():
    """Lengths 4, training 1 s, transfer 2 s, 3 steps a transfer: 4 + 3 + 2 s for three steps."""
    keys = {"groups_per_step": 1, "lanes": 4, "lengths": "fixed:4", "train_s": 1, "sync_s": 2}
    result = simulate(lanes(**keys, steps=6, sync_every=3))
    assert [each.at_s for each in result.steps] == [5, 6, 9, 14, 15, 18]
    assert [each.metrics["lag/max"] for each in result.steps] == [0, 1, 2, 0, 1, 2]
    assert result.lag_groups == {0: 2, 1: 2, 2: 2}


def test_a_rollout_that_is_given_up_where_it_begins_wrote_nothing():
    """Its tokens are a difference of the engine's counts, which rounding made -1e-16 here."""
    keys = {"steps": 1, "groups_per_step": 1, "group_size": 1, "window": 2, "extra_groups": 1}
    keys |= {"surplus": "drop", "lengths": "exponential:mean=30", "lanes": 1, "max_running": 1}
    for seed in range(40):
        of = with_keys(Scenario(), [(n, str(v)) for n, v in (keys | {"seed": seed}).items()])
        assert simulate(of).lost_share >= 0
