"""The page allocator against a model of it, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lagzero.engine.blocks import OutOfPages, PagePool, chain_hash
from lagzero.errors import LagzeroError

NUM_PAGES = 5


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: who holds which page, and the idle named pages in the order of their release."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES, 4)
        self.tables: list[list[int]] = [[], [], []]
        self.names: dict[int, bytes] = {}
        self.idle: list[int] = []
        self.given: set[int] = set()

    def count(self, page: int) -> int:
        return sum(table.count(page) for table in self.tables)

    def free(self) -> int:
        return NUM_PAGES - len({p for t in self.tables for p in t})

    @rule(holder=st.integers(0, 2))
    def allocate(self, holder):
        unnamed = self.free() - len(self.idle)
        if self.free() == 0:
            with pytest.raises(OutOfPages):
                self.pool.allocate()
            return
        page = self.pool.allocate()
        assert self.count(page) == 0, "a page in use was handed out"
        if unnamed == 0:
            assert page == self.idle[0], "not the least recently used one"
            self.idle.remove(page)
            del self.names[page]
        else:
            assert page not in self.names, "cached content was lost although a page was free"
        self.tables[holder].append(page)
        self.given.add(page)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), holder=st.integers(0, 2))
    def share(self, data, holder):
        page = data.draw(st.sampled_from([p for t in self.tables for p in t]))
        assert self.pool.share(page) == page
        self.tables[holder].append(page)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def release(self, data):
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        page = table.pop(data.draw(st.integers(0, len(table) - 1)))
        self.pool.release(page)
        if self.count(page) == 0 and page in self.names:
            self.idle.append(page)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), text=st.integers(0, 3))
    def remember(self, data, text):
        page = data.draw(st.sampled_from([p for t in self.tables for p in t]))
        name = chain_hash(0, b"", [text])
        self.pool.remember(page, name)
        if name not in self.names.values() and page not in self.names:
            self.names[page] = name

    @rule(holder=st.integers(0, 2), text=st.integers(0, 3))
    def find(self, holder, text):
        name = chain_hash(0, b"", [text])
        page = self.pool.find(name)
        assert page == next((p for p, n in self.names.items() if n == name), None)
        if page is not None:
            self.pool.share(page)
            self.tables[holder].append(page)
            if page in self.idle:
                self.idle.remove(page)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def forget(self, data):
        page = data.draw(st.sampled_from([p for t in self.tables for p in t]))
        self.pool.forget(page)
        self.names.pop(page, None)

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.names.clear()
        self.idle.clear()

    @precondition(lambda self: not any(self.tables))
    @rule()
    def begin_again(self):
        self.pool.begin_again()
        self.names.clear()
        self.idle.clear()
        self.given.clear()

    @invariant()
    def agrees(self):
        self.pool.check_integrity(self.tables)
        assert self.pool.num_available == self.free()
        assert self.pool.num_used == NUM_PAGES - self.free()
        assert self.pool.num_begun == len(self.given) == max(self.given, default=-1) + 1
        for page in range(NUM_PAGES):
            assert self.pool.is_shared(page) == (self.count(page) > 1)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_an_empty_pool_raises_and_recovers():
    pool = PagePool(2, 4)
    pages = [pool.allocate(), pool.allocate()]
    with pytest.raises(OutOfPages, match=r"raise engine\.kv_cache_tokens") as raised:
        pool.allocate()
    assert isinstance(raised.value, LagzeroError)  # shown without a traceback
    pool.release(pages[0])
    assert pool.allocate() == pages[0]


def test_a_pool_in_use_does_not_begin_again():
    pool = PagePool(2, 4)
    page = pool.allocate()
    with pytest.raises(AssertionError, match="referenced"):
        pool.begin_again()
    pool.release(page)
    pool.begin_again()
    assert (pool.num_begun, pool.allocate()) == (0, page)


def test_releasing_twice_is_caught():
    pool = PagePool(2, 4)
    page = pool.allocate()
    pool.release(page)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(page)


def test_integrity_check_sees_a_lost_and_an_alien_reference():
    pool = PagePool(2, 4)
    page = pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([[page, page]])


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_a_pool_without_room_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match="pool"):
        PagePool(num_pages, page_size)


def test_page_names_depend_on_version_parent_ids_and_their_order():
    root = chain_hash(0, b"", [1, 2])
    names = {
        root,
        chain_hash(1, b"", [1, 2]),
        chain_hash(0, b"", [2, 1]),
        chain_hash(0, b"", [1, 3]),
        chain_hash(0, root, [1, 2]),
        chain_hash(-1, b"", [1, 2]),
        chain_hash(0, b"", [1, 2 + 256]),
    }
    assert len(names) == 7
    assert chain_hash(0, b"", [1, 2]) == root
