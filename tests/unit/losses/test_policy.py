"""The clipped loss and its ratios, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.losses.inputs import LossInputs
from lagzero.losses.policy import clipped_policy_loss, log_ratios
from lagzero.types import LOG_RATIO_BOUND

KINDS = ["token", "sequence_product", "sequence_mean"]


def facts(behaviour, advantages, sequences=None, reference=None, dtype=torch.float64):
    n = len(behaviour)
    sequences = list(range(n)) if sequences is None else sequences
    return LossInputs(
        torch.tensor(behaviour, dtype=dtype),
        None if reference is None else torch.tensor(reference, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        torch.zeros(n, dtype=torch.int32),
        torch.tensor(sequences, dtype=torch.int64),
        max(sequences, default=-1) + 1,
    )


def loss_at_ratio(ratio: float, advantage: float, **options) -> tuple[float, float]:
    """(loss, d loss / d logprob) of one token."""
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    loss, _ = clipped_policy_loss(logprobs, facts([-1.0], [advantage]), **options)
    loss.sum().backward()
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.0, -1.0, 1.0, 1.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 1.0, -1.28, 0.0),  # above 1 + clip_high
        (1.25, 1.0, -1.25, -1.25),  # inside the asymmetric upper bound
        (0.5, 1.0, -0.5, -0.5),  # low ratio, good token: not clipped
        (0.5, -1.0, 0.8, 0.0),  # below 1 - clip_low
        (1.5, -1.0, 1.5, 1.5),  # high ratio, bad token: not clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_asymmetric_clip_by_hand(ratio, advantage, loss, gradient) -> None:
    got = loss_at_ratio(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert got == pytest.approx((loss, gradient), abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "dual_clip", "loss"),
    [(1.0, 1.0, 3.0, -1.0), (-1.0, 10.0, 3.0, 3.0), (-1.0, 10.0, None, 10.0)],
)
def test_dual_clip_acts_on_negative_advantages_only(advantage, ratio, dual_clip, loss) -> None:
    """LN14: losses -1, 3 and 10."""
    got, gradient = loss_at_ratio(ratio, advantage, dual_clip=dual_clip)
    assert got == pytest.approx(loss, abs=1e-12)
    assert gradient == pytest.approx(0.0 if loss == 3.0 else loss, abs=1e-12)


def test_the_sequence_ratios_are_product_and_geometric_mean() -> None:
    """LP10: log-ratios [.1, .2] give 1.3499 (exact) and 1.1618 (length-normalised)."""
    logprobs = torch.tensor([-0.9, -0.8], dtype=torch.float64)
    inputs = facts([-1.0, -1.0], [1.0, 1.0], [0, 0])
    ratios = {kind: log_ratios(logprobs, inputs, kind).exp().tolist() for kind in KINDS}
    assert ratios["sequence_product"] == pytest.approx([1.3499] * 2, abs=1e-4)
    assert ratios["sequence_mean"] == pytest.approx([1.1618] * 2, abs=1e-4)
    assert ratios["token"] == pytest.approx([math.exp(0.1), math.exp(0.2)], abs=1e-12)


def test_the_sequence_mean_gradient_is_the_gspo_gradient() -> None:
    """LP10: with weights 1 / (S * L) the gradient is -(A / (S L)) s for each token."""
    logprobs = torch.tensor([-0.95, -0.9, -1.0], dtype=torch.float64, requires_grad=True)
    inputs = facts([-1.0] * 3, [2.0, 2.0, 0.0], [0, 0, 1])
    loss, _ = clipped_policy_loss(logprobs, inputs, ratio="sequence_mean")
    (loss * torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=torch.float64)).sum().backward()
    expected = -2.0 / 4 * math.exp(0.075)
    assert logprobs.grad.tolist() == pytest.approx([expected, expected, 0.0], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_policy_has_ratio_one(kind) -> None:
    """LP1, LP4: equal log-probs, a rare end token's too, give exactly 1 and gradient -A / rho."""
    behaviour = [-0.3, -1.1, -4.6]
    logprobs = torch.tensor(behaviour, dtype=torch.float32, requires_grad=True)
    inputs = facts(behaviour, [1.0, -1.0, 0.5], [0, 0, 0], dtype=torch.float32)
    loss, metrics = clipped_policy_loss(logprobs, inputs, ratio=kind)
    assert metrics["policy/ratio_max"][0].tolist() == [1.0] * 3
    assert metrics["policy/ratio_min"][0].tolist() == [1.0] * 3
    assert loss.tolist() == [-1.0, 1.0, -0.5]
    assert not metrics["policy/clipped_low_share"][0].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [700.0, -700.0, 1e10])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_log_ratios_stay_finite(kind, dtype, gap, advantage) -> None:
    """LP11: value and gradient are finite; past the bound the gradient is 0."""
    logprobs = torch.tensor([gap - 1.0, -1.0], dtype=dtype, requires_grad=True)
    inputs = facts([-1.0, -1.0], [advantage] * 2, [0, 0], dtype=dtype)
    loss, _ = clipped_policy_loss(logprobs, inputs, ratio=kind)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()
    assert loss.abs().max() <= math.exp(LOG_RATIO_BOUND) * 1.0001
    assert logprobs.grad[0] == pytest.approx(0.0, abs=1e-12)


