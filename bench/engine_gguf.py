"""Write a Llama model folder as a GGUF file, for the llama.cpp peer of ``bench/engine.py``.

    python bench/engine_gguf.py FOLDER FILE

Weights are written in float32; llama.cpp makes other types of them itself. The file has no
vocabulary: the peer is given token ids and returns token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """Return what GGUF calls a tensor of transformers' Llama."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)  # model.layers.7.mlp.up_proj.weight
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Put the output rows of a query or key matrix in the order of GGUF's rotation.

    transformers rotates output i of a head together with output i + half, GGUF's Llama each even
    output with the odd one behind it.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def convert(folder: Path, file: Path) -> None:
    """Write a model folder as GGUF.

    Raises ValueError for a model that is not a Llama with unscaled rotation and no biases.
    """
    from gguf import GGUFWriter
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    kind, biased = rope.get("rope_type", "default"), config.get("attention_bias")
    if config["model_type"] != "llama" or kind != "default" or biased or config.get("mlp_bias"):
        raise ValueError(
            f"{folder}: a {config['model_type']} model with rotation {kind!r} is not written as "
            "GGUF, only a llama with rotation 'default' and no biases"
        )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for part in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            values = tensor.float().numpy()
            for projection, count in (("q_proj", heads), ("k_proj", kv_heads)):
                if projection in name:
                    values = interleaved(values, count)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
