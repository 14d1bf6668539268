"""Checkpoints: complete or not there, and resumed from bit for bit."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lagzero.config import LoraConfig, OptimizerConfig, TrainConfig
from lagzero.errors import LagzeroError
from lagzero.prepare.pack import pack
from lagzero.train.checkpoint import Checkpoint, latest, load_checkpoint, save_checkpoint
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy, save_policy
from lagzero.train.step import LocalTrainer
from lagzero.types import Batch, Sample


def write_policy(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.txt").write_text("weights")


def save(run: Path, step: int, keep: int = 9, **parts: Any) -> Path:
    state = Checkpoint(step, {"w": torch.full((3,), float(step))}, {"version": step}, parts)
    return save_checkpoint(run, state, write_policy, keep)


def names(run: Path) -> list[str]:
    return sorted(f.name for f in (run / "checkpoints").iterdir())


def test_what_was_saved_is_read_back(tmp_path: Path):
    folder = save(tmp_path, 10, cursor={"next_index": 160}, seed=[1, 2])
    assert folder == tmp_path / "checkpoints" / "step-000010"
    found = load_checkpoint(folder, ("cursor",))
    assert found.step == 10
    assert found.values == {"version": 10}
    assert found.parts == {"cursor": {"next_index": 160}, "seed": [1, 2]}
    assert found.tensors["w"].tolist() == [10.0] * 3
    assert (folder / "policy" / "model.txt").read_text() == "weights"


def test_latest_passes_over_a_folder_that_was_cut_off(tmp_path: Path):
    """RS3: steps 9 and 10 are complete, 100 was cut off before its marker."""
    save(tmp_path, 9)
    save(tmp_path, 10)
    folder = save(tmp_path, 100)
    (folder / "complete.json").unlink()
    with pytest.warns(UserWarning, match=r"step-000100 was cut off.*resuming from step-000010"):
        assert latest(tmp_path) == tmp_path / "checkpoints" / "step-000010"
    with pytest.raises(LagzeroError, match="not written to its end"):
        load_checkpoint(folder)


def test_latest_goes_by_number_and_is_silent_when_all_is_well(tmp_path: Path):
    for step in (9, 1000000, 10):
        save(tmp_path, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-1000000"
    assert latest(tmp_path / "elsewhere") is None


def test_a_missing_cursor_is_refused(tmp_path: Path):
    """RS6: of a complete step-20 checkpoint only the cursor's file is gone."""
    folder = save(tmp_path, 20, cursor={"next_index": 320})
    (folder / "cursor.json").unlink()
    with pytest.raises(LagzeroError, match=r"cursor\.json: missing"):
        load_checkpoint(folder, ("cursor",))
    with pytest.raises(LagzeroError, match=r"cursor\.json: missing"):
        load_checkpoint(folder)


def test_a_part_that_was_never_written_is_refused(tmp_path: Path):
    folder = save(tmp_path, 20)
    with pytest.raises(LagzeroError, match=r"cursor\.json: never written"):
        load_checkpoint(folder, ("cursor",))


def test_a_shortened_file_is_refused(tmp_path: Path):
    folder = save(tmp_path, 20)
    tensors = folder / "trainer.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    with pytest.raises(LagzeroError, match=r"trainer\.safetensors: .* were written"):
        load_checkpoint(folder)


