from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.schedule.admission import Admission


def start_all(admission: Admission) -> int:
    started = 0
    while admission.may_start():
        admission.started += 1
        started += 1
    return started


def test_without_lag_one_steps_groups_start_at_a_time():
    admission = Admission(4, 0)
    assert start_all(admission) == 4
    admission.published = 1
    assert start_all(admission) == 4


def test_lag_adds_that_many_steps_of_groups_once():
    admission = Admission(4, 2)
    assert start_all(admission) == 12
    admission.published = 1
    assert start_all(admission) == 4


def test_dropped_groups_are_replaced():
    admission = Admission(4, 0)
    start_all(admission)
    admission.dropped += 3
    assert start_all(admission) == 3


def test_a_resumed_count_goes_on_from_the_published_version():
    assert start_all(Admission(4, 0, published=7)) == 4
    assert start_all(Admission(4, 1, published=7)) == 8


@pytest.mark.parametrize("arguments", [(0, 0, 0), (4, -1, 0), (4, 0, -1)])
def test_counts_that_mean_nothing_are_refused(arguments: tuple[int, int, int]):
    with pytest.raises(ValueError, match="groups_per_step="):
        Admission(*arguments)


@given(
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 9),
    st.lists(st.sampled_from(["start", "learn", "drop"]), max_size=80),
)
def test_no_group_is_ever_trained_later_than_the_lag_allows(
    size: int, max_lag: int, published: int, actions: list[str]
):
    """Consumed in start order, a group is ``max_lag`` versions old at most; and unless enough
    groups for a step are under way, another one may always start."""
    admission = Admission(size, max_lag, published)
    under_way: list[int] = []  # version at the start of each
    for action in actions:
        if action == "start":
            if admission.may_start():
                admission.started += 1
                under_way.append(admission.published)
        elif len(under_way) >= size:
            step, under_way = under_way[:size], under_way[size:]
            assert all(admission.published - version <= max_lag for version in step)
            if action == "learn":
                admission.published += 1
            else:
                admission.dropped += size
        assert len(under_way) <= (max_lag + 1) * size
        assert admission.may_start() or len(under_way) >= size


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 7))
def test_extra_groups_start_beyond_need_and_no_more(batch: int, max_lag: int, extra: int):
    admission = Admission(batch, max_lag, extra_groups=extra)
    assert start_all(admission) == (max_lag + 1) * batch + extra
    admission.published += 1
    assert start_all(admission) == batch  # what is carried is not started again


def test_a_negative_number_of_extra_groups_is_refused():
    with pytest.raises(ValueError, match="extra_groups=-1"):
        Admission(1, 0, extra_groups=-1)
