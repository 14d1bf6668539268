"""The policy-gradient objectives, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lagzero.config import LossConfig
from lagzero.losses.objective import make_loss
from lagzero.losses.policy import band_loss, cispo_loss, clip_loss, log_prob_loss
from lagzero.types import LOG_RATIO_BOUND

KINDS = ["token", "sequence_product", "sequence_mean"]
RATIO_POLICIES = ["clip", "cispo", "band"]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(logprobs: torch.Tensor, inputs, **options):
    """(per-token losses, gradient of their sum, metrics) of a configured objective."""
    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = make_loss(LossConfig(**options))(logprobs, None, inputs)
    loss.sum().backward()
    return loss.detach(), logprobs.grad, metrics


def loss_at_ratio(ratio: float, advantage: float, **options) -> tuple[float, float]:
    """(loss, d loss / d logprob) of one token under clip."""
    log_ratio = tensor(math.log(ratio)).requires_grad_()
    loss = clip_loss(log_ratio, tensor(advantage), **options).loss
    loss.sum().backward()
    return loss.item(), log_ratio.grad.item()


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 2.0, 1.0), (1.5, 1.0, 1.28), (1.5, -1.0, 1.28), (0.5, 1.0, 0.8), (1.1, -2.0, 1.1)],
)
def test_cispo_bounds_the_weight_and_keeps_every_gradient(ratio, advantage, weight) -> None:
    """l = -2: loss is -weight A l and its gradient -weight A, whatever A's sign."""
    logprobs = tensor(-2.0).requires_grad_()
    term = cispo_loss(logprobs - (-2.0 - math.log(ratio)), logprobs, tensor(advantage), 0.2, 0.28)
    term.loss.sum().backward()
    assert term.loss.item() == pytest.approx(weight * advantage * 2.0, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert term.capped.item() == (ratio not in (1.0, 1.1))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 1.0, -1.0),
        (1.25, -1.0, 1.25),
        (1.5, 1.0, 0.0),
        (1.5, -1.0, 0.0),  # clip would keep 1.5
        (0.5, 1.0, 0.0),  # clip would keep -0.5
        (0.5, -1.0, 0.0),
    ],
)
def test_the_band_leaves_out_whatever_is_outside(ratio, advantage, loss) -> None:
    log_ratio = tensor(math.log(ratio)).requires_grad_()
    term = band_loss(log_ratio, tensor(advantage), 0.2, 0.28)
    term.loss.sum().backward()
    assert term.loss.item() == pytest.approx(loss, abs=1e-12)
    assert log_ratio.grad.item() == pytest.approx(loss, abs=1e-12)
    assert term.stopped.item() == (loss == 0.0)


def test_reinforce_and_cross_entropy_are_minus_weight_times_log_prob(facts) -> None:
    logprobs = tensor(-2.0, -0.5).requires_grad_()
    term = log_prob_loss(logprobs, tensor(3.0, -1.0))
    term.loss.sum().backward()
    assert term.loss.tolist() == [6.0, -0.5]
    assert logprobs.grad.tolist() == [-3.0, 1.0]
    inputs = facts([-9.0, -9.0], [3.0, -1.0])  # behaviour plays no part
    for policy in ("reinforce", "cross_entropy"):
        loss, gradient, _ = run(tensor(-2.0, -0.5), inputs, policy=policy)
        assert (loss.tolist(), gradient.tolist()) == ([6.0, -0.5], [-3.0, 1.0])


