"""What the engine samples and reports is what the model's own plain forward pass says."""

from __future__ import annotations

import pytest
import torch

from lagzero.engine.request import Request, Sampling
from lagzero.types import Finish

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "llama in C", "qwen3 in C")
TOLERANCE = 5e-5  # nats; fp32 sums in another order, through 2 layers and a softmax over 300


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (length,), generator=generator).tolist())


def gap(plain, request: Request, completion) -> float:
    """Largest |engine - teacher-forced| log-prob of a completion."""
    ids = completion.tokens["id"].tolist()
    row = torch.tensor([[*request.prompt_ids, *ids]])
    with torch.no_grad():
        logits = plain(input_ids=row).logits[0, len(request.prompt_ids) - 1 : -1].double()
    expected = (logits / request.sampling.temperature).log_softmax(-1)
    expected = expected.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    return float((expected - torch.tensor(completion.tokens["logprob"].copy())).abs().max())


def mixed(temperature: float) -> list[Request]:
    """Prompts of 1 to 60 tokens, some starting alike, groups of 1 to 4, 1 to 40 new tokens."""
    shared = prompt(21, 99)
    prompts = [
        prompt(1, 1),
        prompt(60, 2),
        (*shared, *prompt(3, 3)),
        (*shared, *prompt(9, 4)),
        prompt(16, 5),
        prompt(17, 6),
    ]
    requests = []
    for number, (ids, group, new) in enumerate(
        zip(prompts, (2, 1, 4, 1, 3, 2), (40, 25, 12, 30, 9, 1), strict=True)
    ):
        seeds = tuple(1000 * number + member for member in range(group))
        requests.append(Request(number, ids, seeds, Sampling(new, temperature)))
    return requests


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"kv_cache_tokens": 120, "page_size": 4, "prefix_cache": False},  # preempts
        {"prefill_chunk_tokens": 7, "page_size": 4, "max_running": 5},
    ],
    ids=["ample", "preempted", "chunked"],
)
def test_logprobs_equal_a_teacher_forced_pass(family, temperature, limits, model, engine_of, drain):
    """LP1, LP7: positions and temperature are right, however the work was cut."""
    policy, plain = model(family)
    engine = engine_of(policy, **limits)
    requests = mixed(temperature)
    done = drain(engine, requests)
    assert len(done) == 13
    if "kv_cache_tokens" in limits:
        assert engine.counters.num_preemptions > 0
    gaps = {key: gap(plain, requests[key[0]], c) for key, c in done.items()}
    assert max(gaps.values()) <= TOLERANCE, gaps
    for (number, _), completion in done.items():
        assert len(completion.tokens) == requests[number].sampling.max_new_tokens
        assert completion.finish is Finish.LENGTH


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_generate(family, model, engine_of, drain):
    """Several end ids; the sampled end token is kept, as generate keeps it."""
    policy, plain = model(family)
    prompts = [prompt(length, 10 + length) for length in (3, 8, 30)]

    def generate(ids, ends):
        row = torch.tensor([ids])
        out = plain.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=24,
            eos_token_id=ends, pad_token_id=0,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()

    free = [generate(ids, None) for ids in prompts]
    ends = sorted({free[0][9], free[1][4]})
    sampling = Sampling(24, temperature=0, stop_ids=frozenset(ends))
    done = drain(
        engine_of(policy), [Request(n, ids, (0,), sampling) for n, ids in enumerate(prompts)]
    )
    for number, ids in enumerate(prompts):
        completion = done[number, 0]
        assert completion.tokens["id"].tolist() == generate(ids, ends)
        stopped = completion.tokens["id"][-1] in ends
        assert completion.finish is (Finish.STOP if stopped else Finish.LENGTH)
    assert done[0, 0].finish is Finish.STOP
    assert len(done[0, 0].tokens) <= 10
