"""The task and the small model: write the given letters as capitals, in any order, each once.

There are many right answers, so a policy that has learnt the task still draws among likely tokens,
and a sampler that differs from the trainer still differs on them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, BEGIN, END, ASK = "<pad>", "<s>", "</s>", ">"
VOCABULARY = [PAD, BEGIN, END, ASK, *LETTERS, *LETTERS.upper()]
SMOOTHING = 0.05  # share of the warm-up's targets spread over all tokens
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.12,
}


def each_once(
    prompts: Sequence[str], completions: Sequence[str], **columns: Any
) -> list[float | None]:
    """Return 1 for a reply that holds the prompt's letters as capitals, each once, else 0."""
    return [
        float(Counter(reply) == Counter(prompt[: -len(ASK)].upper()))
        for prompt, reply in zip(prompts, completions, strict=True)
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a letter."""
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=PAD, bos_token=BEGIN, eos_token=END
    )


def draw_letters(num_rows: int, num_letters: int, seed: int) -> list[str]:
    """Draw prompts: each a string of different letters in random order."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.permutation(list(LETTERS))[:num_letters]) for _ in range(num_rows)]


def write_prompts(path: Path, letters: Sequence[str]) -> None:
    """Write one prompt a line, as ``data.train`` reads it."""
    path.write_text("".join(json.dumps({"prompt": row + ASK}) + "\n" for row in letters))


def train_supervised(
    folder: Path, num_letters: int, num_steps: int, batch: int = 64, seed: int = 0
) -> None:
    """Make the model that all runs start from, and save it with its tokenizer.

    It sees prompts with random right answers. Its targets are smoothed, so that it knows the task
    and yet draws a wrong letter now and then: what reinforcement learning has to take away.
    """
    torch.manual_seed(seed)
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    module: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(VOCABULARY), **SIZES, **ends))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=num_steps, pct_start=0.1
    )
    rng = np.random.default_rng(seed)
    first = VOCABULARY.index(LETTERS[0])
    for _ in range(num_steps):
        asked = np.array([rng.permutation(26)[:num_letters] for _ in range(batch)]) + first
        answers = rng.permuted(asked, axis=1) + len(LETTERS)
        ask, end = (np.full((batch, 1), VOCABULARY.index(token)) for token in (ASK, END))
        ids = torch.as_tensor(np.concatenate([asked, ask, answers, end], axis=1))
        logits = module(ids[:, :-1]).logits[:, num_letters:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, num_letters + 1 :].flatten(), label_smoothing=SMOOTHING
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    module.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