# log pi, mu, prox = -1, -1.3, -1.1 at lag 2: ratios e^.3, e^.1 and, midway to mu, e^.15
@pytest.mark.parametrize("policy", RATIO_POLICIES)
@pytest.mark.parametrize(
    ("proximal", "log_ratio", "kind"),
    [
        ("behaviour", 0.3, "none"),  # a weight would count twice there, and is refused
        *(("recomputed", 0.1, kind) for kind in ("none", "truncate", "mask")),
        *(("interpolated", 0.15, kind) for kind in ("none", "truncate", "mask")),
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_objective_anchor_and_correction_together(
    facts, policy, proximal, log_ratio, kind, advantage
) -> None:
    """Bounds 0.8 .. 1.28 stop or cap e^.3 = 1.35 alone; w is e^.2, or e^.15 when interpolated."""
    inputs = facts([-1.3], [advantage], lags=[2], proximal=[-1.1])
    correction = {"kind": kind, "low": 0.9, "high": 1.2}
    loss, gradient, _ = run(
        tensor(-1.0),
        inputs,
        policy=policy,
        proximal=proximal,
        clip_high=0.28,
        correction=correction,
    )
    r = math.exp(log_ratio)
    match policy:
        case "clip":
            expected = -min(r * advantage, min(r, 1.28) * advantage)
            slope = 0.0 if r > 1.28 and advantage > 0 else -r * advantage
        case "cispo":
            expected = min(r, 1.28) * advantage  # times -l = 1
            slope = -min(r, 1.28) * advantage
        case "band":
            expected = slope = 0.0 if r > 1.28 else -r * advantage
    log_w = 0.15 if proximal == "interpolated" else 0.2
    w = {"none": 1.0, "truncate": min(math.exp(log_w), 1.2), "mask": math.exp(log_w)}[kind]
    if kind == "mask" and w > 1.2:
        w = 0.0
    assert loss.item() == pytest.approx(w * expected, abs=1e-12)
    assert gradient.item() == pytest.approx(w * slope, abs=1e-12)


@pytest.mark.parametrize("policy", [*RATIO_POLICIES, "reinforce"])
def test_the_first_update_against_the_proximal_policy_is_the_weighted_gradient(
    facts, policy
) -> None:
    """With one pass and a recomputed anchor every objective has gradient -w A, w truncated at 2."""
    inputs = facts([-1.0, -1.0, -2.0], [1.0, -0.5, 2.0])
    _, gradient, metrics = run(
        tensor(-0.9, -1.4, -1.0),
        inputs,
        policy=policy,
        proximal="recomputed",
        correction={"kind": "truncate"},
    )
    w = [math.exp(0.1), math.exp(-0.4), 2.0]  # e^1 = 2.72 is cut
    assert gradient.tolist() == pytest.approx([-w[0], 0.5 * w[1], -2.0 * w[2]], abs=1e-12)
    if policy in RATIO_POLICIES:
        assert metrics["policy/ratio_max"][0].tolist() == [1.0] * 3


def test_the_sequence_mean_gradient_is_the_gspo_gradient(facts) -> None:
    """LP10: with weights 1 / (S * L) the gradient is -(A / (S L)) s for each token."""
    logprobs = tensor(-0.95, -0.9, -1.0).requires_grad_()
    inputs = facts([-1.0] * 3, [2.0, 2.0, 0.0], [0, 0, 1])
    loss, _ = make_loss(LossConfig(ratio="sequence_mean"))(logprobs, None, inputs)
    (loss * tensor(1 / 4, 1 / 4, 1 / 2)).sum().backward()
    expected = -2.0 / 4 * math.exp(0.075)
    assert logprobs.grad.tolist() == pytest.approx([expected, expected, 0.0], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", RATIO_POLICIES)
def test_an_untouched_policy_has_ratio_one(facts, kind, policy) -> None:
    """LP1, LP4: equal log-probs, a rare end token's too, give exactly 1."""
    behaviour, advantages = [-0.3, -1.1, -4.6], [1.0, -1.0, 0.5]
    inputs = facts(behaviour, advantages, [0, 0, 0], dtype=torch.float32)
    loss, gradient, metrics = run(torch.tensor(behaviour), inputs, policy=policy, ratio=kind)
    assert metrics["policy/ratio_max"][0].tolist() == [1.0] * 3
    assert metrics["policy/ratio_min"][0].tolist() == [1.0] * 3
    assert not metrics["policy/clipped_low_share"][0].any()
    if policy != "cispo":
        assert loss.tolist() == [-1.0, 1.0, -0.5]
    if kind == "token" or policy == "cispo":
        assert gradient.tolist() == [-1.0, 1.0, -0.5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [700.0, -700.0, 1e10])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("policy", ["clip", "band"])
def test_extreme_log_ratios_stay_finite(facts, kind, dtype, gap, advantage, policy) -> None:
    """LP11: finite value and gradient at any distance; past the bound the gradient is 0."""
    inputs = facts([-1.0, -1.0], [advantage] * 2, [0, 1], dtype=dtype)
    logprobs = torch.tensor([-1.0 + gap, -1.0], dtype=dtype)
    loss, gradient, _ = run(logprobs, inputs, policy=policy, ratio=kind)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert loss.abs().max() <= math.exp(LOG_RATIO_BOUND) * 1.0001
    assert gradient[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("policy", [*RATIO_POLICIES, "reinforce", "cross_entropy"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e10])
def test_masked_tokens_reach_neither_value_nor_gradient(facts, policy, kind, poison) -> None:
    """LP11: mask [1, 0] with NaN, or a 1e10 gap, beside it equals the one-token result."""
    logprobs = tensor(-0.5, poison).requires_grad_()
    inputs = facts([-0.6, 0.0], [1.0, poison], [0, 0], reference=[-0.2, -poison])
    alone = facts([-0.6], [1.0], reference=[-0.2])
    keep = torch.tensor([True, False])
    options = {"policy": policy, "ratio": kind, "kl": {"coefficient": 0.1}}
    loss, _ = make_loss(LossConfig(**options))(logprobs[keep], None, inputs.where(keep))
    loss.sum().backward()
    expected, gradient, _ = run(tensor(-0.5), alone, **options)
    assert loss.tolist() == expected.tolist()
    assert logprobs.grad.tolist() == [gradient.item(), 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"dual_clip": 3.0}, {"policy": "band", "clip_low": 1.0, "clip_high": 20.0}]
)
def test_gradcheck(facts, kind, options) -> None:
    """The gradient is the formula's. (CISPO's is not its value's derivative, on purpose; the
    derivative of the band's value is read inside the band.)"""
    torch.manual_seed(0)
    behaviour = (-torch.rand(12, dtype=torch.float64) * 2).tolist()
    inputs = facts(behaviour, torch.randn(12).tolist(), [0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 1, 3])
    logprobs = inputs.behaviour_logprobs + torch.randn(12, dtype=torch.float64) * 0.7
    loss = make_loss(LossConfig(**{"clip_high": 0.28, **options}, ratio=kind))

    def value(x: torch.Tensor) -> torch.Tensor:
        return loss(x, None, inputs)[0]

    assert torch.autograd.gradcheck(
        value, (logprobs.requires_grad_(),), eps=1e-7, atol=1e-6, rtol=1e-5
    )


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)), st.sampled_from(KINDS), st.sampled_from(RATIO_POLICIES))
def test_permuting_tokens_permutes_losses(facts, order, kind, policy) -> None:
    behaviour = tensor(-0.1, -0.4, -2.0, -1.0, -0.7, -0.2)
    logprobs = tensor(-0.3, -0.1, -1.5, -1.2, -0.7, -0.6)
    advantages = tensor(1.0, -1.0, 0.5, 0.0, -2.0, 2.0)
    sequences = torch.tensor([0, 0, 1, 1, 1, 2])

    def at(i: torch.Tensor) -> torch.Tensor:
        inputs = facts(behaviour[i].tolist(), advantages[i].tolist(), sequences[i].tolist())
        return run(logprobs[i], inputs, policy=policy, ratio=kind)[0]

    i = torch.tensor(order)
    torch.testing.assert_close(at(i), at(torch.arange(6))[i], rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(-3, 3),
    st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3),
    st.sampled_from([*RATIO_POLICIES, "reinforce"]),
)
def test_a_descent_step_never_goes_against_the_advantage(facts, gap, advantage, policy) -> None:
    """The gradient is 0 or has the sign of -A."""
    inputs = facts([-4.0 - gap], [advantage])
    _, gradient, _ = run(tensor(-4.0), inputs, policy=policy)
    assert gradient.item() * advantage <= 0


