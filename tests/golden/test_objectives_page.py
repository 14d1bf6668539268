"""The numbers and identities of docs/objectives.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lagzero.algorithms.named import ALGORITHMS
from lagzero.cli import main
from lagzero.config import LossConfig
from lagzero.losses.inputs import LossInputs
from lagzero.losses.objective import make_loss
from lagzero.prepare.advantage import group_advantages
from lagzero.prepare.weights import token_weights

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "objectives.md").read_text("utf-8")


def test_the_output_on_the_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    ((words, output),) = re.findall(
        r"```\n\$ lagzero (explain [^\n]*)\n(.*?)\n```", PAGE, re.DOTALL
    )
    assert main(words.split()) == 0
    assert capsys.readouterr().out.rstrip() == output


def test_every_algorithm_has_its_part():
    heads = re.findall(r"^#### `(\w+)`$", PAGE, re.MULTILINE)
    assert heads == list(ALGORITHMS)
    assert [name for name in heads if f"](#{name})" not in PAGE] == []


def test_the_ratios_of_the_page():
    logs = torch.tensor([0.1, 0.2], dtype=torch.float64)
    for value in (*logs.exp(), logs.sum().exp(), logs.mean().exp()):
        assert f"{value:.4f}" in PAGE


def test_the_reductions_of_the_page():
    lengths, losses = np.array([1, 4]), np.array([4.0, 1.0])

    def total(reduction: Any, constant: float | None = None) -> float:
        return float((token_weights(lengths, reduction, constant) * lengths * losses).sum())

    assert total("token_mean") == pytest.approx(1.6)
    assert total("sequence_mean") == pytest.approx(2.5)
    assert total("constant", 10) == pytest.approx(0.4)


# --- what turns into what -------------------------------------------------------------------------

NUM, LENGTHS = 12, (5, 4, 3)


def gradient(
    *, lags: int = 3, on_policy: bool = False, equal: bool = False, **keys: Any
) -> torch.Tensor:
    """The gradient of one step's loss in the log-probs [N], by autograd."""
    draw = torch.Generator().manual_seed(5)

    def normal() -> torch.Tensor:
        return torch.randn(NUM, generator=draw, dtype=torch.float64)

    policy = (-1 + 0.3 * normal()).requires_grad_()
    gap = 0.3 * normal()
    lengths = (4, 4, 4) if equal else LENGTHS
    sequences = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    config = LossConfig(**keys)
    inputs = LossInputs(
        behaviour_logprobs=policy.detach() - (0 if on_policy else gap),
        reference_logprobs=None,
        advantages=torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)[sequences],
        versions=torch.zeros(NUM, dtype=torch.int64),
        sequences=sequences,
        num_sequences=3,
        version=lags,
    )
    per_token, _ = make_loss(config)(policy, None, inputs)
    weights = token_weights(np.array(lengths), config.reduction, config.constant)
    (per_token * torch.as_tensor(weights)[sequences]).sum().backward()
    assert policy.grad is not None
    return policy.grad


def correction(kind: str, **keys: Any) -> Any:
    from lagzero.config import CorrectionConfig

    return CorrectionConfig(kind=kind, **keys)


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip, recomputed": (
        {"proximal": "recomputed", "correction": correction("truncate", high=1.1)},
        {"policy": "reinforce", "correction": correction("truncate", high=1.1)},
    ),
    "clip, recomputed, masked": (
        {"proximal": "recomputed", "correction": correction("mask", low=0.8, high=1.1)},
        {"policy": "reinforce", "correction": correction("mask", low=0.8, high=1.1)},
    ),
    "cispo": (
        {"policy": "cispo", "clip_low": 1.0, "clip_high": 0.1},
        {"policy": "reinforce", "correction": correction("truncate", high=1.1)},
    ),
    "clip on-policy": ({"on_policy": True}, {"policy": "reinforce"}),
    "cispo on-policy": ({"policy": "cispo", "on_policy": True}, {"policy": "reinforce"}),
    "band on-policy": ({"policy": "band", "on_policy": True}, {"policy": "reinforce"}),
    "gspo": (
        {"on_policy": True, "ratio": "sequence_mean", "reduction": "sequence_mean"},
        {"on_policy": True, "reduction": "sequence_mean"},
    ),
    "interpolated at lag 0": (
        {"proximal": "interpolated", "lags": 0},
        {"proximal": "recomputed", "lags": 0},
    ),
    "interpolated at lag 1": (
        {"proximal": "interpolated", "lags": 1},
        {"proximal": "behaviour", "lags": 1},
    ),
    "equal lengths": (
        {"equal": True, "reduction": "sequence_mean"},
        {"equal": True, "reduction": "token_mean"},
    ),
    "equal lengths, constant": (
        {"equal": True, "reduction": "constant", "constant": 4.0},
        {"equal": True, "reduction": "token_mean"},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_the_page_calls_the_same_has_the_same_gradient(name: str):
    one, other = SAME[name]
    torch.testing.assert_close(gradient(**one), gradient(**other), rtol=1e-12, atol=1e-15)


def test_what_differs_does_differ():
    assert not torch.allclose(gradient(), gradient(policy="reinforce"))
    assert not torch.allclose(
        gradient(proximal="interpolated", lags=3), gradient(proximal="behaviour", lags=3)
    )


def test_the_group_mean_is_a_shorter_leave_one_out():
    rewards = np.array([1.0, 0.0, 0.25, 0.5])
    mean = group_advantages(rewards, "group_mean", normalize_std=False)
    others = group_advantages(rewards, "leave_one_out", normalize_std=False)
    np.testing.assert_allclose(mean, 3 / 4 * others, rtol=1e-12)
