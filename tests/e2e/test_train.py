"""Whole runs from a recipe: what is in the folder afterwards, and what can be done with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lagzero.observe.metrics import read_metrics


def test_a_run_leaves_its_configuration_metrics_checkpoints_and_policy(whole_run: Path):
    config = yaml.safe_load((whole_run / "config.yaml").read_text())
    assert config["schedule"]["steps"] == 6
    assert config["rollout"]["temperature"] == 1.0  # defaults are written down too
    assert [r["step"] for r in read_metrics(whole_run / "metrics.jsonl")] == list(range(7))
    checkpoints = sorted(p.name for p in (whole_run / "checkpoints").iterdir())
    assert checkpoints == ["step-000004", "step-000006"]  # keep: 2
    assert not list(whole_run.glob(".*"))


def test_training_raises_the_reward(whole_run: Path):
    rewards = [r["reward/mean"] for r in read_metrics(whole_run / "metrics.jsonl")[1:]]
    assert rewards[-1] > rewards[0] + 0.05


def test_evaluations_are_made_before_and_at_every_second_step(whole_run: Path):
    found = [
        r["step"] for r in read_metrics(whole_run / "metrics.jsonl") if "eval/greedy_accuracy" in r
    ]
    assert found == [0, 2, 4, 6]


def test_a_step_reports_the_tokens_that_it_sampled_itself(whole_run: Path):
    """Evaluations sample too, and must not be counted as the next step's."""
    for line in (whole_run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "engine/num_sampled_tokens" in record:
            sampled = record["length/mean"] * record["rollouts/count"]
            assert record["engine/num_sampled_tokens"] == pytest.approx(sampled)


def test_the_untouched_policy_agrees_with_its_engine_at_every_step(whole_run: Path):
    gaps = [r["mismatch/kl_k3"] for r in read_metrics(whole_run / "metrics.jsonl")[1:]]
    assert max(gaps) < 1e-9  # fp32 and one version: rounding only


def test_the_policy_is_an_ordinary_model_folder(place: Any, whole_run: Path):
    model = AutoModelForCausalLM.from_pretrained(whole_run / "policy")
    start = AutoModelForCausalLM.from_pretrained(place.folder / "llama")
    tokenizer = AutoTokenizer.from_pretrained(whole_run / "policy")
    assert (
        tokenizer.chat_template
        == AutoTokenizer.from_pretrained(place.folder / "llama").chat_template
    )
    moved = [
        n
        for (n, new), old in zip(model.named_parameters(), start.parameters(), strict=True)
        if not torch.equal(new, old)
    ]
    assert len(moved) == len(list(start.parameters()))  # every weight was trained


def test_the_final_policy_is_the_last_checkpoints(whole_run: Path, weights: Any):
    newest = whole_run / "checkpoints" / "step-000006" / "policy"
    assert weights(whole_run / "policy") == weights(newest)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families_train_from_the_same_recipe(place: Any, family: str, weights: Any):
    recipe = place.recipe(
        family, run_dir=f"run-{family}", model__path=f"./{family}", schedule__steps=2
    )
    assert place.inside("train", recipe) == 0
    run = place.folder / f"run-{family}"
    steps = read_metrics(run / "metrics.jsonl")
    assert [r["step"] for r in steps if r["step"]] == [1, 2]
    assert max(r["mismatch/kl_k3"] for r in steps if "mismatch/kl_k3" in r) < 1e-9
    assert weights(run / "policy") != weights(place.folder / family)
    AutoModelForCausalLM.from_pretrained(run / "policy")


def test_an_adapter_run_ends_as_a_peft_folder_on_an_untouched_base(place: Any, lora_run: Path):
    """LO1: the base is bit-identical after training; only the adapter was written."""
    assert not list((lora_run / "policy").glob("model*"))
    base = AutoModelForCausalLM.from_pretrained(place.folder / "llama", dtype=torch.bfloat16)
    before = {n: p.clone() for n, p in base.named_parameters()}
    adapted = PeftModel.from_pretrained(base, str(lora_run / "policy"))
    lora_b = [p for n, p in adapted.named_parameters() if "lora_B" in n]
    assert lora_b
    assert all(bool(p.any()) for p in lora_b)  # fresh ones are 0
    left = {
        n.removeprefix("base_model.model.").replace(".base_layer", ""): p
        for n, p in adapted.named_parameters()
        if "lora_" not in n
    }
    assert left.keys() == before.keys()
    assert all(torch.equal(left[n], before[n]) for n in before)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
def test_an_engine_with_a_copy_in_another_type_follows_the_trainer(place: Any, lora: Any):
    name = "copy-lora" if lora else "copy"
    recipe = place.recipe(
        name,
        run_dir=name,
        model__dtype="bfloat16",
        model__lora=lora,
        engine__dtype="float32",
        engine__kv_cache_tokens=4096,
        schedule__steps=3,
    )
    assert place.inside("train", recipe) == 0
    steps = [r for r in read_metrics(place.folder / name / "metrics.jsonl") if r["step"]]
    assert [r["step"] for r in steps] == [1, 2, 3]
    # The trainer computes in bfloat16 (8 bits), so the gap is that of rounding, and does not grow
    # with the steps as it would if the copy stayed behind.
    assert max(r["mismatch/kl_k3"] for r in steps) < 5e-3


def test_a_finished_run_is_measured_by_its_folder(place: Any, whole_run: Path):
    done = place.lagzero("eval", "whole", "--eval.num_prompts=3")
    assert done.returncode == 0, done.stderr
    assert "Held-out accuracy of whole" in done.stdout
    greedy, sampled = (
        next(line for line in done.stdout.splitlines() if f" {kind} " in line)
        for kind in ("greedy", "sampled")
    )
    assert " 3 " in greedy
    assert " 3 " in sampled


def test_a_recipes_model_is_measured_untouched(
    place: Any, whole_run: Path, capsys: pytest.CaptureFixture[str]
):
    assert place.inside("eval", "whole.yaml", "--eval.num_prompts=3") == 0
    assert "Held-out accuracy of ./llama" in capsys.readouterr().out


def test_an_adapter_run_is_measured_by_its_folder(
    place: Any, lora_run: Path, capsys: pytest.CaptureFixture[str]
):
    assert place.inside("eval", "lora", "--eval.num_prompts=2") == 0
    assert "Held-out accuracy of lora" in capsys.readouterr().out


def test_overrides_win_over_the_recipe_and_are_written_down(place: Any):
    recipe = place.recipe("over")
    code = place.inside(
        "train", recipe, "--run_dir=over", "--schedule.steps=1", "--train.optimizer.lr=0.001"
    )
    assert code == 0
    config = yaml.safe_load((place.folder / "over" / "config.yaml").read_text())
    assert (config["schedule"]["steps"], config["train"]["optimizer"]["lr"]) == (1, 0.001)
    assert read_metrics(place.folder / "over" / "metrics.jsonl")[-1]["train/lr"] == 0.001


def test_a_time_limit_ends_a_run_as_finished(place: Any):
    recipe = place.recipe(
        "limit",
        run_dir="limit",
        schedule__time_limit_s=0.001,
        advantage={"zero_spread": "keep"},
    )
    assert place.inside("train", recipe) == 0
    assert (place.folder / "limit" / "policy").is_dir()
    assert len(read_metrics(place.folder / "limit" / "metrics.jsonl")) == 1


def test_finite_data_end_a_run_early_with_every_prompt_seen_once(place: Any):
    """RS1: ten prompts in steps of four are two full steps and one of two, and no more."""
    recipe = place.recipe(
        "finite",
        run_dir="finite",
        data__epochs=1,
        data__train=[{"kind": "jsonl", "path": "train.jsonl", "size": 10}],
        schedule__steps=50,
        advantage={"zero_spread": "keep"},
    )
    assert place.inside("train", recipe) == 0
    steps = read_metrics(place.folder / "finite" / "metrics.jsonl")
    assert [r["rollouts/count"] for r in steps] == [16, 16, 8]


def test_responses_of_one_token_train(place: Any):
    """RF6: the shortest response there is, EOS or not."""
    recipe = place.recipe(
        "one", run_dir="one", rollout={"group_size": 16, "max_new_tokens": 1}, schedule__steps=2
    )
    assert place.inside("train", recipe) == 0
    steps = [r for r in read_metrics(place.folder / "one" / "metrics.jsonl") if r["step"]]
    assert all(r["length/max"] == 1 for r in steps)