def test_shares_name_what_the_bounds_stopped(facts) -> None:
    ratios = tensor(1.5, 0.5, 0.5, 1.5, 10.0)
    inputs = facts([-1.0] * 5, [1.0, -1.0, 1.0, -1.0, -1.0], lags=[0, 0, 1, 1, 9])
    _, _, metrics = run(ratios.log() - 1.0, inputs, dual_clip=3.0)
    assert metrics["policy/clipped_high_share"][0].tolist() == [1, 0, 0, 0, 0]
    assert metrics["policy/clipped_low_share"][0].tolist() == [0, 1, 0, 0, 0]
    assert metrics["policy/dual_clipped_share"][0].tolist() == [0, 0, 0, 0, 1]
    stopped = {lag: metrics[f"lag/{lag}/stopped_share"][0].tolist() for lag in ("0", "1", "8_up")}
    assert stopped == {"0": [1, 1], "1": [0, 0], "8_up": [1]}
    for policy in ("cispo", "band"):
        _, _, metrics = run(ratios.log() - 1.0, inputs, policy=policy)
        assert metrics["policy/clipped_high_share"][0].tolist() == [1, 0, 0, 1, 1]
        assert metrics["policy/clipped_low_share"][0].tolist() == [0, 1, 1, 0, 0]
        name = "capped" if policy == "cispo" else "stopped"
        assert metrics[f"lag/1/{name}_share"][0].tolist() == [1, 1]


def test_wrong_shapes_and_types_are_refused(facts) -> None:
    """LN7: a kept axis cannot broadcast along the wrong one."""
    inputs = facts([-1.0] * 3, [1.0] * 3)
    loss = make_loss(LossConfig())
    with pytest.raises(ValueError, match="3, 1"):
        loss(torch.zeros(3, 1), None, inputs)
    with pytest.raises(ValueError, match="float32"):
        loss(torch.zeros(3, dtype=torch.bfloat16), None, inputs)
    with pytest.raises(ValueError, match="one length"):
        facts([-1.0] * 3, [1.0] * 2)
