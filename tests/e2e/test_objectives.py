"""Whole runs of objectives with more than one model: a critic, a teacher, a reward model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lagzero.observe.metrics import read_metrics

PPO: dict[str, Any] = {
    "advantage": {
        "estimator": "gae",
        "normalize_std": False,
        "normalize_batch": True,
        "lam": 0.95,
    },
    "train__passes": 2,
}
OWN: dict[str, Any] = {"optimizer": {"lr": 0.02}, "warmup_steps": 1}
SHARED: dict[str, Any] = {"shared": True, "coefficient": 0.1}


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run / "metrics.jsonl") if r["step"]]


@pytest.fixture(scope="module", params=["own", "shared"])
def ppo_run(place: Any, request: pytest.FixtureRequest) -> Path:
    """Eight steps of PPO with a critic of its own, which warms up first, or with a shared trunk."""
    name = f"ppo-{request.param}"
    critic = OWN if request.param == "own" else SHARED
    recipe = place.recipe(
        name, run_dir=name, critic=critic, schedule__steps=8, rollout__group_size=6, **PPO
    )
    assert place.inside("train", recipe) == 0
    return place.folder / name


def test_ppo_learns_and_says_what_its_critic_does(ppo_run: Path):
    steps = steps_of(ppo_run)
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.05
    for record in steps:
        assert record["value/loss"] >= 0
        assert record.get("value/explained_variance", 1) <= 1  # none where all returns are 0
        assert abs(record["value/return_mean"]) < 2  # rewards are shares
    # values start at 0 and come to what is to be had
    assert steps[0]["value/mean"] == 0 < steps[-1]["value/mean"]
    warming = [r for r in steps if "policy/loss" not in r]
    assert len(warming) == (1 if ppo_run.name == "ppo-own" else 0)


def test_the_critic_is_no_part_of_the_policy_folder(place: Any, ppo_run: Path):
    for folder in (ppo_run / "policy", ppo_run / "checkpoints/step-000008/policy"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        model, info = loaded
        assert not info["missing_keys"] and not info["unexpected_keys"]
        start = AutoModelForCausalLM.from_pretrained(place.folder / "llama")
        moved = zip(model.parameters(), start.parameters(), strict=True)
        assert all(not torch.equal(new, old) for new, old in moved)


def test_a_resumed_ppo_run_is_the_same_run(
    place: Any, ppo_run: Path, records: Any, weights: Any, capsys: pytest.CaptureFixture[str]
):
    """The last two steps again, from the checkpoint before them: critic and moments included."""
    again = place.folder / f"{ppo_run.name}-again"
    shutil.copytree(ppo_run, again)
    shutil.rmtree(again / "checkpoints/step-000008")
    shutil.rmtree(again / "policy")
    assert place.inside("train", "--resume", again.name) == 0
    assert "step 6" in capsys.readouterr().out
    assert records(again) == records(ppo_run)
    assert weights(again / "policy") == weights(ppo_run / "policy")
    ours, theirs = (
        (run / "checkpoints/step-000008/trainer.safetensors").read_bytes()
        for run in (again, ppo_run)
    )
    assert ours == theirs


def test_a_critic_of_adapters_beside_a_policy_of_adapters(place: Any):
    recipe = place.recipe(
        "ppo-lora",
        run_dir="ppo-lora",
        model__lora={"rank": 4, "alpha": 8.0},
        critic={"optimizer": {"lr": 0.02}},
        schedule__steps=2,
        **PPO,
    )
    assert place.inside("train", recipe) == 0
    run = place.folder / "ppo-lora"
    assert len(steps_of(run)) == 2
    names = {path.name for path in (run / "policy").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names


def test_the_best_of_a_group_is_preferred_to_its_worst(place: Any):
    """Online DPO: both of a pair, and nothing else, are trained; the reward rises."""
    recipe = place.recipe(
        "dpo",
        run_dir="dpo",
        loss={"policy": "dpo", "reduction": "sequence_mean", "dpo_beta": 0.5},
        schedule__steps=8,
    )
    assert place.inside("train", recipe) == 0
    steps = steps_of(place.folder / "dpo")
    for record in steps:
        groups = record["groups/count"] - record["groups/zero_spread/count"]
        assert record["rollouts/trained/count"] == 2 * groups
        assert record["advantage/abs_max"] == 1
    assert steps[0]["preference/margin_mean"] == pytest.approx(0, abs=1e-4)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.05


@pytest.fixture(scope="module")
def teacher(place: Any) -> str:
    """A model of another family that has learnt what the reward wants."""
    recipe = place.recipe("teacher", run_dir="teacher", model__path="./qwen3", schedule__steps=40)
    place.inside("train", recipe)  # it may stop before, when every answer is right
    last = max((place.folder / "teacher" / "checkpoints").iterdir())
    assert steps_of(place.folder / "teacher")[-1]["reward/mean"] > 0.9
    return f"./teacher/checkpoints/{last.name}/policy"


@pytest.mark.parametrize(("where", "estimator"), [("advantage", "k1"), ("loss", "k2")])
def test_distillation_brings_the_policy_closer_to_its_teacher(
    place: Any, teacher: str, where: str, estimator: str
):
    """On the policy's own samples and without any reward: what the teacher likes gets likelier."""
    recipe = place.recipe(
        f"distil-{where}",
        run_dir=f"distil-{where}",
        model__reference=teacher,
        score={"rewards": [{"use": "rewards.py:evens", "weight": 0.0}]},
        advantage={"estimator": "none", "normalize_std": False},
        loss={"kl": {"coefficient": 1.0, "estimator": estimator, "where": where}},
        schedule__steps=40,
    )
    assert place.inside("train", recipe) == 0
    steps = steps_of(place.folder / f"distil-{where}")
    kl = [r[f"reference/kl_{estimator}"] for r in steps]
    assert kl[-1] < 0.6 * kl[0]
    part = "reward/part/evens/mean"
    assert all(r["reward/mean"] == 0 for r in steps)
    assert steps[-1][part] > steps[0][part] + 0.05


def test_ppo_from_human_feedback_with_all_four_models(place: Any):
    """Policy, critic, reference and reward model; the critic starts as the reward model."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = place.folder / "preferences"
    shutil.copytree(place.folder / "llama", folder)
    config = LlamaConfig.from_pretrained(folder)
    config.num_labels = 1
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    recipe = place.recipe(
        "rlhf",
        run_dir="rlhf",
        score={
            "rewards": [{"use": "reward_model", "options": {"path": "./preferences", "scale": 10}}]
        },
        critic={"path": "./preferences", "optimizer": {"lr": 0.02}},
        loss={"kl": {"coefficient": 0.02, "estimator": "k1", "where": "reward"}},
        schedule__steps=8,
        **PPO,
    )
    assert place.inside("train", recipe) == 0
    steps = steps_of(place.folder / "rlhf")
    assert steps[0]["value/mean"] != 0  # the reward model's own head
    assert steps[0]["reward/kl_per_token/mean"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["reward/kl_per_token/mean"] > 0.01
    assert steps[-1]["reward/penalised/mean"] > steps[0]["reward/penalised/mean"]
    assert steps[-1]["value/loss"] < steps[0]["value/loss"]
