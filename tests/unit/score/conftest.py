"""Tiny random models with a byte tokenizer that has a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so that scores differ
}


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<|begin|>", "<|end|>", "<|start|>"]
    plain = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *letters])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        chat_template=chat_template,
    )


@pytest.fixture(scope="session")
def models_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with: decoder, no_pad, encoder (reward models); two_labels; policy; no_template."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    one = {**SIZES, "num_labels": 1, "eos_token_id": 2}
    made: dict[str, Any] = {
        "decoder": LlamaForSequenceClassification(LlamaConfig(**one, pad_token_id=0)),
        "no_pad": LlamaForSequenceClassification(LlamaConfig(**one, pad_token_id=None)),
        "encoder": BertForSequenceClassification(BertConfig(**{**one, "pad_token_id": 0})),
        "two_labels": LlamaForSequenceClassification(LlamaConfig(**{**one, "num_labels": 2})),
        "policy": LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=2, pad_token_id=0)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    made["decoder"].save_pretrained(folder / "no_template")
    byte_tokenizer(None).save_pretrained(folder / "no_template")
    return folder
