"""Draw tokens, one uniform number a token, and report the log-prob of what was drawn.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lagzero.engine.request import Sampling
from lagzero.errors import LagzeroError
from lagzero.native.sampling import draw
from lagzero.numerics.exact import ExactNumerics

_BLOCK = 256  # tokens of the vocabulary that are summed before the search


class NonFiniteLogits(LagzeroError, FloatingPointError):
    """The model's next-token scores hold NaN or infinity, so there is nothing to draw from."""


def uniforms(seeds: npt.NDArray[Any], counters: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, counter): SplitMix64's output at that counter.

    A token's number depends on its sequence's seed and its place alone, so neither the batch, nor
    preemption, nor the number of engines changes what is drawn. Source: Steele, Lea and Flood 2014,
    "Fast splittable pseudorandom number generators".
    """
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return for each row [B] the first token whose cumulative probability exceeds ``uniform``.

    ``probs`` is [B, V] fp32, ``uniform`` [B] float64. Sums over blocks of the vocabulary are
    searched first, then one block, both in float64: a running fp32 sum over all of V would round
    away the rarest tokens. A token of probability 0 is never returned.
    """
    rows, size = probs.shape
    num_blocks = -(-size // _BLOCK)
    if num_blocks * _BLOCK != size:
        probs = F.pad(probs, (0, num_blocks * _BLOCK - size))
    blocks = probs.view(rows, num_blocks, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    point = uniform.unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp_(max=num_blocks - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    inner = within.double().cumsum(-1)
    # Rounding may leave the point at or past the block's end: take its last possible token then.
    place = torch.searchsorted(inner, point - before, right=True)
    last = (within > 0).long().mul(torch.arange(1, _BLOCK + 1, device=probs.device))
    place = torch.minimum(place, last.amax(-1, keepdim=True) - 1)
    return (block * _BLOCK + place).squeeze(1)


def truncate(logits: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Return logits [B, V] with every token that a row's truncation excludes set to -inf."""
    device = logits.device
    top_k = torch.tensor([s.top_k or logits.shape[1] for s in sampling], device=device)
    top_p = torch.tensor([s.top_p for s in sampling], device=device, dtype=torch.float64)
    min_p = torch.tensor([s.min_p for s in sampling], device=device)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=device)
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), -torch.inf)
    probs = ordered.softmax(-1)
    # A token is kept while the mass before it is below top_p, so the one that crosses it is in.
    mass_before = probs.double().cumsum(-1) - probs.double()
    drop = (mass_before >= top_p.unsqueeze(1) - 1e-6) & (top_p.unsqueeze(1) < 1)
    drop[:, 0] = False
    drop |= probs < min_p.unsqueeze(1) * probs[:, :1]
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def sample(
    logits: torch.Tensor,
    sampling: Sequence[Sampling],
    uniform: npt.NDArray[np.float64],
    exact: ExactNumerics | None = None,
    native: bool = False,
) -> tuple[list[int], list[float]]:
    """Draw one token a row from logits [B, V] and return (ids [B], log-probs [B] in nats).

    With ``exact`` the log-probs are those of exact training: by its kernels, or without any by
    ``torch.log_softmax``. With ``native`` rows without truncation are drawn by the C library.

    Raises NonFiniteLogits when a row's logits hold NaN or +inf, or nothing but -inf.
    """
    if native:
        return _sample_natively(logits, sampling, uniform)
    temperature = torch.tensor([s.temperature or 1.0 for s in sampling], device=logits.device)
    given = logits = logits.float()
    if bool((temperature != 1).any()):
        logits = logits / temperature.unsqueeze(1)
    cut = [row for row, s in enumerate(sampling) if s.truncates and s.temperature > 0]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        logits = logits.clone()
        logits[rows] = truncate(logits[rows], [sampling[row] for row in cut])
    greedy = torch.tensor([s.temperature == 0 for s in sampling], device=logits.device)
    likeliest = logits.argmax(-1) if bool(greedy.any()) else None
    if exact is not None:
        # Normalised already, so that what is below sees a normaliser of 0; NaN where there is none.
        logits = logits.log_softmax(-1)
        log_norm = torch.where(logits.amax(-1).isfinite(), 0.0, torch.nan)
    else:
        log_norm = logits.logsumexp(-1)
    finite = torch.isfinite(log_norm)
    if not bool(finite.all()):
        raise _non_finite(int(finite.long().argmin()), len(sampling))
    if likeliest is not None and bool(greedy.all()):
        ids = likeliest
    else:
        probs = (logits - log_norm.unsqueeze(1)).exp_()
        ids = inverse_cdf(probs, torch.as_tensor(uniform).to(logits.device))
        if likeliest is not None:
            ids = torch.where(greedy, likeliest, ids)
    logprobs = logits.gather(1, ids.unsqueeze(1)).squeeze(1) - log_norm
    if exact is not None and exact.kernels is not None:
        # Rows that are cut stay: nobody trains on them.
        whole = [n for n in range(len(sampling)) if n not in cut]
        for each in {sampling[n].temperature for n in whole}:
            some = [n for n in whole if sampling[n].temperature == each]
            rows = torch.tensor(some, dtype=torch.long, device=logits.device)
            logprobs[rows] = exact.kernels.score(given[rows], ids[rows], each or 1.0)[0]
    drawn: tuple[Any, Any] = (ids.cpu().numpy(), logprobs.clamp_(max=0).cpu().numpy())
    return drawn[0].tolist(), drawn[1].tolist()


def _sample_natively(
    logits: torch.Tensor, sampling: Sequence[Sampling], uniform: npt.NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """Draw rows without truncation in C, the others as ever: no row depends on its neighbours."""
    cut = [row for row, s in enumerate(sampling) if s.truncates and s.temperature > 0]
    ids, logprobs = draw(logits, [s.temperature for s in sampling], uniform)
    if (ids < 0).any():
        raise _non_finite(int(ids.argmin()), len(sampling))
    found, scored = ids.tolist(), logprobs.tolist()
    if cut:
        some = sample(logits[torch.tensor(cut)], [sampling[row] for row in cut], uniform[cut])
        for row, token, logprob in zip(cut, *some, strict=True):
            found[row], scored[row] = token, logprob
    return found, scored


def _non_finite(row: int, num: int) -> NonFiniteLogits:
    return NonFiniteLogits(
        f"the model returned non-finite logits for row {row} of {num}: its weights hold NaN, or "
        "have grown until they overflow. If this happens before the first step, load another model "
        "or set model.dtype and engine.dtype to float32; if later, lower train.optimizer.lr and "
        "resume from an earlier checkpoint"
    )
