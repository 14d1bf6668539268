"""Parts of a model's forward pass as Triton kernels: the GPU's ``numerics.exact.Kernels``.

Matrix libraries choose tiles, and into how many parts a sum is split, by the number of rows. Here
both are constants. A tile's rows do not meet, what lies outside of it is 0, and a sum runs over
blocks of its inputs in order: so a row's result has the same bits among any others.

Letters: T tokens, N rows, K inputs, M outputs, V vocabulary, H query heads, G key/value heads, E
head size, S tokens a page.
"""

# Triton's language has no types.
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lagzero.numerics.exact import Kernels, Places

ROWS, OUTPUTS, INPUTS = 64, 64, 32  # of a product's tile
QUERIES = 16  # of attention's tile: the least that a GPU multiplies at once
KEYS = 64  # that are weighed together; blocks begin at multiples of it
TOKENS = 1024  # of the vocabulary, summed side by side


@triton.jit(do_not_specialize=("num",))  # one program for all numbers of rows
def _multiply(
    x, w, b, y, num, outputs, inputs, BIASED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        across, down = start + tl.arange(0, INPUTS)[None, :], start + tl.arange(0, INPUTS)[:, None]
        left = tl.load(x + row * inputs + across, (row < num) & (across < inputs), 0.0)
        right = tl.load(w + column * inputs + down, (column < outputs) & (down < inputs), 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIASED:
        total += tl.load(b + column, column < outputs, 0.0).to(tl.float32)
    inside = (row < num) & (column < outputs)
    tl.store(y + row * outputs + column, total.to(y.dtype.element_ty), inside)


def multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool = False
) -> torch.Tensor:
    """Return inputs W^T + bias, [..., M], from inputs [..., K], weight [M, K] and bias [M].

    Sums are float32. With ``wide`` so is the result; else it is rounded to the type of the inputs.
    """
    rows, weight = inputs.reshape(-1, inputs.shape[-1]).contiguous(), weight.contiguous()
    num, outputs = len(rows), len(weight)
    out = rows.new_empty(num, outputs, dtype=torch.float32 if wide else inputs.dtype)
    biased = bias is not None
    grid = triton.cdiv(num, ROWS), triton.cdiv(outputs, OUTPUTS)
    _multiply[grid](
        rows, weight, bias.contiguous() if biased else weight, out,
        num, outputs, rows.shape[1], biased, ROWS, OUTPUTS, INPUTS,
    )  # fmt: skip
    return out.view(*inputs.shape[:-1], outputs)


@triton.jit
def _normalise(x, w, y, size, eps, WIDTH: tl.constexpr):
    lane = tl.arange(0, WIDTH)
    place = tl.program_id(0).to(tl.int64) * size + lane
    each = tl.load(x + place, lane < size, 0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(each * each, 0) / size + eps)
    unit = (each * factor).to(y.dtype.element_ty).to(tl.float32)
    weight = tl.load(w + lane, lane < size, 0.0).to(tl.float32)
    tl.store(y + place, (weight * unit).to(y.dtype.element_ty), lane < size)


def normalise(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) of each row x, [..., K]."""
    rows = inputs.contiguous()
    out, size = torch.empty_like(rows), rows.shape[-1]
    grid = (rows.numel() // size,)
    _normalise[grid](rows, weight.contiguous(), out, size, eps, triton.next_power_of_2(size))
    return out


@triton.jit(do_not_specialize=("width", "window"))
def _attend(
    query, keys, values, positions, sequences, tables, out, scale, window, width,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(positions + t)
    table = tables + tl.load(sequences + t) * width
    head, lane = tl.arange(0, QUERIES)[:, None], tl.arange(0, LANES)[None, :]
    inside = (head < HEADS // GROUPS) & (lane < SIZE)
    place = (t * HEADS + group * (HEADS // GROUPS) + head) * SIZE + lane
    rows = tl.load(query + place, inside, 0.0)
    first = at * 0
    if window > 0:
        first = tl.maximum(at - window + 1, 0)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, LANES), tl.float32)
    for start in range(first // KEYS * KEYS, at + 1, KEYS):
        position = start + tl.arange(0, KEYS)
        seen = (position >= first) & (position <= at)
        page = tl.load(table + position // PAGE, seen, 0)
        slot = ((page * GROUPS + group) * PAGE + position % PAGE)[:, None] * SIZE + lane
        real = seen[:, None] & (lane < SIZE)
        key = tl.load(keys + slot, real, 0.0)
        scores = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        shares, shrink = tl.exp(scores - highest[:, None]), tl.exp(most - highest)
        value = tl.load(values + slot, real, 0.0)
        added = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        result = result * shrink[:, None] + added
        total = total * shrink + tl.sum(shares, 1)
        most = highest
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), inside)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: Places,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return softmax(scale query key^T) value, [T, H, E], of query [T, H, E].

    key, value [P, G, S, E] are pages of S tokens. With a window w a token sees the last w
    positions, its own included. Blocks of keys are added up in order, with the softmax rescaled as
    its largest score grows: Milakov and Gimelshein 2018, arXiv 1805.02867.
    """
    num, heads, size = query.shape
    groups, page = key.shape[1:3]
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(query)
    queries, lanes = (max(QUERIES, triton.next_power_of_2(n)) for n in (heads // groups, size))
    _attend[num, groups](
        query, key, value, places.positions, places.sequences, places.tables, out,
        scale, window or 0, places.tables.shape[1],
        heads, groups, size, page, lanes, queries, KEYS,
    )  # fmt: skip
    return out


@triton.jit
def _score(
    logits, targets, logprobs, entropies, normalisers, temperature, size, TOKENS: tl.constexpr
):
    n, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    row = logits + n * size
    most = tl.full((TOKENS,), float("-inf"), tl.float32)
    for start in range(0, size, TOKENS):
        each = tl.load(row + start + lane, start + lane < size, float("-inf"))
        most = tl.maximum(most, each)
    top = tl.max(most, 0)
    total, moment = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for start in range(0, size, TOKENS):
        below = tl.load(row + start + lane, start + lane < size, float("-inf")) - top
        weight = tl.exp(below / temperature)
        total += weight
        moment += tl.where(weight == 0, 0.0, weight * below)  # -inf times 0 is NaN
    whole = tl.sum(total, 0)
    chosen = tl.load(row + tl.load(targets + n)) - top
    logprob = chosen / temperature - tl.log(whole)
    tl.store(logprobs + n, tl.where(logprob > 0, 0.0, logprob))
    tl.store(entropies + n, tl.log(whole) - tl.sum(moment, 0) / (whole * temperature))
    tl.store(normalisers + n, top / temperature + tl.log(whole))


def score(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies [N] in nats of softmax(logits / temperature), and normalisers.

    logits [N, V] float32, targets [N] int64. A normaliser is logsumexp(logits / temperature). NaN
    where logits are no numbers.
    """
    logits, targets = logits.contiguous(), targets.contiguous()
    results: list[Any] = [logits.new_empty(len(logits)) for _ in range(3)]
    _score[(len(logits),)](logits, targets, *results, temperature, logits.shape[1], TOKENS)
    return results[0], results[1], results[2]


KERNELS = Kernels(multiply, normalise, attend, score)
