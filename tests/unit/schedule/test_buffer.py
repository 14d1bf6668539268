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

    def peek(self) -> int | None:
        for index in self.items:
            if self.window is None or index < self.first + self.window:
                return index
        return None

    def pop(self) -> int | None:
        index = self.peek()
        if index is not None:
            self.skip(index)
        return index

    def withdraw(self, index: int) -> None:
        self.items.remove(index)

    def skip(self, index: int) -> None:
        if index in self.items:
            self.items.remove(index)
        self.gone.add(index)
        while self.first in self.gone:
            self.first += 1


@given(
    st.permutations(range(4, 20)),
    st.sets(st.integers(5, 12), max_size=4),
    st.one_of(st.none(), st.integers(1, 9)),
    st.lists(
        st.tuples(
            st.sampled_from(["put"] * 6 + ["pop", "withdraw", "withdraw", "skip"]),
            st.integers(0, 99),
        ),
        max_size=60,
    ),
)
def test_the_buffer_equals_its_scanning_twin(
    order: list[int], ahead: set[int], window: int | None, moves: list[tuple[str, int]]
):
    """Put, pop, withdraw (to be put again later) and skip, with or without an item."""
    buffer: WindowedBuffer[str] = WindowedBuffer(window, 4, ahead)
    twin = ScanningBuffer(window, 4, sorted(ahead))
    playing = [index for index in order if index not in ahead]
    for move, number in moves:
        if move == "put" and playing:
            index = playing.pop()
            buffer.put(index, f"item {index}")
            twin.items.append(index)
        elif move == "pop":
            popped = buffer.pop()
            assert (popped and popped[0]) == twin.pop()
        elif move == "withdraw" and twin.items:
            index = twin.items[number % len(twin.items)]
            assert buffer.withdraw(index) == f"item {index}"
            twin.withdraw(index)
            playing.insert(number % (len(playing) + 1), index)
        elif move == "skip" and (left := sorted({*twin.items, *playing})):
            index = left[number % len(left)]
            buffer.skip(index)
            twin.skip(index)
            playing = [each for each in playing if each != index]
        head = buffer.peek()
        assert head == (None if twin.peek() is None else (twin.peek(), f"item {twin.peek()}"))
        assert buffer.first == twin.first
        assert buffer.ahead == tuple(sorted(i for i in twin.gone if i > twin.first))
        assert len(buffer) == len(twin.items)
        assert all(buffer.item(index) == f"item {index}" for index in twin.items)


def test_looking_at_the_next_item_does_not_take_it():
    buffer: WindowedBuffer[str] = WindowedBuffer(2)
    assert buffer.peek() is None
    buffer.put(1, "b")
    assert [buffer.peek(), buffer.peek(), buffer.pop()] == [(1, "b")] * 3
    assert buffer.item(1) is None


def test_a_withdrawn_item_is_as_if_never_put():
    buffer: WindowedBuffer[str] = WindowedBuffer(1)
    buffer.put(0, "old")
    buffer.put(1, "b")
    assert buffer.withdraw(0) == "old"
    assert buffer.pop() is None  # 1 waits for 0, which is still to come
    buffer.put(0, "new")
    assert [buffer.pop(), buffer.pop()] == [(0, "new"), (1, "b")]


def test_a_withdrawn_item_goes_to_the_end_of_the_line():
    buffer: WindowedBuffer[str] = WindowedBuffer(None)
    for index in (0, 1, 2):
        buffer.put(index, "")
    buffer.withdraw(1)
    buffer.put(1, "")
    assert drain(buffer) == [0, 2, 1]


def test_an_item_beyond_the_window_can_be_withdrawn_too():
    buffer: WindowedBuffer[str] = WindowedBuffer(1)
    buffer.put(1, "old")
    buffer.withdraw(1)
    buffer.put(0, "a")
    buffer.put(1, "new")
    assert [buffer.pop(), buffer.pop()] == [(0, "a"), (1, "new")]


def test_an_item_withdrawn_beyond_the_window_loses_its_place_in_line():
    buffer: WindowedBuffer[str] = WindowedBuffer(2)
    buffer.put(1, "")
    buffer.put(2, "")  # beyond
    buffer.withdraw(2)
    buffer.put(0, "")
    assert [buffer.pop(), buffer.pop()] == [(1, ""), (0, "")]  # the window is 2 and 3 now
    buffer.put(3, "")
    buffer.put(2, "")
    assert drain(buffer) == [3, 2]


def test_a_skipped_index_holds_nobody_up():
    buffer: WindowedBuffer[str] = WindowedBuffer(1)
    buffer.put(1, "b")
    buffer.put(2, "c")
    buffer.skip(0)  # without an item
    assert buffer.peek() == (1, "b")
    buffer.skip(1)  # with one
    assert drain(buffer) == [2]
    assert (buffer.first, buffer.ahead) == (3, ())


@pytest.mark.parametrize("again", [0, 2])
def test_what_has_left_cannot_leave_or_come_again(again: int):
    buffer: WindowedBuffer[str] = WindowedBuffer(None)
    buffer.skip(0)
    buffer.skip(2)
    with pytest.raises(ValueError, match=f"item {again} left twice"):
        buffer.skip(again)
    with pytest.raises(ValueError, match=f"item {again} was handed in twice"):
        buffer.put(again, "")
