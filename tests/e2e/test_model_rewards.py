"""A reward model, a judge and the overlong penalty in whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from lagzero.observe.metrics import read_metrics

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def saved(place: Any, name: str, model: Any) -> str:
    model.save_pretrained(place.folder / name)
    AutoTokenizer.from_pretrained(place.folder / "llama").save_pretrained(place.folder / name)
    return f"./{name}"


@pytest.fixture(scope="module")
def reward_model(place: Any) -> str:
    torch.manual_seed(7)
    config = LlamaConfig(**SIZES, num_labels=1, initializer_range=0.3)
    return saved(place, "reward-model", LlamaForSequenceClassification(config))


@pytest.fixture(scope="module")
def judge(place: Any) -> str:
    torch.manual_seed(8)
    return saved(place, "judge", LlamaForCausalLM(LlamaConfig(**SIZES)))


def test_a_run_is_rewarded_by_a_model_and_for_its_length(place: Any, reward_model: str):
    """Responses of at most 8 tokens, free up to 4: those of 8 lose 1, each reward by its weight."""
    rewards = [
        {"use": "reward_model", "options": {"path": reward_model, "dtype": "float32"}},
        {"use": "overlong", "weight": 0.5, "options": {"limit": 8, "buffer": 4}},
    ]
    recipe = place.recipe("modelled", run_dir="modelled", score__rewards=rewards, schedule__steps=2)
    assert place.inside("train", recipe) == 0
    for step in read_metrics(place.folder / "modelled" / "metrics.jsonl"):
        model = step["reward/part/reward_model/mean"]
        penalty = step["reward/part/overlong/mean"]
        assert -1 <= penalty < 0
        assert step["reward/mean"] == pytest.approx(model + 0.5 * penalty)
        assert step["rollouts/trained/count"] == 16
        assert step["reward/std"] > 0.01


def test_a_judge_that_decides_nothing_leaves_every_rollout_out(place: Any, judge: str, capsys: Any):
    """A random model writes no verdict: unscorable, with the reason, and never 0."""
    options = {"path": judge, "dtype": "float32", "max_new_tokens": 4, "kv_cache_tokens": 8192}
    recipe = place.recipe(
        "judged",
        run_dir="judged",
        score__rewards=[{"use": "judge", "options": options}],
        schedule__max_empty_steps=1,
    )
    assert place.inside("train", recipe) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "rollouts/unscorable/count=16" in said
    assert "the first because: judge: the judge's reply" in said
