"""The engine's benchmark: what it times, what it compares, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import engine as bench
import engine_breakdown
import engine_gguf
import numpy as np
import peers
import pytest
import roofline
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Request, Sampling
from lagzero.native.decoder import make_native
from lagzero.numerics.attention import ATTENTION, register
from lagzero.train.model import Policy


def llama(**more: Any) -> Any:
    """A small random model whose queries and keys have several heads."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, **more)).eval()


def job(**more: Any) -> peers.Job:
    """Two samples of one prompt, of up to 3 tokens, which 9 ends."""
    fields: dict[str, Any] = {
        "folder": "",
        "gguf": "",
        "dtype": "float32",
        "prompts": [[1, 2]],
        "samples": 2,
        "max_new_tokens": 3,
        "ends": [9],
        "temperature": 1.0,
        "threads": 1,
    }
    return peers.Job(**{**fields, **more})


class Clock:
    """Time of a thread that only passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(engine_breakdown.time, "thread_time", lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_a_part_inside_another_stops_its_clock(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    watch = engine_breakdown.Stopwatch()
    product = watch.wrap(lambda: clock.work(3), "matmul")

    def forward() -> None:
        clock.work(1)
        product()
        clock.work(1)

    layers = watch.wrap(forward, "layers")
    clock.work(2)
    layers()
    shares = watch.shares(wall_s=10)
    assert shares == pytest.approx(
        {
            "native": 0,
            "matmul": 0.3,
            "attention": 0,
            "sampling": 0,
            "layers": 0.2,
            "other": 0.2,
            "idle": 0.3,
        }
    )


def test_a_part_that_raises_is_left(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    watch = engine_breakdown.Stopwatch()

    def fail() -> None:
        clock.work(1)
        raise KeyError

    with pytest.raises(KeyError):
        watch.wrap(fail, "sampling")()
    clock.work(3)
    shares = watch.shares(wall_s=4)
    assert (shares["sampling"], shares["other"]) == (0.25, 0.75)


@pytest.mark.parametrize("native", [False, True])
def test_the_hooks_find_every_part_of_an_engine_and_the_rows_of_its_steps(
    monkeypatch: pytest.MonkeyPatch, native: bool
):
    for module_name, path, _ in engine_breakdown.HOOKS:  # they are put back afterwards
        *owners, name = path.split(".")
        owner: Any = engine_breakdown.importlib.import_module(module_name)
        for each in owners:
            owner = getattr(owner, each)
        monkeypatch.setattr(owner, name, getattr(owner, name))
    register()
    model = llama()
    model.set_attn_implementation(ATTENTION)
    policy = Policy(model, None)
    if native:
        assert make_native(policy) is None
    watched = engine_breakdown.watch_engine()
    assert not watched.missing

    class Decoder:
        def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
            return ""

    engine = Engine(policy, Decoder(), EngineLimits(kv_cache_tokens=256))
    engine.add(Request(0, (1, 2, 3, 4, 5), (1, 2), Sampling(3)))
    while engine.has_work:
        engine.step()
    assert watched.steps == [(5, 1), (2, 2), (2, 2)]
    shares = watched.shares(wall_s=10.0)
    assert math.isclose(sum(shares.values()), 1)
    parts = ["matmul", "sampling", "layers", "other"] + ["attention"] * (not native)
    assert min(shares[part] for part in parts) > 0
    assert len(watched.native) >= 3 * native


def test_rows_between_two_sizes_cost_what_lies_between():
    assert roofline._grid(6) == [1, 2, 4, 6]
    assert roofline._grid(1) == [1]
    assert [roofline._between(n, [1, 2, 6], [1.0, 3.0, 5.0]) for n in (1, 2, 3, 6)] == [
        1,
        3,
        3.5,
        5,
    ]


def test_the_bounds_count_every_step_and_weight():
    model = llama()
    out = roofline.measure(Policy(model, None), [(5, 1), (2, 2), (2, 0)])
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert out["weight_gb"] == pytest.approx((2 * layer + 64 * 64) * 4 / 1e9)
    assert out["num_steps"] == 3
    assert [rows for rows, _, _ in out["sizes"]] == [1, 2, 4, 5]
    assert out["read_s"] == pytest.approx(3 * out["weight_gb"] / out["read_gb_per_s"])


def test_gguf_holds_the_model_that_was_converted(tmp_path: Path):
    model = llama(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    model.save_pretrained(tmp_path)
    engine_gguf.convert(tmp_path, tmp_path / "model.gguf")
    from gguf import GGUFReader

    reader = GGUFReader(tmp_path / "model.gguf")
    tensors = {each.name: np.array(each.data) for each in reader.tensors}
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    assert len(tensors) == len(weights)
    for name, weight in weights.items():
        found = tensors[engine_gguf.gguf_name(name)]
        if "q_proj" in name or "k_proj" in name:
            # Outputs that are rotated together lie side by side there, halves of a head apart here.
            weight = np.stack(
                [weight.reshape(-1, 16, 64)[:, :8], weight.reshape(-1, 16, 64)[:, 8:]], 2
            ).reshape(weight.shape)
        np.testing.assert_array_equal(found, weight)
    theta = reader.get_field("llama.rope.freq_base")
    assert theta is not None
    assert theta.contents() == 5000.0


def test_gguf_refuses_what_it_would_write_wrong(tmp_path: Path):
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    for name, more in {
        "rope": {"rope_parameters": scaled},
        "bias": {"attention_bias": True},
    }.items():
        llama(**more).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match="only a llama with rotation 'default' and no biases"):
            engine_gguf.convert(tmp_path / name, tmp_path / "model.gguf")


def test_a_child_reports_what_was_sampled(capsys: pytest.CaptureFixture[str]):
    rollout = peers.Rollout([[4, 9], [5, 6, 7]], [[-1.0, -2.0], [-1.0, -1.0, -1.0]])
    peers.report(job(), rollout, 2.0, 1.0, 0.5)
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert (figures["tokens"], figures["tok_per_s"]) == (5, 2.5)
    assert figures["mean_logprob"] == pytest.approx(-1.2)


@pytest.mark.parametrize(
    ("rows", "logprobs", "message"),
    [
        ([[4, 9]], None, "1 samples, but 2"),
        ([[4, 9], [5, 6]], None, "sample 1 has 2 tokens"),
        ([[4, 9], [9, 6, 7]], None, "sample 1 has 3 tokens"),
        ([[4, 9], [5, 6, 7, 8]], None, "sample 1 has 4 tokens"),
        ([[4, 9], []], None, "sample 1 has 0 tokens"),
        ([[4, 9], [5, 6, 7]], [[-1.0], [-1.0] * 3], "sample 0: 2 tokens, 1 log-probs"),
    ],
)
def test_a_rollout_that_is_not_the_job_is_refused(rows: Any, logprobs: Any, message: str):
    with pytest.raises(ValueError, match=message):
        peers.report(job(), peers.Rollout(rows, logprobs), 1.0, 1.0, 1.0)


def test_generate_stops_at_end_ids_and_without_them_at_the_limit(tmp_path: Path):
    model = llama()
    policy = Policy(model, None)
    rows, _ = peers.generate(policy, [[1, 2], [3]], 3, 4, set())
    assert [len(row) for row in rows] == [4] * 6
    greedy, _ = peers.generate(policy, [[1, 2], [3]], 1, 4, set(), temperature=0.0)
    cut, _ = peers.generate(policy, [[1, 2], [3]], 1, 4, {greedy[0][1]}, temperature=0.0)
    assert cut[0] == greedy[0][: greedy[0].index(greedy[0][1]) + 1]


def test_common_prefix():
    assert bench.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert bench.common_prefix([1, 2], [1, 2, 4]) == 2
    assert bench.common_prefix([], [1]) == 0
