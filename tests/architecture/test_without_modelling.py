"""An engine process must be ready soon: it waits for no library that trains."""

from __future__ import annotations

import subprocess
import sys

TRAINING = "torch._dynamo torch.distributed.tensor peft accelerate transformers.modeling_utils"
SERVE = """
import json, sys, tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from lagzero.build_serving import serve_engine
from lagzero.config_load import parse_config
from lagzero.engine.request import Request, Sampling
from lagzero.native.decoder import why_not

folder = Path(tempfile.mkdtemp())
settings = dict(
    model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, hidden_act="silu",
    rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
    max_position_embeddings=32, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)
(folder / "config.json").write_text(json.dumps(settings))
(folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
words = {f"w{i}": i for i in range(64)}
Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
square = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
shapes = {f"model.layers.0.{name}.weight": (32, 32) for name in square}
for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
    shapes[f"model.{name}.weight"] = (32,)
shapes["model.embed_tokens.weight"] = (64, 32)
save_file({n: torch.randn(s) for n, s in shapes.items()}, folder / "model.safetensors")
config = parse_config({
    "data": {"train": [{"kind": "arithmetic"}]},
    "score": {"rewards": [{"use": "number_answer"}]},
    "eval": {"before": False, "after": False},
    "model": {"path": str(folder), "dtype": "float32", "device": "cpu"},
    "engine": {"kv_cache_tokens": 1024},
})
for decoder in DECODERS:
    engine = serve_engine(config, decoder).engine
    engine.add(Request(0, (5, 6, 7), (1, 2), Sampling(4, 1.0)))
    done = []
    while engine.has_work:
        done += engine.step()
    assert [len(each.tokens) for each in done] == [4, 4], done
    assert (engine.policy.native is None) == (decoder == "torch"), why_not(engine.policy)
"""


def loaded(code: str) -> list[str]:
    """Run code in a fresh interpreter; return which training libraries it loaded."""
    tail = f"\nimport sys; print(*[m for m in {TRAINING.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_an_engine_that_decodes_in_c_samples_without_libraries_that_train():
    assert loaded(SERVE.replace("DECODERS", "(None, 'native')")) == []


def test_the_check_itself_sees_them():
    assert "transformers.modeling_utils" in loaded(SERVE.replace("DECODERS", "('torch',)"))
