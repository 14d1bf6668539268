"""Policies that only sample, loaded without transformers' modelling, whose import takes seconds.

Where a model is one that ``native.modules`` reproduces bit for bit, an engine process is ready in
half the time. Nothing is guessed: whatever is not known here is loaded as the trainer loads it.
"""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from lagzero.config import ModelConfig
from lagzero.native.decoder import FAMILIES
from lagzero.native.modules import ROTARY_TYPES, CausalLM
from lagzero.numerics.memory import lazy_zeros
from lagzero.numerics.precision import pick_dtype
from lagzero.train.model import Policy, load_tokenizer, model_source, pick_device

# fmt: off
_LLAMA = frozenset((
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "rope_parameters", "max_position_embeddings",
))  # all that a Llama model is computed by
_OTHERS = frozenset((
    "sliding_window", "layer_types",
    "use_sliding_window", "max_window_layers",  # only say how layer_types came about
))  # what there is besides in the other families
_WITHOUT_EFFECT = frozenset((
    "transformers_version", "architectures", "model_type", "dtype", "output_hidden_states",
    "return_dict", "id2label", "label2id", "problem_type", "initializer_range", "use_cache",
    "attention_dropout", "pretraining_tp",
    "pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id",
))
# fmt: on
_KNOWN = _LLAMA | _OTHERS | _WITHOUT_EFFECT
_ALIGNED = 64  # numbers
_STORED = (torch.float32, torch.bfloat16, torch.float16)


def load_light_policy(config: ModelConfig) -> Policy | None:
    """Load a policy for sampling, or None for a model that needs transformers' own modules.

    None as well for a folder with which something is wrong: ``load_policy`` says what. Weights of
    the wanted type are not read but mapped from their files until they are used.

    Raises LagzeroError as ``load_policy`` does.
    """
    folder, device = Path(model_source(config.path)), pick_device(config.device)
    if device.type != "cpu" or not folder.is_dir():
        return None
    try:
        module = _module(folder, pick_dtype(config.dtype, device))
    except (OSError, ValueError, SafetensorError):
        return None
    if module is None:
        return None
    tokenizer, _ = load_tokenizer(config, module.config)
    return Policy(module.eval(), tokenizer, fp32_head=config.fp32_head, products=config.products)


def _module(folder: Path, dtype: torch.dtype) -> CausalLM | None:
    settings = _settings(folder)
    adapted = (folder / "adapter_config.json").exists()  # transformers would add the adapter
    if settings.model_type not in FAMILIES or adapted or not _reproduced(settings):
        return None
    module, weights = CausalLM(settings), _read(folder)
    shapes = {name: each.shape for name, each in module.named_parameters()}
    if shapes != {name: each.shape for name, each in weights.items()}:
        return None
    if any(each.dtype not in _STORED for each in weights.values()):
        return None
    module.fill(_of_type(weights, dtype))
    module.generation_config = _generation_config(folder, settings)
    return module


def _settings(folder: Path) -> Any:
    """Return the configuration of a folder.

    The class for Llama imports a second's worth, to know defaults and to read older files. Neither
    is needed for a folder that names all settings, as transformers 5 writes it.
    """
    named, _ = PreTrainedConfig.get_config_dict(folder)
    if (
        named.get("model_type") == "llama"
        and _LLAMA <= named.keys() <= _LLAMA | _WITHOUT_EFFECT
        and (named["rope_parameters"] or {}).keys() == {"rope_type", "rope_theta"}
        and "tokenizer_class" in get_tokenizer_config(folder)  # else its class would decide
    ):
        return PreTrainedConfig(**named)
    return AutoConfig.from_pretrained(folder)


def _reproduced(settings: Any) -> bool:
    """Whether a configuration of a known family asks for nothing that is not known here.

    A later transformers may give the family a setting; where it has its default, nobody asks.
    """
    unknown = [
        each
        for each in inspect.signature(type(settings)).parameters.values()
        if each.name not in _KNOWN and getattr(settings, each.name, each.default) != each.default
    ]
    layers = set(getattr(settings, "layer_types", None) or ())
    return (
        not unknown
        and settings.hidden_act == "silu"
        and settings.rope_parameters.get("rope_type") in ROTARY_TYPES
        and layers <= {"full_attention", "sliding_attention"}
        and getattr(settings, "quantization_config", None) is None
    )


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's safetensors files; empty where it has none."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return load_file(whole)
    if not index.is_file():
        return {}
    parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: each for part in parts for name, each in load_file(folder / part).items()}


def _of_type(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights as one type; those that are of another lie side by side, in huge pages.

    A decode step reads every weight once and waits for memory meanwhile.
    """
    others = {name: each for name, each in weights.items() if each.dtype != dtype}
    sizes = [-(-each.numel() // _ALIGNED) * _ALIGNED for each in others.values()]
    space = lazy_zeros((sum(sizes),), dtype, torch.device("cpu"))
    for (name, each), place in zip(others.items(), space.split(sizes), strict=True):
        others[name] = place[: each.numel()].view_as(each).copy_(each)
    return {**weights, **others}


def _generation_config(folder: Path, settings: Any) -> GenerationConfig:
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(settings)
