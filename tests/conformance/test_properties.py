"""What holds for the whole loss whatever the batch: drawn batches and configurations."""

from __future__ import annotations

import math
from typing import Any

import lagzero_side as side
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import objective

POLICIES = ("clip", "cispo", "band", "reinforce", "cross_entropy")
LEVELS = ("token", "sequence_product", "sequence_mean")
RANKS = st.integers(1, 3)
SLOW = settings(max_examples=60, deadline=None)


@st.composite
def configs(draw: st.DrawFn, policies: tuple[str, ...] = POLICIES) -> dict[str, Any]:
    reduction = draw(st.sampled_from(("token_mean", "sequence_mean", "constant")))
    dual = draw(st.sampled_from((None, 2.5)))
    kind = draw(st.sampled_from(("none", "truncate", "mask")))
    return {
        "policy": draw(st.sampled_from(policies)),
        "clip_low": draw(st.sampled_from((0.21, 1.0))),
        "clip_high": draw(st.sampled_from((0.21, 3.3))),
        "dual_clip": dual,
        "ratio": draw(st.sampled_from(LEVELS)),
        "proximal": draw(st.sampled_from(("behaviour", "recomputed", "interpolated"))),
        "correction": {
            "kind": kind,
            "level": draw(st.sampled_from(LEVELS)),
            "low": draw(st.sampled_from((0.0, 0.55))),
            "high": draw(st.sampled_from((1.7, 5.2))),
            "weigh": draw(st.booleans()),
            "max_token_lag": draw(st.sampled_from((None, 1))),
        },
        "kl": {
            "coefficient": draw(st.sampled_from((0.0, 0.125))),
            "estimator": draw(st.sampled_from(("k1", "k2", "k3"))),
        },
        "reduction": reduction,
        "constant": 8.0 if reduction == "constant" else None,
    }


@st.composite
def batches(draw: st.DrawFn, far: float = 700.0, with_holes: bool = True) -> dict[str, Any]:
    """Up to four sequences of up to four tokens; log-ratios reach from -far to far."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sequence = [i for i, n in enumerate(lengths) for _ in range(n)]
    trained = [draw(st.booleans()) if with_holes else True for _ in sequence]
    trained[draw(st.integers(0, len(sequence) - 1))] = True
    logprobs = st.floats(-far, 0, width=32)

    def column(values: st.SearchStrategy[float]) -> list[float | None]:
        return [draw(values) if on else None for on in trained]

    return {
        "sequence": sequence,
        "group": sequence,
        "trained": trained,
        "trainer_version": 3,
        "version": [draw(st.integers(0, 3)) if on else -1 for on in trained],
        "logprob": column(logprobs),
        "behaviour": column(logprobs),
        "proximal": draw(st.sampled_from((None, column(logprobs)))),
        "reference": column(logprobs),
        "advantage": column(st.floats(-8, 8, width=32)),
    }


@SLOW
@given(batches(), configs())
def test_any_batch_is_finite_and_as_the_naive_implementation_has_it(batch, config) -> None:
    """LP11: log-ratios up to 700 nats, or their sums; NaN beside the trained tokens."""
    got, expected = side.solve(batch, config, torch.float64), objective.solve(batch, config)
    assert all(map(math.isfinite, [got.loss, *got.per_token, *got.gradient]))
    assert got.per_token == pytest.approx(expected["per_token"], rel=1e-9, abs=1e-12)
    assert got.gradient == pytest.approx(expected["gradient"], rel=1e-9, abs=1e-12)


@SLOW
@given(batches(), configs())
def test_float32_is_finite_and_untrained_tokens_have_no_gradient(batch, config) -> None:
    got = side.solve(batch, config, torch.float32)
    assert all(map(math.isfinite, [got.loss, *got.per_token, *got.gradient]))
    for on, loss, slope in zip(batch["trained"], got.per_token, got.gradient, strict=True):
        assert on or (loss, slope) == (0.0, 0.0)


@SLOW
@given(batches(far=4.0), configs(), st.randoms(use_true_random=False))
def test_order_and_padding_of_tokens_change_nothing(batch, config, random) -> None:
    """Tokens in any order, with up to three more that are not trained in between."""
    places: list[int | None] = [*range(len(batch["trained"])), *[None] * random.randint(0, 3)]
    random.shuffle(places)
    fill = {"sequence": 0, "group": 0, "trained": False, "version": -1}
    moved = {
        name: [fill.get(name) if p is None else values[p] for p in places]
        if isinstance(values, list)
        else values
        for name, values in batch.items()
    }
    one, other = (side.solve(each, config, torch.float64) for each in (batch, moved))
    assert other.loss == pytest.approx(one.loss, rel=1e-9, abs=1e-12)
    expected = [0.0 if p is None else one.gradient[p] for p in places]
    assert other.gradient == pytest.approx(expected, rel=1e-9, abs=1e-12)


@SLOW
@given(
    batches(far=4.0, with_holes=False), configs(), st.integers(1, 3), st.sampled_from((1, 7, 99))
)
def test_micro_batches_and_ranks_add_up(batch, config, ranks: int, budget: int) -> None:
    whole = side.solve(batch, config, torch.float64)
    order = range(max(batch["sequence"]) + 1)
    rows = side.rows_of(batch, config, budget, False, order)
    leaf = side.column(batch, "logprob", torch.float64).requires_grad_()
    parts = [
        side.packed(batch, config, rows[rank::ranks], leaf, len(order))[0] for rank in range(ranks)
    ]
    for part in parts:
        if part.requires_grad:
            part.backward()
    assert sum(p.item() for p in parts) == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
    assert leaf.grad.tolist() == pytest.approx(whole.gradient, rel=1e-9, abs=1e-12)


@SLOW
@given(batches(far=4.0), configs(), st.floats(0.25, 4.0))
def test_the_policy_term_is_homogeneous_in_the_advantage(batch, config, scale: float) -> None:
    config = {**config, "kl": {}}
    scaled = {**batch, "advantage": [None if a is None else scale * a for a in batch["advantage"]]}
    one, other = (side.solve(each, config, torch.float64) for each in (batch, scaled))
    assert other.gradient == pytest.approx([scale * g for g in one.gradient], rel=1e-9, abs=1e-12)
    assert other.loss == pytest.approx(scale * one.loss, rel=1e-9, abs=1e-12)


@SLOW
@given(batches(far=4.0), configs())
def test_the_first_update_raises_what_was_better_and_lowers_what_was_worse(batch, config) -> None:
    """With the proximal anchor the first update's ratio is 1: the gradient is -w weight A."""
    config = {**config, "proximal": "recomputed", "kl": {}}
    batch = {**batch, "proximal": None}
    token = {**config, "ratio": "token"}
    expected = objective.solve(batch, token)
    held = zip(expected["weight"], expected["correction"], batch["advantage"], strict=True)
    slopes = [-(a or 0.0) * w * c for w, c, a in held]
    assert side.solve(batch, token, torch.float64).gradient == pytest.approx(slopes, abs=1e-12)
    for slope, advantage in zip(slopes, batch["advantage"], strict=True):
        assert slope * (advantage or 0.0) <= 0


