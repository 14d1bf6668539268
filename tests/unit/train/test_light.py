"""Policies that only sample are the trainer's, bit for bit, or are loaded as the trainer's are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from lagzero.config import ModelConfig
from lagzero.errors import LagzeroError
from lagzero.native.decoder import FAMILIES, Decoder, make_native, row_of
from lagzero.native.modules import CausalLM
from lagzero.numerics.packed import PackedPlan
from lagzero.train import light
from lagzero.train.light import load_light_policy
from lagzero.train.model import Policy, load_policy, stop_ids
from lagzero.train.quantised import quantised_copy

VOCABULARY, PAGE, LAYERS, NUM = 211, 4, 3, 23
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("mistral", {"sliding_window": 5}),
    ("mistral", {"sliding_window": None, "head_dim": 32}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ("qwen3", {"attention_bias": True, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
]


def write(folder: Path, family: str = "llama", parts: bool = False, **changes: Any) -> Any:
    """Save a random model, in several files with ``parts``; return it."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "eos_token_id": [7, 9],
        **changes,
    }
    torch.manual_seed(7)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for name, parameter in module.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # ones and zeros would hide a mistake
            parameter.data += 0.3 * torch.randn_like(parameter)
    module.save_pretrained(folder, max_shard_size="100KB" if parts else "1GB")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    text = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=text, eos_token="w9").save_pretrained(folder)
    return module


def both(folder: Path, dtype: str = "float32") -> tuple[Policy, Policy]:
    """Load what a folder holds as a trainer does, and as an engine does."""
    config = ModelConfig(path=str(folder), dtype=dtype, device="cpu")
    found = load_light_policy(config)
    assert found is not None and isinstance(found.module, CausalLM)
    return load_policy(config), found


def is_light(folder: Path) -> bool:
    config = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    return load_light_policy(config) is not None


def by_modules(policy: Policy) -> torch.Tensor:
    """Logits [T, V] of a packed row with a shared prompt, by the policy's own modules."""
    num = NUM // 3
    positions = np.concatenate([np.arange(num), *2 * [np.arange(num) + num]])
    plan = PackedPlan(positions, np.arange(3).repeat(num), np.array([-1, 0, 0]), policy.device)
    ids = torch.arange(3 * num) * 37 % VOCABULARY
    with torch.inference_mode():
        return policy.logits(policy.hidden(ids, torch.from_numpy(positions), plan))


def in_c(policy: Policy) -> torch.Tensor:
    """Logits [T, V] of a row of two sequences, by the C library."""
    decoder, lengths = Decoder(policy), [NUM - 9, 9]
    pages = [[0, 1, 2, 3], [4, 5, 6]]
    attention = policy.module.model.layers[0].self_attn
    shape = (7, 2, PAGE, attention.head_dim)
    keys, values = (
        [torch.zeros(shape, dtype=policy.dtype) for _ in range(LAYERS)] for _ in range(2)
    )
    places = [at for length in lengths for at in range(length)]
    ids = (torch.arange(NUM) * 53 % VOCABULARY).tolist()
    row = row_of(ids, places, list(range(NUM)), lengths, pages)
    return decoder.logits(keys, values, PAGE, row)


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_the_trainers_bits(
    family: str, changes: dict[str, Any], dtype: str, tmp_path: Path
):
    write(tmp_path, family, **changes)
    trained, found = both(tmp_path, dtype)
    assert found.dtype == trained.dtype == getattr(torch, dtype)
    want, got = trained.weights(), found.weights()
    assert list(want) == list(got)  # in the same order, so that a manifest is the same too
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert torch.equal(by_modules(trained), by_modules(found))
    assert torch.equal(in_c(trained), in_c(found))
    assert make_native(found) is None


