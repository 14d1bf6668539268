"""Tiny random models, a recipe that learns in seconds, and the program as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lagzero.cli import main

ROOT = Path(__file__).parents[2]
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_REWARD = '''
"""Graded rewards: the share of a reply's characters that are even digits; and broken ones."""
import os
import time


def evens(prompts, completions, **columns):
    texts = [completion if isinstance(completion, str) else completion[0]["content"]
             for completion in completions]
    return [sum(c in "02468" for c in text) / max(1, len(text)) for text in texts]


def slow(prompts, completions, **columns):
    time.sleep(0.15)
    return evens(prompts, completions)


def equal(prompts, completions, **columns):
    return [0.0] * len(completions)


def broken(prompts, completions, **columns):
    raise RuntimeError("the grader is out of order")


def nothing(prompts, completions, **columns):
    return [None] * len(completions)
'''


@dataclass(frozen=True)
class Place:
    """A folder with tiny models, data and rewards; the working directory of every run."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "lagzero.cli", *arguments]

    def lagzero(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the program to its end."""
        return subprocess.run(
            self.command(arguments),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def inside(self, *arguments: str) -> int:
        """Run the program in this process, which saves loading torch again."""
        here = Path.cwd()
        os.chdir(self.folder)
        try:
            return main(arguments)
        finally:
            os.chdir(here)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the program in a process group of its own, output joined."""
        return subprocess.Popen(
            self.command(arguments),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def recipe(self, name: str, **changes: Any) -> str:
        """Write the tiny recipe with dotted keys changed (a dot is written __); return its name."""
        tree = _recipe()
        for key, value in changes.items():
            *path, last = key.split("__")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        if (folder := changes.get("run_dir")) is not None:
            assert not (self.folder / folder).exists(), f"another test has a run in {folder}"
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        return f"{name}.yaml"


def _recipe() -> dict[str, Any]:
    return {
        "seed": 3,
        "model": {"path": "./llama", "dtype": "float32", "device": "cpu", "threads": 1},
        "data": {
            "train": [{"kind": "jsonl", "path": "train.jsonl"}],
            "eval": [{"kind": "jsonl", "path": "eval.jsonl"}],
        },
        "score": {"rewards": [{"use": "rewards.py:evens"}]},
        "rollout": {"group_size": 4, "max_new_tokens": 8},
        "engine": {"kv_cache_tokens": 4096},
        "schedule": {"steps": 6, "groups_per_step": 4},
        "train": {"optimizer": {"lr": 0.02}, "micro_batch_tokens": 128},
        "eval": {"num_prompts": 4, "before": False, "after": False},
        "checkpoint": {"every": 2, "keep": 2},
    }


def _save_models(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<|begin|>", "<|end|>", "<|start|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    merged = ["he", "in", "er", "an"]
    vocabulary |= {pair: len(vocabulary) + i for i, pair in enumerate(merged)}
    plain = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in merged]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        chat_template=_TEMPLATE,
    )
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    layers = ["sliding_attention", "full_attention"]
    torch.manual_seed(5)
    gemma = Gemma3TextConfig(
        head_dim=16, sliding_window=8, layer_types=layers, query_pre_attn_scalar=16, **sizes
    )
    for name, model in (
        ("llama", LlamaForCausalLM(LlamaConfig(**sizes))),
        ("qwen3", Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes))),
        ("gemma3", Gemma3ForCausalLM(gemma)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    _save_models(folder)
    (folder / "rewards.py").write_text(_REWARD)
    for name, first, number in (("train", 10, 40), ("eval", 60, 6)):
        rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(first, first + number)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Place(folder)


@pytest.fixture(scope="session")
def whole_run(place: Place) -> Path:
    """Six uninterrupted steps, with an evaluation every second one: what others are compared to."""
    recipe = place.recipe("whole", run_dir="whole", eval__every=2, eval__before=True)
    done = place.lagzero("train", recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    return place.folder / "whole"


@pytest.fixture(scope="session")
def lora_run(place: Place) -> Path:
    """Three steps of an adapter on a bfloat16 model."""
    lora = {"rank": 4, "alpha": 8.0}
    recipe = place.recipe(
        "lora", run_dir="lora", model__lora=lora, model__dtype="bfloat16", schedule__steps=3
    )
    assert place.inside("train", recipe) == 0
    return place.folder / "lora"


@pytest.fixture(scope="session")
def records() -> Callable[[Path], list[dict[str, Any]]]:
    """A function (run) -> its metrics lines, in order, without schema, times and peak sizes."""

    def same_each_time(name: str) -> bool:
        is_time = name.startswith("time/") or name.endswith(("_s", "tok_per_s"))
        return not is_time and name != "engine/max_used_pages"  # a peak since the process began

    def read(run: Path) -> list[dict[str, Any]]:
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [
            {name: value for name, value in line.items() if same_each_time(name)}
            for line in lines
            if "schema" not in line
        ]

    return read


@pytest.fixture(scope="session")
def weights() -> Callable[[Path], dict[str, Any]]:
    """A function (folder of a policy) -> its tensors as bytes, by name."""
    from safetensors.torch import load_file

    def read(policy: Path) -> dict[str, Any]:
        (file,) = policy.glob("*.safetensors")
        return {n: t.float().numpy().tobytes() for n, t in load_file(file).items()}

    return read
