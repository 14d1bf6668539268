"""The prompts in the order in which they are visited."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from lagzero.data.rows import Row
from lagzero.types import Array, Prompt


def epoch_order(num_prompts: int, seed: int, epoch: int) -> Array:
    """Return epoch ``epoch``'s permutation of 0..num_prompts-1, int64 [num_prompts].

    It depends on the arguments alone, so that a resumed run goes on with the same order.
    """
    # A generator's seed must not be negative; the mask keeps different seeds different.
    return np.random.default_rng([seed & (2**64 - 1), epoch]).permutation(num_prompts)


class Prompts:
    """Rows and their tokens as a ``PromptSource``: a pure function of the visit index.

    With n prompts, visit i is number ``i mod n`` of epoch ``i // n``; each epoch visits each prompt
    once, in an order of its own when shuffled.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        token_ids: Sequence[Array],
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ):
        """Take rows [n] and each one's token ids, int32 [T]; ``epochs`` None never ends.

        Raises ValueError when the two differ in length or two rows share an id.
        """
        if len(rows) != len(token_ids):
            raise ValueError(f"{len(rows)} rows and {len(token_ids)} token arrays")
        if len({row.id for row in rows}) != len(rows):
            raise ValueError("two rows share an id")
        self._rows = tuple(rows)
        self._token_ids = tuple(token_ids)
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._order = (0, self._make_order(0))  # the epoch last asked for; only saves time

    def __len__(self) -> int:
        """Number of prompts, which is the number of visits in one epoch."""
        return len(self._rows)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in the order of the sources, before any shuffle."""
        return tuple(row.id for row in self._rows)

    def at(self, index: int) -> Prompt | None:
        """Return the prompt of visit ``index`` (from 0), or None past the last visit.

        Raises ValueError when ``index`` is negative.
        """
        if index < 0:
            raise ValueError(f"a visit index counts from 0, got {index}")
        if not self._rows:
            return None
        epoch, place = divmod(index, len(self))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        held, order = self._order
        if held != epoch:
            order = self._make_order(epoch)
            self._order = (epoch, order)
        return self._prompt(int(order[place]))

    def in_source_order(self) -> Iterable[Prompt]:
        """Yield each prompt once, in the order of the sources."""
        return (self._prompt(row) for row in range(len(self)))

    def without(self, ids: Collection[str]) -> Prompts:
        """Return these prompts less those with the given ids, in the same order and settings.

        Raises ValueError for an id that is not here.
        """
        unknown = set(ids).difference(self.ids)
        if unknown:
            raise ValueError(f"no prompt has the id {sorted(unknown)[0]!r}")
        kept = [at for at, row in enumerate(self._rows) if row.id not in ids]
        return Prompts(
            [self._rows[at] for at in kept],
            [self._token_ids[at] for at in kept],
            seed=self._seed,
            shuffle=self._shuffle,
            epochs=self._epochs,
        )

    def _make_order(self, epoch: int) -> Array:
        if self._shuffle:
            return epoch_order(len(self._rows), self._seed, epoch)
        return np.arange(len(self._rows))

    def _prompt(self, at: int) -> Prompt:
        row = self._rows[at]
        return Prompt(row.id, tuple(self._token_ids[at].tolist()), row.content, row.columns)