def test_the_families_are_all_there():
    assert {family for family, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_several_files_is_put_together(tied: bool, tmp_path: Path):
    write(tmp_path, "qwen3", parts=True, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    trained, found = both(tmp_path)
    assert torch.equal(in_c(trained), in_c(found))
    head, table = (p().weight for p in (
        found.module.get_output_embeddings, found.module.get_input_embeddings
    ))  # fmt: skip
    assert (head is table) == tied


def test_what_a_folder_says_besides_weights_is_the_same(tmp_path: Path):
    write(tmp_path)
    for generation in (True, False):  # end ids of their own file, then those of the model's
        trained, found = both(tmp_path)
        ends = [stop_ids(each.module, each.tokenizer) for each in (trained, found)]
        assert ends[0] == ends[1] == (7, 9)
        assert trained.context_limit == found.context_limit == 64
        assert type(trained.tokenizer) is type(found.tokenizer)
        assert trained.tokenizer.get_vocab() == found.tokenizer.get_vocab()
        if generation:
            (tmp_path / "generation_config.json").unlink()


def test_a_folder_that_names_all_settings_needs_no_class_of_the_family(tmp_path: Path):
    write(tmp_path)
    settings = [each.module.config for each in both(tmp_path)]
    assert type(settings[1]) is PreTrainedConfig and type(settings[0]) is not PreTrainedConfig
    for name in (*light._LLAMA, "model_type", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(settings[0], name) == getattr(settings[1], name), name


@pytest.mark.parametrize("left_out", ["mlp_bias", "rope_parameters", "head_dim"])
def test_settings_that_a_file_leaves_out_are_those_of_the_family(left_out: str, tmp_path: Path):
    write(tmp_path)
    change(tmp_path, **{left_out: None})
    trained, found = both(tmp_path)
    assert type(found.module.config) is type(trained.module.config)
    assert torch.equal(in_c(trained), in_c(found))


def change(folder: Path, **settings: Any) -> None:
    """Rewrite config.json; None removes a setting."""
    file = folder / "config.json"
    known = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps({k: v for k, v in known.items() if v is not None}))


def test_weights_are_mapped_not_copied_and_can_be_replaced(tmp_path: Path):
    write(tmp_path)
    _, found = both(tmp_path)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / "model.safetensors") in maps.read_text()
    before, parameters = in_c(found), dict(found.module.named_parameters())
    decoder_sees = found.module.model.layers[1].mlp.up_proj.weight
    assert parameters["model.layers.1.mlp.up_proj.weight"] is decoder_sees
    decoder_sees.data = -decoder_sees.data
    assert not torch.allclose(in_c(found), before)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_an_8_bit_copy_is_that_of_the_trainers_modules(dtype: torch.dtype | None, tmp_path: Path):
    write(tmp_path, "qwen2")
    trained, found = (quantised_copy(each, "int8", dtype) for each in both(tmp_path))
    assert torch.equal(in_c(trained), in_c(found))
    assert torch.equal(by_modules(trained), by_modules(found))


def test_a_copy_of_another_type_keeps_its_angles(tmp_path: Path):
    write(tmp_path)
    trained, found = (each.cast_copy(torch.bfloat16) for each in both(tmp_path))
    assert torch.equal(in_c(trained), in_c(found))


OTHERS: dict[str, dict[str, Any]] = {
    "another activation": {"hidden_act": "gelu"},
    "angles that depend on the length": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    },
    "weights that transformers converts": {"quantization_config": {"quant_method": "fp8"}},
    "a setting with an effect elsewhere": {"is_encoder_decoder": True},
    "a head that the file has not": {"vocab_size": VOCABULARY + 1},
    "a bias that the file has not": {"attention_bias": True},
    "no biases that the file has": {"mlp_bias": False},
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_is_not_known_needs_transformers_modules(what: str, tmp_path: Path):
    write(tmp_path, mlp_bias=what == "no biases that the file has")
    assert is_light(tmp_path)
    change(tmp_path, **OTHERS[what])
    assert not is_light(tmp_path)


def test_other_families_need_transformers_modules(tmp_path: Path):
    write(tmp_path, "olmo2")
    assert not is_light(tmp_path)


def test_a_setting_that_a_later_transformers_adds_is_noticed(tmp_path: Path):
    """Only where a model asks for it."""
    write(tmp_path, "qwen2")

    class Later:
        def __init__(self, num_key_value_heads: int = 2, value_gates: bool = False): ...

    asked = Later()
    vars(asked).update(vars(AutoConfig.from_pretrained(tmp_path)))
    assert light._reproduced(asked)
    asked.value_gates = True
    assert not light._reproduced(asked)


def test_files_that_are_not_as_expected_need_transformers_modules(tmp_path: Path):
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    saved = {each: tensor.clone() for each, tensor in weights.items()}
    for wrong in (
        {k: v for k, v in saved.items() if k != name},
        {**saved, "model.layers.9.mlp.up_proj.weight": saved[name].clone()},
        {**saved, name: saved[name][:-1].clone()},
        {**saved, name: saved[name].to(torch.float8_e4m3fn)},
    ):
        file.unlink()  # still mapped by what was loaded from it
        save_file(wrong, file, metadata={"format": "pt"})
        assert not is_light(tmp_path)
    file.unlink()
    assert not is_light(tmp_path)  # there may be files of another kind
    save_file(saved, file, metadata={"format": "pt"})
    assert is_light(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert not is_light(tmp_path)


def test_a_file_that_was_cut_off_is_left_to_the_trainers_way(tmp_path: Path):
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert not is_light(tmp_path)


def test_what_is_no_model_is_refused_in_the_same_words(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for path in (str(tmp_path / "nowhere"), str(tmp_path / "empty")):
        messages: list[str] = []
        for load in (load_policy, load_light_policy):
            with pytest.raises(LagzeroError) as refused:
                load(ModelConfig(path=path, device="cpu"))
            messages.append(str(refused.value))
        assert messages[0] == messages[1]
    write(tmp_path / "unknown")
    change(tmp_path / "unknown", model_type="no-such-family")
    assert not is_light(tmp_path / "unknown")
    (tmp_path / "unknown" / "config.json").write_text("{")
    assert not is_light(tmp_path / "unknown")
    write(tmp_path / "wordless")
    (tmp_path / "wordless" / "tokenizer.json").unlink()
    for load in (load_policy, load_light_policy):
        with pytest.raises(LagzeroError, match="could not be loaded as a causal language model"):
            load(ModelConfig(path=str(tmp_path / "wordless"), device="cpu"))
