from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.schedule.selection import UNFINISHED, Selection, log_factorials, upper_tail, weigh

LOGS = log_factorials(512)


def exact_tail(num: int, marked: int, drawn: int, least: int) -> Fraction:
    """The slow twin, in whole numbers."""
    ways = sum(
        math.comb(marked, i) * math.comb(num - marked, drawn - i)
        for i in range(max(least, 0), min(marked, drawn) + 1)
        if drawn - i <= num - marked
    )
    return Fraction(ways, math.comb(num, drawn))


def test_logarithms_of_factorials():
    assert np.exp(log_factorials(5)) == pytest.approx([1, 1, 2, 6, 24, 120], rel=1e-14)


def test_the_tail_by_hand():
    # Ten balls, 4 marked, 3 drawn: C(4,3) / C(10,3) = 4 / 120 that all three are marked;
    # with two marked C(4,2) * 6 = 36 more ways.
    assert upper_tail(10, 4, 3, 3, LOGS) == pytest.approx(4 / 120, rel=1e-12)
    assert upper_tail(10, 4, 3, 2, LOGS) == pytest.approx(40 / 120, rel=1e-12)
    assert upper_tail(10, 4, 3, 0, LOGS) == 1.0
    assert upper_tail(10, 4, 9, 3, LOGS) == 1.0  # six others at most, so three are certain
    assert upper_tail(10, 0, 5, 0, LOGS) == 1.0


@given(st.integers(1, 512), st.data())
def test_the_tail_equals_whole_number_arithmetic(num: int, data: st.DataObject):
    marked, drawn = data.draw(st.integers(0, num)), data.draw(st.integers(0, num))
    least = data.draw(st.integers(0, min(marked, drawn)))
    expected = float(exact_tail(num, marked, drawn, least))
    # nine logarithms below ln(512!) = 2686, each with an error of one part in 2^52
    assert upper_tail(num, marked, drawn, least, LOGS) == pytest.approx(expected, rel=6e-12)


def evidence(lengths: list[float], given_up: list[int]):
    lost = np.zeros(len(lengths), bool)
    lost[given_up] = True
    return weigh(np.array(lengths, float), lost, LOGS)


def test_the_longest_quarter_is_long():
    found = evidence([1, 2, 3, 4, 5, 6, 7, 8], [7])
    # the smallest value that three quarters do not exceed is 6: 6, 7 and 8 are long
    assert (found.visits, found.long, found.given_up, found.long_given_up) == (8, 3, 1, 1)
    assert found.at_least == 6
    assert found.p == pytest.approx(3 / 8)
    assert found.long_share == 3 / 8
    assert found.long_trained_share == 2 / 7
    assert found.lost_share == 1 / 3


def test_where_most_are_equally_short_the_others_are_long():
    found = evidence([2] * 8 + [10] * 2, [8, 9])
    assert (found.long, found.long_given_up, found.at_least) == (2, 2, 10)
    assert found.p == pytest.approx(1 / 45)


def test_equal_lengths_have_no_long_ones():
    found = evidence([5] * 10, [1, 2, 3])
    assert (found.long, found.p, found.lost_share) == (0, 1.0, None)


def test_what_was_not_waited_for_is_longer_than_all():
    found = evidence([1, 2, 3, 4, 5, 6, UNFINISHED, UNFINISHED, UNFINISHED, UNFINISHED], [6, 7])
    assert (found.long, found.long_given_up) == (4, 2)
    assert math.isinf(found.at_least)


def test_where_all_were_given_up_nothing_tells_long_from_short():
    found = evidence([1, 2, 3, 4], [0, 1, 2, 3])
    assert found.long_trained_share is None
    assert found.p == 1.0


def test_without_visits_there_is_nothing_to_test():
    with pytest.raises(ValueError, match="no visits"):
        evidence([], [])


@pytest.mark.parametrize(
    "arguments", [{"every": 0}, {"every": 600}, {"false_alarms": 0.0}, {"false_alarms": 0.2}]
)
def test_settings_that_mean_nothing_are_refused(arguments: dict[str, float]):
    with pytest.raises(ValueError, match="every="):
        Selection(**arguments)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=90))
def test_the_evidence_is_of_the_last_window_of_visits(visits: list[tuple[int, bool]]):
    selection = Selection(window=40, every=1)
    for length, lost in visits:
        selection.add(float(length), "stale" if lost else "")
    last = visits[-40:]
    expected = weigh(
        np.array([float(each) for each, _ in last]), np.array([lost for _, lost in last]), LOGS
    )
    assert selection.evidence == expected


def test_an_alarm_begins_below_its_level_and_ends_only_when_calm():
    selection = Selection(window=64, every=8)
    seen: list[bool] = []
    for _ in range(8):  # a quarter long, all of them lost
        for length in (1, 1, 1, 9, 1, 1, 1, 9):
            selection.add(length, "stale" if length == 9 else "")
        seen.append(selection.alarming)
    # level 1e-3 * 8 / 64 = 1.25e-4; two long of 8 lost: p = 1/28; 4 of 16: 1/1820; 6 of 24: 7e-6
    assert seen == [False, False, True, True, True, True, True, True]
    for _ in range(8):
        for length in (1, 1, 1, 9, 1, 1, 1, 9):
            selection.add(length, "")
        seen.append(selection.alarming)
    assert seen[-1] is False
    assert seen[8] is True  # old losses are still in the window


def test_blind_give_ups_raise_no_more_alarms_than_stated():
    """With alarms at a level of 5 % a window instead of 0.1 %, so that there are some to count."""
    rng = random.Random(0)
    windows, raised = 600, 0
    selection = Selection(window=128, every=16, false_alarms=0.049)
    for _ in range(windows * 128):
        before = selection.alarming
        selection.add(rng.lognormvariate(0, 1), "stale" if rng.random() < 0.3 else "")
        raised += selection.alarming and not before
    # at most 0.049 * 600 = 29.4 expected, 5.4 of standard deviation if independent; 4 of those
    assert 0 < raised <= 51