def test_masked_tokens_reach_neither_value_nor_gradient() -> None:
    """LP11: mask [1, 0] with NaN, or a 1e10 gap, beside it equals the one-token result."""
    for poison in (float("nan"), float("inf"), 1e10):
        logprobs = torch.tensor([0.0, poison], dtype=torch.float64, requires_grad=True)
        inputs = facts([-0.1, 0.0], [1.0, poison], [0, 0], reference=[-0.2, -poison])
        keep = torch.tensor([True, False])
        for kind in KINDS:
            logprobs.grad = None
            loss, _ = clipped_policy_loss(logprobs[keep], inputs.where(keep), ratio=kind)
            loss.sum().backward()
            assert loss.tolist() == pytest.approx([-math.exp(0.1)], abs=1e-12)
            assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1), 0.0], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gradcheck(kind, dual_clip) -> None:
    torch.manual_seed(0)
    behaviour = (-torch.rand(12, dtype=torch.float64) * 2).tolist()
    inputs = facts(behaviour, torch.randn(12).tolist(), [0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 1, 3])
    logprobs = inputs.behaviour_logprobs + torch.randn(12, dtype=torch.float64) * 0.7
    logprobs = logprobs.requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return clipped_policy_loss(x, inputs, 0.2, 0.28, dual_clip, kind)[0]

    assert torch.autograd.gradcheck(loss, (logprobs,), eps=1e-7, atol=1e-6, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.sampled_from(KINDS))
def test_permuting_tokens_permutes_losses(order, kind) -> None:
    behaviour = torch.tensor([-0.1, -0.4, -2.0, -1.0, -0.7, -0.2], dtype=torch.float64)
    logprobs = torch.tensor([-0.3, -0.1, -1.5, -1.2, -0.7, -0.6], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, -2.0, 2.0], dtype=torch.float64)
    sequences = torch.tensor([0, 0, 1, 1, 1, 2])
    straight, _ = clipped_policy_loss(
        logprobs, facts(behaviour.tolist(), advantages.tolist(), sequences.tolist()), ratio=kind
    )
    i = torch.tensor(order)
    shuffled, _ = clipped_policy_loss(
        logprobs[i],
        facts(behaviour[i].tolist(), advantages[i].tolist(), sequences[i].tolist()),
        ratio=kind,
    )
    torch.testing.assert_close(shuffled, straight[i], rtol=0, atol=1e-12)


def test_shares_name_what_the_clip_stopped() -> None:
    ratios = torch.tensor([1.5, 0.5, 0.5, 1.5, 10.0], dtype=torch.float64)
    inputs = facts([-1.0] * 5, [1.0, -1.0, 1.0, -1.0, -1.0])
    _, metrics = clipped_policy_loss(ratios.log() - 1.0, inputs, dual_clip=3.0)
    assert metrics["policy/clipped_high_share"][0].tolist() == [1, 0, 0, 0, 0]
    assert metrics["policy/clipped_low_share"][0].tolist() == [0, 1, 0, 0, 0]
    assert metrics["policy/dual_clipped_share"][0].tolist() == [0, 0, 0, 0, 1]


def test_wrong_shapes_and_types_are_refused() -> None:
    """LN7: a kept axis cannot broadcast along the wrong one."""
    inputs = facts([-1.0] * 3, [1.0] * 3)
    with pytest.raises(ValueError, match="3, 1"):
        clipped_policy_loss(torch.zeros(3, 1), inputs)
    with pytest.raises(ValueError, match="float32"):
        clipped_policy_loss(torch.zeros(3, dtype=torch.bfloat16), inputs)
    with pytest.raises(ValueError, match="one length"):
        facts([-1.0] * 3, [1.0] * 2)
