"""The table of mismatch by option: one row for each that does something, and what it measures."""

from __future__ import annotations

import argparse
from typing import Any

import exact as bench
import numpy as np
import peers
import pytest
import torch

from lagzero.prepare.pack import pack
from lagzero.train.exactness import make_exact
from lagzero.train.traffic import _NoText
from lagzero.train.verify import tiny_policy


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """A small random model in place of the real one."""

    def load(_: Any, dtype: str, numerics: str = "fast", fp32_head: bool = False) -> Any:
        policy = tiny_policy("llama", getattr(torch, dtype))
        policy.tokenizer, policy.fp32_head = _NoText(), fp32_head
        return make_exact(policy) if numerics == "exact" else policy

    monkeypatch.setattr(bench, "load", load)
    monkeypatch.setattr(peers, "chat_prompts", lambda _, num: [[5, 6, 7 + n] for n in range(num)])
    return argparse.Namespace(
        model="",
        dtype=None,
        option=bench.OPTIONS,
        prompts=2,
        samples=2,
        new_tokens=9,
        decoder="auto",
    )


def cells(row: str) -> list[str]:
    return [each.strip() for each in row.strip("|").split("|")]


def test_the_table_has_a_row_for_each_type_and_option(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
):
    bench.mismatch(options)
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert len(cells(head)) == line.count("---") == 6
    named = [(row[0], row[1].strip("`")) for row in map(cells, rows)]
    single = [
        ("float32", each) for each in bench.OPTIONS if each not in ("fp32_head", "float32_trainer")
    ]
    half = [("float16", each) for each in bench.OPTIONS if each != "torch_decoder"]
    assert named == [*single, *(("bfloat16", each) for each in bench.OPTIONS), *half]
    largest = {name: float(cells(row)[3]) for name, row in zip(named, rows, strict=True)}
    assert [largest[dtype, "exact"] for dtype in bench.DTYPES] == [0, 0, 0]
    by_torch = ("float32", "torch_decoder"), ("float16", "fast"), ("bfloat16", "torch_decoder")
    gaps = [largest[name] for name in by_torch]
    assert 0 < gaps[0] < 1e-4 < gaps[1] < gaps[2]  # 24, 11 and 8 bits
    assert largest["float32", "rounded_softmax"] > 100 * largest["float32", "fast"]


def test_a_rounded_softmax_gives_rounded_log_probs(options: argparse.Namespace):
    policy = bench.load(options, "bfloat16")
    samples, _ = bench.rollout(policy, options)
    rows = pack(samples, 1024, True, np.ones(len(samples)))
    sampled = np.concatenate([row.behaviour_logprobs for row in rows]).astype(float)
    for softmax in (None, torch.bfloat16):
        gaps, _ = bench.step(policy, samples, backward=False, softmax=softmax)
        trained = torch.tensor(gaps + sampled)
        rounded = trained.bfloat16().double()
        assert torch.allclose(trained, rounded, rtol=0, atol=1e-12) is (softmax is not None)
