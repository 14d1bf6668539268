"""Log-probs and entropies of chosen tokens."""

from __future__ import annotations

import pytest
import torch

from lagzero.train.logprobs import chunked_logprobs, whole_logprobs


def same(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def test_temperature_is_inside_the_softmax():
    """LP1: logits [2, 1, 0] at temperature 0.5, token 0.

    softmax of [4, 2, 0]: log p = -log(1 + e^-2 + e^-4) = -0.1429; before temperature it would be
    -0.4076, and -0.8152 if divided after the softmax.
    """
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    logprobs, _ = chunked_logprobs(logits, same, torch.tensor([0]), 0.5, 8)
    assert logprobs.item() == pytest.approx(-0.1429, abs=5e-5)


def test_entropy_of_a_known_distribution():
    """p = (1/2, 1/4, 1/4) has 1.5 log 2 nats."""
    logits = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64) * torch.log(torch.tensor(2.0))
    _, entropies = chunked_logprobs(logits, same, torch.tensor([1]), 1.0, 8)
    assert entropies.item() == pytest.approx(1.5 * 0.6931472, rel=1e-6)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 10, 100])
def test_chunks_and_whole_agree_in_value_and_gradient(chunk: int, entropy_gradient: bool):
    results: list[list[torch.Tensor | None]] = []
    for function in (chunked_logprobs, whole_logprobs):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(10, 6, dtype=torch.float64, generator=generator).requires_grad_()
        head = torch.nn.Linear(6, 17).double()
        with torch.no_grad():
            head.weight.copy_(torch.randn(17, 6, dtype=torch.float64, generator=generator))
            head.bias.copy_(torch.randn(17, dtype=torch.float64, generator=generator))
        targets = torch.randint(17, (10,), generator=generator)
        logprobs, entropies = function(hidden, head, targets, 0.7, chunk, entropy_gradient)
        weights = torch.arange(10, dtype=torch.float64).cos()
        loss = (weights * logprobs).sum()
        if entropy_gradient:
            loss = loss + (weights.square() * entropies).sum()
        else:
            assert not entropies.requires_grad
        loss.backward()
        results.append([logprobs, entropies, hidden.grad, head.weight.grad, head.bias.grad])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-11)


def test_no_more_than_a_chunk_of_logits_is_ever_made():
    sizes: list[int] = []
    hidden = torch.randn(10, 6, requires_grad=True)
    weight = torch.randn(17, 6)

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weight.T

    chunked_logprobs(hidden, head, torch.zeros(10), 1.0, 4)[0].sum().backward()
    # Forward 4, 4, 2; backward makes the first two again.
    assert sorted(sizes) == [2, 4, 4, 4, 4]


def test_half_precision_logits_are_normalised_in_float32():
    logits = torch.randn(5, 1000).bfloat16()
    targets = torch.arange(5)
    logprobs, entropies = chunked_logprobs(logits, same, targets, 1.0, 8)
    expected, expected_entropies = whole_logprobs(logits.float(), same, targets, 1.0, 8)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-5, atol=1e-5)


def test_no_target_gives_nothing():
    logprobs, entropies = chunked_logprobs(torch.zeros(0, 3), same, torch.zeros(0), 1.0, 8)
    assert logprobs.shape == entropies.shape == (0,)


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_impossible_settings_are_refused(temperature: float, chunk: int):
    with pytest.raises(ValueError, match="must be > 0"):
        chunked_logprobs(torch.zeros(1, 3), same, torch.zeros(1), temperature, chunk)
