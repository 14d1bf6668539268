"""The page allocator of the KV cache: reference counts, copy on write, and the prefix cache.

Pure bookkeeping on ints; the tensors are in ``attention.py``. A page holds ``page_size`` tokens of
every layer. Pages that nobody references but whose content is known stay findable by content
until the space is needed (least recently used first).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from lagzero.errors import LagzeroError


class OutOfPages(LagzeroError):
    """The pool has no page to give; the scheduler preempts something, if anything else runs."""

    def __init__(self) -> None:
        super().__init__(
            "the KV cache has no page left for the only sequence that runs; raise "
            "engine.kv_cache_tokens or lower rollout.max_new_tokens"
        )


def chain_hash(version: int, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name a full page by what its content depends on: version, all tokens before, its own."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(version.to_bytes(8, "little", signed=True))
    digest.update(b"".join(t.to_bytes(4, "little") for t in token_ids))
    return digest.digest()


class PagePool:
    """``num_pages`` pages with reference counts and a content index."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens")
        self.page_size = page_size
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        # Given out last in, first out: memory of the cache that was never touched stays so.
        self._free = list(range(num_pages))[::-1]
        self.num_begun = 0  # the first pages, of which all others were never given out
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced, content known; LRU first

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that some sequence references."""
        return self.num_pages - self.num_available

    def allocate(self) -> int:
        """Return a page with one reference. Raises OutOfPages."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            raise OutOfPages
        self._refs[page] = 1
        self.num_begun = max(self.num_begun, page + 1)
        return page

    def share(self, page: int) -> int:
        """Add a reference to a page and return it."""
        if self._refs[page] == 0:
            del self._idle[page]
        self._refs[page] += 1
        return page

    def release(self, page: int) -> None:
        """Drop one reference; the page becomes reusable when none is left."""
        assert self._refs[page] > 0, f"page {page} released more often than taken"
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether writing to the page would be seen by another holder."""
        return self._refs[page] > 1

    def remember(self, page: int, name: bytes) -> None:
        """Make a full, finished page findable by its ``chain_hash``. The first holder wins."""
        if name not in self._by_hash and page not in self._hash_of:
            self._by_hash[name] = page
            self._hash_of[page] = name

    def find(self, name: bytes) -> int | None:
        """Return the page with that content, without taking a reference."""
        return self._by_hash.get(name)

    def forget(self, page: int) -> None:
        """Make a page that someone holds unfindable: another will be written into it."""
        if page in self._hash_of:
            self._forget(page)

    def forget_all(self) -> None:
        """Drop the content index (the weights changed); referenced pages stay valid."""
        for page in list(self._hash_of):
            self._forget(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def begin_again(self) -> None:
        """Drop all content and hand pages out as at first. No page may have a reference."""
        assert not any(self._refs), "pages are referenced"
        self.forget_all()
        self._free.sort(reverse=True)
        self.num_begun = 0

    def _forget(self, page: int) -> None:
        self._by_hash.pop(self._hash_of.pop(page), None)

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that counts equal the references in ``tables`` and that no page is lost."""
        counts = [0] * self.num_pages
        for table in tables:
            for page in table:
                counts[page] += 1
        assert counts == self._refs, "reference counts differ from the block tables"
        unused = sorted([*self._free, *self._idle])
        assert unused == [p for p, n in enumerate(counts) if n == 0], "pages lost or doubled"
        assert {p: h for h, p in self._by_hash.items()} == self._hash_of, "content index differs"