@SLOW
@given(batches(far=4.0, with_holes=False), configs(("clip", "reinforce")), st.floats(0, 2))
def test_a_likelier_token_never_costs_more_where_a_is_above_0(batch, config, rise: float) -> None:
    """And never less where A is below 0; the token's own ratio and no correction by it."""
    config = {**config, "ratio": "token", "proximal": "behaviour", "correction": {}, "kl": {}}
    risen = {**batch, "logprob": [x + rise for x in batch["logprob"]]}
    before, after = (side.solve(b, config, torch.float64).per_token for b in (batch, risen))
    for advantage, one, other in zip(batch["advantage"], before, after, strict=True):
        assert other <= one + 1e-12 if advantage > 0 else other >= one - 1e-12


@SLOW
@given(batches(far=4.0), configs(("clip", "band")), st.floats(0, 4))
def test_a_better_answer_never_costs_more(batch, config, more: float) -> None:
    """The surrogates fall as A rises, whatever the ratio and the correction's weight."""
    better = {**batch, "advantage": [None if a is None else a + more for a in batch["advantage"]]}
    one, other = (side.solve(b, {**config, "kl": {}}, torch.float64) for b in (batch, better))
    for before, after in zip(one.per_token, other.per_token, strict=True):
        assert after <= before + 1e-12


@SLOW
@given(batches(far=4.0), configs(("cispo", "reinforce", "cross_entropy")), st.floats(0, 4))
def test_a_better_answer_is_pulled_harder(batch, config, more: float) -> None:
    """Where log p carries the gradient, the slope falls as A rises."""
    better = {**batch, "advantage": [None if a is None else a + more for a in batch["advantage"]]}
    one, other = (side.solve(b, {**config, "kl": {}}, torch.float64) for b in (batch, better))
    for before, after in zip(one.gradient, other.gradient, strict=True):
        assert after <= before + 1e-12


@SLOW
@given(batches(far=4.0), configs())
def test_a_kl_term_is_added_whatever_the_policy_term(batch, config) -> None:
    kl = {"coefficient": 0.5, "estimator": config["kl"]["estimator"]}
    without = side.solve(batch, {**config, "kl": {}}, torch.float64)
    added = side.solve(batch, {**config, "kl": kl}, torch.float64)
    for t, on in enumerate(batch["trained"]):
        k = 0.0
        if on:
            k, _ = objective.kl_term(batch["logprob"][t], batch["reference"][t], kl["estimator"])
        assert added.per_token[t] == pytest.approx(without.per_token[t] + 0.5 * k, rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", ["clip", "band", "reinforce"])
@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
def test_gradcheck(policy: str, level: str, kind: str) -> None:
    """Objectives without a stopped gradient (no cispo, no interpolated anchor), a later update."""
    batch = side.read("policy.json")["batches"]["main"]
    keep = torch.tensor(batch["trained"])
    config = {
        "policy": policy,
        "ratio": level,
        "proximal": "recomputed",
        "correction": {"kind": kind, "low": 0.6, "high": 1.6, "level": level},
        "kl": {"coefficient": 0.5, "estimator": "k3"},
        "entropy_coefficient": 0.25,
    }
    inputs = side.inputs_of(batch, torch.float64).where(keep)
    leaves = [side.column(batch, n, torch.float64)[keep] for n in ("logprob", "entropy")]
    loss = side.make_loss(side.loss_config(config))
    assert torch.autograd.gradcheck(
        lambda logprobs, entropies: loss(logprobs, entropies, inputs)[0],
        [leaf.requires_grad_() for leaf in leaves],
    )
