"""The preference loss on pairs, by hand."""

import math

import pytest
import torch

from lagzero.config import LossConfig
from lagzero.losses.objective import make_loss, needs_reference, step_metrics
from lagzero.losses.preference import dpo_loss


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def pair(facts):
    """Chosen: two tokens, sums -1.5 and reference -2; rejected: one token, -3 and -2.5."""
    return facts(
        [-1.0] * 3, [1.0, 1.0, -1.0], [0, 0, 1], reference=[-1.2, -0.8, -2.5], groups=[4, 4, 4]
    )


LOGPROBS = (-1.0, -0.5, -3.0)


def test_the_loss_and_its_gradient_by_hand(pair) -> None:
    """margin = 0.1 ((-1.5 + 2) - (-3 + 2.5)) = 0.1; each token repeats -log sigmoid(0.1)."""
    logprobs = tensor(*LOGPROBS).requires_grad_()
    term = dpo_loss(logprobs, pair, 0.1)
    assert term.loss.tolist() == pytest.approx([math.log1p(math.exp(-0.1))] * 3, abs=1e-12)
    assert term.loss[0].item() == pytest.approx(0.6444, abs=1e-4)
    weights = tensor(1 / 4, 1 / 4, 1 / 2)  # sequence_mean: 1 / (S L)
    (term.loss * weights).sum().backward()
    slope = 0.1 / (1 + math.exp(0.1))  # beta sigmoid(-margin), once a pair
    assert logprobs.grad.tolist() == pytest.approx([-slope, -slope, slope], abs=1e-12)
    assert term.metrics["preference/margin_mean"][0].tolist() == pytest.approx([0.1])
    assert term.metrics["preference/right_share"][0].tolist() == [1.0]


def test_the_policy_as_it_started_has_loss_log_two(facts) -> None:
    inputs = facts([-1.0] * 2, [-1.0, 1.0], reference=[-1.0, -2.0], groups=[0, 0])
    assert dpo_loss(tensor(-1.0, -2.0), inputs, 0.7).loss.tolist() == [math.log(2)] * 2


def test_pairs_do_not_mix_and_their_order_does_not_matter(facts) -> None:
    columns = {
        "advantages": [1.0, -1.0, -1.0, 1.0, 1.0],
        "sequences": [0, 1, 3, 2, 2],
        "reference": [-1.0, -2.0, -0.5, -1.5, -0.25],
        "groups": [7, 7, 2, 2, 2],
    }
    logprobs = tensor(-0.5, -2.5, -0.75, -1.0, -0.5)
    whole = dpo_loss(logprobs, facts([-1.0] * 5, **columns), 1.0).loss
    first = {name: column[:2] for name, column in columns.items()}
    assert (
        whole[:2].tolist() == dpo_loss(logprobs[:2], facts([-1.0] * 2, **first), 1.0).loss.tolist()
    )
    order = torch.tensor([4, 0, 2, 1, 3])
    shuffled = {name: [column[i] for i in order] for name, column in columns.items()}
    got = dpo_loss(logprobs[order], facts([-1.0] * 5, **shuffled), 1.0).loss
    torch.testing.assert_close(got, whole[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("gap", [700.0, -700.0, 1e10])
def test_an_extreme_margin_is_finite(facts, gap) -> None:
    inputs = facts([-1.0] * 2, [1.0, -1.0], reference=[-1.0, -1.0], groups=[0, 0])
    logprobs = tensor(-1.0 + gap, -1.0).requires_grad_()
    loss = dpo_loss(logprobs, inputs, 1.0).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[0] <= 0 <= logprobs.grad[1]


def test_gradcheck(pair) -> None:
    logprobs = tensor(*LOGPROBS).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: dpo_loss(x, pair, 0.5).loss, (logprobs,))


@pytest.mark.parametrize(
    ("advantages", "sequences", "groups", "wrong"),
    [
        ([1.0, 1.0], [0, 1], [0, 0], 0),  # two chosen
        ([1.0], [0], [3], 3),  # the other one is elsewhere
        ([1.0, -1.0, -1.0], [0, 1, 2], [5, 5, 5], 5),  # three sequences
        ([0.5, -0.5], [0, 1], [1, 1], 1),  # advantages, not signs
    ],
)
def test_what_is_no_pair_is_refused(facts, advantages, sequences, groups, wrong) -> None:
    n = len(advantages)
    inputs = facts([-1.0] * n, advantages, sequences, reference=[-1.0] * n, groups=groups)
    with pytest.raises(ValueError, match=f"group {wrong} of the step is no pair"):
        dpo_loss(torch.full((n,), -1.0, dtype=torch.float64), inputs, 0.1)


def test_reference_and_groups_are_needed(facts) -> None:
    logprobs = tensor(-1.0, -1.0)
    with pytest.raises(ValueError, match="needs reference log-probs"):
        dpo_loss(logprobs, facts([-1.0] * 2, [1.0, -1.0], groups=[0, 0]), 0.1)
    with pytest.raises(ValueError, match="needs groups"):
        dpo_loss(logprobs, facts([-1.0] * 2, [1.0, -1.0], reference=[-1.0] * 2), 0.1)


def test_the_configuration_reaches_the_loss(pair) -> None:
    config = LossConfig(policy="dpo", dpo_beta=0.1, reduction="sequence_mean")
    assert needs_reference(config) and not needs_reference(LossConfig())
    loss, metrics = make_loss(config)(tensor(*LOGPROBS), None, pair)
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-0.1))] * 3, abs=1e-12)
    assert step_metrics([metrics])["preference/right_share"] == 1.0