@pytest.mark.parametrize("failing", ["policy", "rename", "part"])
def test_a_failed_write_leaves_older_checkpoints_as_they_were(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 1, keep=1, cursor=1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = Checkpoint(2, {"w": torch.ones(3)}, {}, {"cursor": 2})
    with pytest.raises(LagzeroError, match=r"step 2 could not be written.*No space left"):
        if failing == "rename":
            monkeypatch.setattr(Path, "rename", full)
        if failing == "part":
            monkeypatch.setattr("lagzero.train.checkpoint._write_json", full)
        save_checkpoint(tmp_path, state, full if failing == "policy" else write_policy, keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-000001"]
    found = latest(tmp_path)
    assert found is not None
    assert load_checkpoint(found).parts == {"cursor": 1}


def test_only_the_newest_are_kept_and_never_before_a_newer_is_complete(tmp_path: Path):
    seen: list[list[str]] = []

    def look(folder: Path) -> None:
        write_policy(folder)
        seen.append([n for n in names(tmp_path) if n.startswith("step-")])

    for step in range(1, 5):
        save_checkpoint(tmp_path, Checkpoint(step, {}, {}, {}), look, keep=2)
    assert seen == [
        [],
        ["step-000001"],
        ["step-000001", "step-000002"],
        ["step-000002", "step-000003"],
    ]
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_a_lower_step_just_written_is_not_deleted(tmp_path: Path):
    """A run that went back to step 2 by hand keeps what it writes."""
    for step in (7, 8, 2):
        save(tmp_path, step, keep=1)
    assert "step-000002" in names(tmp_path)


def test_the_same_step_can_be_saved_again_and_a_death_in_between_loses_nothing(tmp_path: Path):
    save(tmp_path, 3, cursor=1)
    folder = save(tmp_path, 3, cursor=2)
    assert load_checkpoint(folder).parts == {"cursor": 2}
    assert names(tmp_path) == ["step-000003"]
    folder.rename(folder.with_name(".replaced-step-000003"))  # died between the two renames
    found = latest(tmp_path)
    assert found is not None
    assert load_checkpoint(found).parts == {"cursor": 2}


def test_what_json_cannot_hold_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path, 3, cursor=float("nan"))
    assert latest(tmp_path) is None


def batch(samples: list[Sample]) -> Batch:
    num = sum(int(s.tokens["trained"].sum()) for s in samples)
    rows = pack(samples, 48, True, np.full(len(samples), 1 / num))
    return Batch(rows, len(samples), num)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
def test_three_and_three_steps_equal_six(
    tmp_path: Path,
    kind: str,
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    policy_gradient: Any,
):
    """RS4: weights bit for bit, and steps 4 to 6 are other than 1 to 3."""
    config = TrainConfig(optimizer=OptimizerConfig(lr=0.003, schedule="cosine", warmup_steps=2))

    def fresh() -> LocalTrainer:
        policy = make_policy("llama", torch.float32 if kind == "float32" else torch.bfloat16)
        if kind == "lora":
            policy = add_lora(policy, LoraConfig(rank=4))
        return LocalTrainer(policy, policy_gradient, config, total_steps=6)

    def train(trainer: LocalTrainer, steps: range) -> list[float]:
        return [
            trainer.step(batch(make_samples(seed=s, version=s))).metrics["train/loss"]
            for s in steps
        ]

    straight = fresh()
    losses = train(straight, range(6))
    half = fresh()
    train(half, range(3))
    tensors, values = half.state_dict()
    folder = save_checkpoint(
        tmp_path,
        Checkpoint(3, tensors, values, {"cursor": {"next_index": 3}}),
        lambda place: save_policy(half.policy, place),
    )
    found = load_checkpoint(folder, ("cursor",))
    resumed = fresh()
    resumed.load_state_dict(found.tensors, found.values)
    assert resumed.version == 3
    assert train(resumed, range(found.parts["cursor"]["next_index"], 6)) == losses[3:]
    assert resumed.version == 6
    for name, weight in straight.policy.weights().items():
        assert torch.equal(weight, resumed.policy.weights()[name]), name
    for name, tensor in straight.state_dict()[0].items():
        assert torch.equal(tensor, resumed.state_dict()[0][name]), name
    if kind != "lora":
        plain = AutoModelForCausalLM.from_pretrained(folder / "policy")
        for name, weight in half.policy.weights().items():
            assert torch.equal(plain.get_parameter(name), weight)
    assert json.loads((folder / "trainer.json").read_text())["trainer"] == {"version": 3}
