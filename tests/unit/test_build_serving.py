"""What an engine process makes of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from lagzero import build_serving
from lagzero.config_load import parse_config
from lagzero.engine.engine import Engine
from lagzero.engine.request import Request, Sampling
from lagzero.native import decoder
from lagzero.native.modules import CausalLM
from lagzero.runtime.engine_process import Served


def serve(folder: str, engine: dict[str, Any], **model: Any) -> Served:
    chosen = {
        "data": {"train": [{"kind": "arithmetic"}]},
        "score": {"rewards": [{"use": "number_answer"}]},
        "eval": {"before": False, "after": False},
        "model": {"path": folder, "dtype": "float32", "device": "cpu", **model},
        "engine": {"kv_cache_tokens": 1024, **engine},
    }
    return build_serving.serve_engine(parse_config(chosen), None)


def samples(engine: Engine) -> list[Any]:
    """Ids, log-probs and versions of three responses."""
    engine.add(Request(0, (5, 9, 17), (1, 2, 3), Sampling(12, 1.0)))
    done: list[Any] = []
    while engine.has_work:
        done += engine.step()
    return [each.tokens.tolist() for each in sorted(done, key=lambda each: each.member)]


@pytest.mark.parametrize("engine", [{}, {"dtype": "bfloat16"}, {"weights": "int8"}], ids=str)
def test_it_samples_what_the_trainers_modules_would(
    engine: dict[str, str], llama: str, monkeypatch: pytest.MonkeyPatch
):
    """Bit for bit, although it loads none of transformers' modules."""
    light = serve(llama, engine)
    monkeypatch.setattr(build_serving, "load_light_policy", lambda _: None)
    whole = serve(llama, engine)
    assert isinstance(light.engine.policy.module, CausalLM)
    assert isinstance(whole.engine.policy.module, LlamaForCausalLM)
    assert light.engine.policy.native and whole.engine.policy.native
    assert list(light.weights) == list(whole.weights)
    assert samples(light.engine) == samples(whole.engine)


def test_with_products_of_integers_it_samples_by_them_and_packs_new_weights(llama: str):
    """Keys and values are integers too; a version's tokens are those of an engine made with it."""
    served, plain = serve(llama, {}, products="int16"), serve(llama, {})
    first = samples(served.engine)
    gaps = [abs(a[1] - b[1]) for a, b in zip(first[0], samples(plain.engine)[0], strict=False)]
    assert 0 < gaps[0] < 1e-3
    assert served.engine._cache.keys[0].dtype == torch.int16
    old = {name: weight.detach().clone() for name, weight in served.weights.items()}

    def become(weights: dict[str, torch.Tensor], version: int) -> Any:
        with torch.inference_mode():
            for name, weight in served.weights.items():
                weight.copy_(weights[name])
        served.engine.weights_changed(version)
        return samples(served.engine)

    other = become({name: 1.1 * each for name, each in old.items()}, 1)
    assert [each[0] for each in other[0]] != [each[0] for each in first[0]]

    def drawn(responses: list[Any]) -> list[Any]:
        return [[token[:2] for token in each] for each in responses]  # without versions

    assert drawn(become(old, 2)) == drawn(first)
    served.engine.release_memory()
    assert not served.engine.policy.native._packed
    assert drawn(samples(served.engine)) == drawn(first)


def test_with_adapters_or_without_c_it_runs_transformers_modules(
    llama: str, monkeypatch: pytest.MonkeyPatch
):
    def module(engine: dict[str, Any], **model: Any) -> Any:
        return serve(llama, engine, **model).engine.policy.module

    assert isinstance(module({}), CausalLM)
    assert isinstance(module({"decoder": "torch"}), LlamaForCausalLM)
    assert isinstance(module({"dtype": "float16"}), LlamaForCausalLM)
    assert isinstance(module({}, lora={"rank": 2}), LlamaForCausalLM)

    def broken() -> None:
        raise decoder.NotBuilt("no compiler today")

    monkeypatch.setattr(decoder, "library", broken)
    assert isinstance(module({}), LlamaForCausalLM)
