from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.schedule.buffer import WindowedBuffer


def drain(buffer: WindowedBuffer[str]) -> list[int]:
    out: list[int] = []
    while (taken := buffer.pop()) is not None:
        out.append(taken[0])
    return out


def test_a_window_of_one_hands_over_in_start_order():
    buffer: WindowedBuffer[str] = WindowedBuffer(1)
    buffer.put(1, "b")
    buffer.put(2, "c")
    assert buffer.pop() is None
    buffer.put(0, "a")
    assert [buffer.pop(), buffer.pop(), buffer.pop()] == [(0, "a"), (1, "b"), (2, "c")]
    assert buffer.pop() is None
    assert (buffer.first, buffer.ahead, len(buffer)) == (3, (), 0)


def test_no_window_hands_over_what_finished_first():
    buffer: WindowedBuffer[str] = WindowedBuffer(None)
    for index in (5, 0, 9):
        buffer.put(index, "")
    assert drain(buffer) == [5, 0, 9]
    assert (buffer.first, buffer.ahead) == (1, (5, 9))


def test_a_window_lets_only_near_ones_overtake():
    buffer: WindowedBuffer[str] = WindowedBuffer(3)
    for index in (3, 2, 1):
        buffer.put(index, "")
    assert drain(buffer) == [2, 1]  # 3 waits for 0, which is three before it
    buffer.put(0, "")
    assert drain(buffer) == [0, 3]


def test_the_window_moves_only_with_the_oldest_that_has_not_left():
    buffer: WindowedBuffer[str] = WindowedBuffer(2)
    buffer.put(1, "")
    assert drain(buffer) == [1]
    buffer.put(2, "")
    assert buffer.pop() is None  # 0 is still out
    buffer.put(0, "")
    assert drain(buffer) == [0, 2]


@pytest.mark.parametrize("again", [0, 1, 2])
def test_an_index_handed_in_twice_is_refused(again: int):
    buffer: WindowedBuffer[str] = WindowedBuffer(2)
    buffer.put(0, "")
    buffer.put(1, "")
    buffer.pop()  # 0 has left, 1 is held
    buffer.put(2, "")
    with pytest.raises(ValueError, match=f"item {again} was handed in twice"):
        buffer.put(again, "")


def test_a_resumed_buffer_knows_what_has_left():
    buffer: WindowedBuffer[str] = WindowedBuffer(None, first=4, ahead=[6])
    with pytest.raises(ValueError, match="item 6"):
        buffer.put(6, "")
    with pytest.raises(ValueError, match="item 3"):
        buffer.put(3, "")
    buffer.put(5, "")
    buffer.put(4, "")
    assert drain(buffer) == [5, 4]
    assert (buffer.first, buffer.ahead) == (7, ())


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window: int):
    with pytest.raises(ValueError, match="at least 1"):
        WindowedBuffer(window)


@given(st.permutations(range(12)), st.one_of(st.none(), st.integers(1, 14)), st.data())
def test_every_item_leaves_once_and_within_the_window(
    order: list[int], window: int | None, data: st.DataObject
):
    buffer: WindowedBuffer[str] = WindowedBuffer(window)
    left: list[int] = []

    def take() -> None:
        first = buffer.first
        taken = buffer.pop()
        if taken is not None:
            assert window is None or taken[0] < first + window
            left.append(taken[0])
        missing = set(range(13)) - set(left)
        assert buffer.first == min(missing)
        assert set(buffer.ahead) == {i for i in left if i > buffer.first}

    for index in order:
        buffer.put(index, str(index))
        if data.draw(st.booleans()):
            take()
    while len(buffer):
        take()
    assert sorted(left) == list(range(12))
    if window == 1:
        assert left == sorted(left)


class ScanningBuffer:
    """The slow twin: looks through all that is held, in finishing order."""

    def __init__(self, window: int | None, first: int, ahead: list[int]):
        self.window, self.first, self.gone = window, first, set(ahead)
        self.items: list[int] = []

    def pop(self) -> int | None:
        for index in self.items:
            if self.window is None or index < self.first + self.window:
                self.items.remove(index)
                self.gone.add(index)
                while self.first in self.gone:
                    self.first += 1
                return index
        return None


@given(
    st.permutations(range(4, 20)),
    st.sets(st.integers(5, 12), max_size=4),
    st.one_of(st.none(), st.integers(1, 9)),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_the_buffer_equals_its_scanning_twin(
    order: list[int], ahead: set[int], window: int | None, takes: list[bool]
):
    buffer: WindowedBuffer[str] = WindowedBuffer(window, 4, ahead)
    twin = ScanningBuffer(window, 4, sorted(ahead))
    waiting = [index for index in order if index not in ahead]
    for take in takes:
        if take or not waiting:
            popped = buffer.pop()
            assert (popped and popped[0]) == twin.pop()
            assert buffer.first == twin.first
        else:
            index = waiting.pop()
            buffer.put(index, "")
            twin.items.append(index)
