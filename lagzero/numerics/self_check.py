"""Finds, in a second or two, which shapes of matrix product are exact on this machine.

A product is exact when a row of the result is the same, bit for bit, whatever the other rows are,
wherever it stands among them and however many there are. No library promises it; most keep it from
some number of rows on. Thread counts are part of the question where sampler and trainer differ.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch

from lagzero.errors import LagzeroError
from lagzero.numerics.exact import BLOCK, Product, Products, Shape
from lagzero.numerics.precision import has_fast_bfloat16

_COUNTS = (16, 32, 48, 64, 96, 128, 192, 256, 512)
_QUERY_COUNTS = (4, 8, 16, 32, 64, 128, 256)
_MATRICES = (1, 3, 32)  # batch sizes of attention's products that are tried
_BUDGET = 1 << 34  # operations that the check of one shape may take
_DISTINCT = 1024  # outputs of a random weight; wider ones repeat them

RowsProduct = Callable[[torch.Tensor], torch.Tensor]
"""Rows [n, K] to rows [n, M], in one call of the library."""


def check_products(shapes: Iterable[Shape], thread_counts: Sequence[int]) -> Products:
    """Return how each shape is multiplied exactly. Raises LagzeroError when one cannot be."""
    return {shape: check_product(shape, thread_counts) for shape in shapes}


def check_product(shape: Shape, thread_counts: Sequence[int]) -> Product:
    """Return how one shape is multiplied exactly under every one of the thread counts.

    A type without products of its own on this machine is multiplied in float32 from the start, and
    so is one whose products are not exact. Raises LagzeroError when neither is.
    """
    small = shape.dtype != torch.float32
    ways = [True] if small and not _multiplies(shape.dtype) else [False, *([True] if small else [])]
    for widen in ways:
        counts = exact_counts(*_trial(shape, widen), _affordable(shape), thread_counts)
        if counts:
            return Product(counts, widen)
    threads = " and ".join(str(count) for count in thread_counts)
    raise LagzeroError(
        f"model.numerics: exact cannot be kept on this machine: products of {shape.inputs} inputs "
        f"with {shape.outputs} outputs in {str(shape.dtype).removeprefix('torch.')} depend on the "
        f"number of rows or on their place at every count tried ({_COUNTS[0]} to "
        f"{_affordable(shape)[-1]} rows, {threads} threads). Give trainer and engines the same "
        "number of threads (model.threads, placement.engine_threads), or set model.numerics: fast"
    )


def _multiplies(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_fast_bfloat16(torch.device("cpu"))


def _affordable(shape: Shape) -> tuple[int, ...]:
    counts = _COUNTS
    while len(counts) > 2:
        num_rows = sum(counts) + counts[-1] + 4 * counts[0]
        if 2 * shape.outputs * shape.inputs * num_rows <= _BUDGET:
            break
        counts = counts[:-1]
    return counts


def _trial(shape: Shape, widen: bool) -> tuple[RowsProduct, torch.Tensor]:
    """Return a product of the shape and rows to put in."""
    random = torch.Generator().manual_seed(11)
    dtype = torch.float32 if widen else shape.dtype
    distinct = torch.randn(min(shape.outputs, _DISTINCT), shape.inputs, generator=random).to(dtype)
    weight = distinct.repeat(-(-shape.outputs // len(distinct)), 1)[: shape.outputs]
    if shape.transposed:
        weight = weight.t().contiguous().t()
    rows = torch.randn(_affordable(shape)[-1], shape.inputs, generator=random).to(dtype)
    return (lambda some: torch.mm(some, weight.t())), rows


def exact_counts(
    product: RowsProduct, rows: torch.Tensor, counts: Sequence[int], thread_counts: Sequence[int]
) -> tuple[int, ...]:
    """Return those of ``counts`` that give the same rows in any place; () if none does.

    The smallest count at which a row's place does not matter is the standard; the others must give
    its rows. Under each further thread count so must all of them.
    """
    with torch.no_grad():
        for place, base in enumerate(counts):
            with _threads(thread_counts[0]):
                if not _ignores_place(product, rows, base):
                    continue
                whole = len(rows) // base * base
                standard = torch.cat([product(part) for part in rows[:whole].split(base)])
            agreeing = [
                count
                for count in counts[place:]
                if all(_gives(product, rows, count, standard, n) for n in thread_counts)
            ]
            if agreeing and agreeing[0] == base:
                return tuple(agreeing)
    return ()


def _ignores_place(product: RowsProduct, rows: torch.Tensor, count: int) -> bool:
    for row in rows[:4]:
        out = product(row.expand(count, -1).contiguous())
        if not torch.equal(out, out[:1].expand_as(out)):
            return False
    return True


def _gives(
    product: RowsProduct, rows: torch.Tensor, count: int, standard: torch.Tensor, threads: int
) -> bool:
    num = min(count, len(standard))
    with _threads(threads):
        return torch.equal(product(rows[:count])[:num], standard[:num])


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_attention(head_sizes: Iterable[int], thread_counts: Sequence[int]) -> tuple[int, ...]:
    """Return numbers of query rows with which both products of attention are exact.

    Raises LagzeroError when there are none.
    """
    found = set(_QUERY_COUNTS)
    for size in head_sizes:
        for inputs, outputs in ((size, BLOCK), (BLOCK, size), (size, 3 * BLOCK)):
            found &= set(_exact_queries(inputs, outputs, thread_counts))
    if not found:
        raise LagzeroError(
            "model.numerics: exact cannot be kept on this machine: the batched products of "
            f"attention depend on the number of queries at every count tried ({_QUERY_COUNTS[0]} "
            f"to {_QUERY_COUNTS[-1]}); set model.numerics: fast"
        )
    return tuple(sorted(found))


def _exact_queries(inputs: int, outputs: int, thread_counts: Sequence[int]) -> tuple[int, ...]:
    """Try batches of equal matrices; all must give the rows that one alone gives at first."""
    random = torch.Generator().manual_seed(12)
    weight = torch.randn(outputs, inputs, generator=random)
    queries = torch.randn(_QUERY_COUNTS[-1], inputs, generator=random)
    # The first columns of a wider product are those of the narrow one.
    narrow = torch.bmm(queries[None], weight[None, :BLOCK].transpose(1, 2))[0]
    found = set(_QUERY_COUNTS)
    for number in _MATRICES:
        matrices = weight.expand(number, -1, -1).contiguous().transpose(1, 2)

        def product(rows: torch.Tensor, matrices: torch.Tensor = matrices) -> torch.Tensor:
            out = torch.bmm(rows.expand(len(matrices), -1, -1).contiguous(), matrices)
            return out.transpose(0, 1)

        whole = product(queries)
        if not torch.equal(whole, whole[:, :1].expand_as(whole)):
            return ()
        if not torch.equal(whole[:, 0, :BLOCK], narrow):
            return ()
        found &= set(exact_counts(product, queries, _QUERY_COUNTS, thread_counts))
    # Counts agree within a batch size with their smallest; with the largest, between batch sizes.
    return tuple(sorted(found)) if _QUERY_COUNTS[-1] in found else ()
