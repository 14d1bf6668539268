"""The way a step is cut and packed changes neither log-probs nor loss nor gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lagzero.config import TrainConfig
from lagzero.prepare.pack import pack, unpack
from lagzero.train.model import Policy, enable_activation_checkpointing
from lagzero.train.step import LocalTrainer
from lagzero.types import Array, Sample

FAMILIES = ["llama", "qwen3", "gemma3", "gpt2"]


def plain_logprobs(
    module: Any, sample: Sample, temperature: float, left_pad: int = 0
) -> torch.Tensor:
    """Log-probs [T] of a response by transformers' own SDPA forward of this sequence alone."""
    ids = [*sample.prompt_ids, *sample.tokens["id"].tolist()]
    mask = torch.tensor([[0] * left_pad + [1] * len(ids)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = module(
        input_ids=torch.tensor([[0] * left_pad + ids]),
        attention_mask=mask,
        position_ids=positions,
        use_cache=False,
    ).logits[0, left_pad:]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp = z.log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
    return logp.gather(1, torch.tensor(ids[len(sample.prompt_ids) :])[:, None])[:, 0]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in policy.trainable().items() if p.grad is not None}


def row_gradients(
    policy: Policy, samples: list[Sample], weights: Array, train: TrainConfig, loss: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """The step's loss and gradient, without the update."""
    trainer = LocalTrainer(policy, loss, train, temperature=0.7, entropy_gradient=True)
    total = 0.0
    for row in pack(samples, train.micro_batch_tokens, train.share_prompt, weights):
        value, *_ = trainer._row_loss(row, len(samples), None)  # pyright: ignore[reportPrivateUsage]
        value.backward()
        total += float(value.detach())
    found = gradients(policy)
    policy.module.zero_grad()
    return total, found


def assert_same_gradient(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm().clamp(min=1e-30)
        # A gradient that is 0 by symmetry (GPT-2's key bias) is rounding noise on both sides.
        assert error < relative or value.norm() < 1e-9, f"{name}: {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_shared_prompts_equal_one_sequence_at_a_time(
    family: str,
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    """Float64 weights; norms and rotations inside the models are float32, hence 1e-6."""
    samples = make_samples()
    weights = np.random.default_rng(3).uniform(0.01, 0.1, len(samples))
    policy = make_policy(family, torch.float64)
    trainer = LocalTrainer(policy, policy_gradient, TrainConfig(), temperature=0.7)
    loss = 0.0
    for row in pack(samples, 1000, True, weights):
        value, *_ = trainer._row_loss(row, len(samples), None)  # pyright: ignore[reportPrivateUsage]
        value.backward()
        loss += float(value.detach())
    found = gradients(policy)

    plain = make_policy(family, torch.float64)
    plain.module.set_attn_implementation("sdpa")
    expected = torch.zeros((), dtype=torch.float64)
    for sample, weight in zip(samples, weights, strict=True):
        trained = torch.tensor(sample.tokens["trained"])
        terms = -torch.tensor(sample.advantages) * plain_logprobs(plain.module, sample, 0.7)
        expected = expected + weight * terms[trained].sum()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradient(found, gradients(plain), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_left_padded_and_packed_second_give_equal_logprobs(
    family: str, make_policy: Callable[..., Policy], make_samples: Callable[..., list[Sample]]
):
    """LP5, LP7: five tokens alone, behind 7 of padding, and second in a row; responses of 2 and 4
    tokens keep their own values and lengths."""
    first, second = make_samples(groups=2, members=1, gaps=False)
    long = Sample(0, 0, first.prompt_ids, first.tokens.repeat(4)[:4], np.ones(4, np.float32), 1.0)
    short = Sample(1, 0, (9, 5, 30), second.tokens.repeat(2)[:2], np.ones(2, np.float32), 1.0)
    policy = make_policy(family)
    trainer = LocalTrainer(policy, None, TrainConfig())  # pyright: ignore[reportArgumentType]
    layouts: list[list[Array]] = []
    for samples in ([long, short], [long], [short]):
        rows = pack(samples, 1000, True, np.ones(len(samples)))
        assert len(rows) == 1
        layouts.append(unpack([trainer.logprobs(row) for row in rows], rows, samples))
    together, (long_alone,), (short_alone,) = layouts
    policy.module.set_attn_implementation("sdpa")
    with torch.no_grad():
        padded = plain_logprobs(policy.module, short, 1.0, left_pad=7).numpy()
    assert [len(t) for t in together] == [4, 2]
    np.testing.assert_allclose(together[0], long_alone, atol=1e-5)
    np.testing.assert_allclose(together[1], short_alone, atol=1e-5)
    np.testing.assert_allclose(padded, short_alone, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_any_cut_gives_the_same_gradient(
    family: str,
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    """Row budget, prompt sharing, chunk size and sample order, float64 (norms are float32)."""
    samples = make_samples(groups=4)
    weights = np.full(len(samples), 1 / 40)
    policy = make_policy(family, torch.float64)
    cuts = [(4096, True, 1024), (4096, False, 1024), (1, True, 1024), (30, True, 3), (50, False, 7)]
    results = [
        row_gradients(
            policy,
            chosen,
            weights,
            TrainConfig(micro_batch_tokens=b, share_prompt=share, logprob_chunk_tokens=chunk),
            policy_gradient,
        )
        for b, share, chunk in cuts
        for chosen in (samples, samples[::-1])
    ]
    for loss, found in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert_same_gradient(found, results[0][1], 1e-6)


@pytest.mark.parametrize("family", [*FAMILIES, "opt"])
def test_activation_checkpointing_changes_nothing(
    family: str,
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    """The recomputed layers take the same plan and no dropout, so: bit for bit.

    GPT-2's dropout (0.1) is made of modules; OPT's layers call it on their own ``training``.
    """
    samples = make_samples()
    weights = np.full(len(samples), 1 / 40)
    results: list[tuple[float, dict[str, torch.Tensor]]] = []
    num_calls: list[int] = []
    for checkpointing in (False, True):
        policy = make_policy(family)
        if checkpointing:
            enable_activation_checkpointing(policy)
        calls: list[int] = []
        part = next(m for n, m in policy.module.named_modules() if n.endswith(("mlp", "fc1")))
        part.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        results.append(row_gradients(policy, samples, weights, TrainConfig(), policy_gradient))
        num_calls.append(len(calls))
    assert num_calls == [1, 2]  # the first layer really was computed twice
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
