"""Requests go where the rule says, whatever comes, leaves, dies and returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.schedule.router import Repacking, Router


class SlowRouter:
    """The rules word for word, with a look at every engine each time."""

    def __init__(self, num_engines: int, policy: str):
        self.policy = policy
        self.loads = [0] * num_engines
        self.line = list(range(num_engines))

    def pick(self, wanted: int | None = None) -> int:
        if wanted in self.line:
            self.loads[wanted] += 1
            return wanted
        if self.policy == "round_robin":
            engine = self.line.pop(0)
            self.line.append(engine)
        else:
            engine = min(self.line, key=lambda number: (self.loads[number], number))
        self.loads[engine] += 1
        return engine

    def left(self, engine: int) -> None:
        self.loads[engine] -= 1

    def lost(self, engine: int) -> None:
        self.loads[engine] = 0
        self.line.remove(engine)

    def joined(self, engine: int) -> None:
        self.line.append(engine)


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
@given(
    num=st.integers(1, 5),
    moves=st.lists(st.tuples(st.sampled_from("ppllwjx"), st.integers(0, 4)), max_size=200),
)
def test_it_chooses_as_one_that_looks_at_every_engine(policy, num, moves):
    fast, slow = Router(num, policy), SlowRouter(num, policy)
    for move, at in moves:
        engine = at % num
        if move == "p" and slow.line:
            assert fast.pick() == slow.pick()
        elif move == "w" and slow.line:
            assert fast.pick(engine) == slow.pick(engine)
        elif move == "l" and slow.loads[engine]:
            fast.left(engine)
            slow.left(engine)
        elif move == "x" and engine in slow.line:
            fast.lost(engine)
            slow.lost(engine)
        elif move == "j" and engine not in slow.line:
            fast.joined(engine)
            slow.joined(engine)
        assert [fast.load(number) for number in range(num)] == slow.loads
        assert fast.num_live == len(slow.line)


def test_least_loaded_by_hand():
    router = Router(3)
    assert [router.pick() for _ in range(4)] == [0, 1, 2, 0]
    router.left(1)
    assert router.pick() == 1
    router.lost(1)
    assert [router.pick() for _ in range(3)] == [2, 0, 2]
    router.joined(1)  # empty, so it is the first choice until it has three as well
    assert [router.pick() for _ in range(4)] == [1, 1, 1, 0]


def test_round_robin_by_hand():
    router = Router(3, "round_robin")
    assert [router.pick() for _ in range(4)] == [0, 1, 2, 0]
    router.lost(2)
    assert [router.pick() for _ in range(3)] == [1, 0, 1]
    router.joined(2)
    assert [router.pick() for _ in range(3)] == [0, 1, 2]


def test_what_cannot_be_is_refused():
    router = Router(2)
    with pytest.raises(ValueError, match="engine 0 has no request"):
        router.left(0)
    with pytest.raises(ValueError, match="engine 1 is already there"):
        router.joined(1)
    router.lost(0)
    with pytest.raises(ValueError, match="engine 0 is already lost"):
        router.lost(0)
    router.lost(1)
    with pytest.raises(LookupError, match="every engine is lost"):
        router.pick()
    with pytest.raises(ValueError, match="at least one engine"):
        Router(0)


def test_outdated_loads_do_not_pile_up():
    router = Router(8)
    for _ in range(100_000):
        router.left(router.pick())
    assert len(router._heap) <= 4 * 8 + 17


# --- moving the last responses together ----------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "most", "loads", "moves"),
    [
        # the emptiest goes first, to the fullest
        (3, 8, {0: 2, 1: 5, 2: 1, 3: 4}, {2: 1, 0: 1}),
        # of equals, the one with the highest number goes, to the one with the lowest
        (3, 8, {0: 2, 1: 2, 2: 2}, {2: 0, 1: 0}),
        # the fullest has no room, the next has; an engine above the limit takes nothing
        (3, 6, {0: 5, 1: 2, 2: 4, 3: 9}, {1: 2}),
        # who has received stays, although it is still below
        (9, 9, {0: 2, 1: 3}, {0: 1}),
        # one alone stays, and so does everybody who has enough; idle engines are no targets
        (5, 8, {0: 4, 1: 0}, {}),
        (2, 8, {0: 2, 1: 3}, {}),
        (2, 8, {}, {}),
        # nobody has room
        (4, 4, {0: 3, 1: 3}, {}),
    ],
)
def test_who_takes_over_by_hand(below, most, loads, moves):
    assert Repacking(below, most).moves(loads) == moves


@given(
    below=st.integers(2, 9),
    most=st.integers(1, 12),
    loads=st.dictionaries(st.integers(0, 7), st.integers(0, 14)),
)
def test_moving_frees_engines_overfills_none_and_comes_to_an_end(below, most, loads):
    rule, waves = Repacking(below, most), 0
    while moves := rule.moves(loads):
        after = dict(loads)
        for source, target in moves.items():
            assert 0 < loads[source] < below
            assert loads[target] >= loads[source]
            assert target not in moves
            after[target] += after.pop(source)
        assert all(after[target] <= most for target in moves.values())
        assert sum(after.values()) == sum(loads.values())
        loads, waves = after, waves + 1
    assert waves < 8
    busy = sorted(load for load in loads.values() if load)
    assert not (len(busy) > 1 and busy[0] < below and busy[0] + busy[1] <= most)
