"""Settings that cannot work together, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lagzero.config import Config
from lagzero.config_check import check, notes

SOUND: dict[str, Any] = {
    "data": {
        "train": [{"kind": "arithmetic"}],
        "eval": [{"kind": "arithmetic", "split": "eval"}],
    },
    "score": {"rewards": [{"use": "number"}]},
}


def config(*changes: tuple[str, Any]) -> Config:
    tree: dict[str, Any] = Config.model_validate(SOUND).model_dump()
    for path, value in changes:
        place: Any = tree
        *above, last = path.split(".")
        for part in above:
            place = place[int(part)] if isinstance(place, list) else place[part]
        place[int(last) if isinstance(place, list) else last] = value
    return Config.model_validate(tree)


def found(*changes: tuple[str, Any]) -> list[str]:
    return [line.split(": ")[0] for line in check(config(*changes))]


def test_a_sound_configuration_has_no_problem_and_no_note():
    assert check(config()) == []
    assert notes(config()) == []


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out"])
def test_a_group_of_one_is_refused_with_a_group_baseline(estimator: str):
    """LN7"""
    one = ("rollout.group_size", 1)
    assert found(one, ("advantage.estimator", estimator)) == ["rollout.group_size"]
    alone = (one, ("advantage.estimator", "none"), ("advantage.normalize_std", False))
    assert found(*alone) == []


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)])
def test_truncated_sampling_is_refused_in_training(name: str, value: float):
    """LP2"""
    lines = check(config((f"rollout.{name}", value)))
    assert len(lines) == 1
    assert lines[0].startswith(f"rollout.{name}: {value:g} cuts")
    assert f"set {name}: " in lines[0]


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("rollout.temperature", [("rollout.temperature", 0.0)]),
        ("rollout.stop.0", [("rollout.stop", [""])]),
        ("advantage.normalize_std", [("advantage.estimator", "none")]),
        ("advantage.resample_limit", [("advantage.resample_limit", 5)]),
        (
            "advantage.zero_spread",
            [
                ("advantage.zero_spread", "resample"),
                ("advantage.estimator", "none"),
                ("advantage.normalize_std", False),
            ],
        ),
        (
            "advantage.zero_spread",
            [
                ("advantage.zero_spread", "resample"),
                ("loss.kl", {"coefficient": 0.1, "where": "reward"}),
            ],
        ),
        ("loss.constant", [("loss.reduction", "constant")]),
        ("loss.constant", [("loss.constant", 5.0)]),
        ("score.rewards", [("score.rewards.0.weight", 0.0)]),
        ("train.optimizer.betas.1", [("train.optimizer.betas", (0.9, 1.0))]),
        ("train.optimizer.decay_steps", [("train.optimizer.decay_steps", 5)]),
        ("model.device", [("model.device", "gpu")]),
        ("model.path", [("model.path", "./no/such/folder")]),
        ("model.chat_template", [("model.chat_template", "chatml")]),
        ("model.chat_template", [("model.chat_template", "x" * 5000)]),
        ("model.system_prompt", [("data.chat", False), ("model.system_prompt", "Be brief.")]),
        ("model.lora.targets", [("model.lora", {"targets": []})]),
        ("model.lora.start", [("model.lora", {"start": "nowhere"})]),
        ("data.eval", [("data.eval", [])]),
        ("data.eval.0", [("data.eval.0.split", "train")]),
        ("data.answer_column", [("data.answer_column", "")]),
    ],
)
def test_each_impossible_setting_is_named_by_its_path(path: str, changes: list[tuple[str, Any]]):
    assert found(*changes) == [path]


def test_held_out_rows_may_come_from_the_same_kind_but_not_be_the_same_rows():
    assert found(("data.eval.0.split", "train"), ("data.eval.0.size", 7)) == ["data.eval.0"]
    assert found(("data.eval.0.split", "train"), ("data.eval.0.seed", 7)) == []


def test_no_held_out_prompts_are_needed_when_nothing_is_measured():
    empty = [("data.eval", []), ("eval.before", False), ("eval.after", False)]
    assert found(*empty) == []
    assert found(*empty, ("eval.every", 5)) == ["data.eval"]


def test_the_cache_has_to_hold_one_full_sequence_in_whole_pages():
    sizes = [("data.max_prompt_tokens", 40), ("rollout.max_new_tokens", 60)]
    sizes += [("engine.page_size", 16)]
    assert found(*sizes, ("engine.kv_cache_tokens", 112)) == []
    assert found(*sizes, ("engine.kv_cache_tokens", 111)) == ["engine.kv_cache_tokens"]
    assert "use at least 112" in check(config(*sizes, ("engine.kv_cache_tokens", 99)))[0]


def test_what_may_surprise_is_a_note_and_no_problem():
    changes = [
        ("train.micro_batch_tokens", 100),
        ("train.optimizer.warmup_steps", 100),
        ("data.eval.0.size", 10),
        ("loss.kl.where", "reward"),
        ("loss.kl.estimator", "k2"),
        ("model.lora", {"reference": "base"}),
    ]
    assert check(config(*changes)) == []
    assert [note.split(": ")[0] for note in notes(config(*changes))] == [
        "model.lora.reference",
        "eval.num_prompts",
        "train.micro_batch_tokens",
        "train.optimizer.warmup_steps",
        "loss.kl.where",
        "loss.kl.estimator",
    ]
    assert len(notes(config(*changes), training=False)) == 2
    assert notes(config(("loss.kl", {"coefficient": 0.1, "where": "reward"}))) == []


def test_a_fall_longer_than_what_warm_up_leaves_is_noted():
    falling = [("schedule.steps", 10), ("train.optimizer.schedule", "linear")]
    falling += [("train.optimizer.warmup_steps", 3)]
    assert notes(config(*falling, ("train.optimizer.decay_steps", 7))) == []
    (note,) = notes(config(*falling, ("train.optimizer.decay_steps", 8)))
    assert note.startswith("train.optimizer.decay_steps: 8 is more than the 7 of schedule.steps 10")


def test_the_shape_of_an_adapter_that_is_read_from_a_folder_is_noted_as_not_used(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    start = {"start": str(tmp_path), "reference": "base"}
    assert notes(config(("model.lora", start))) == []
    shaped = start | {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}
    assert check(config(("model.lora", shaped))) == []
    assert [note.split(": ")[0] for note in notes(config(("model.lora", shaped)))] == [
        "model.lora.rank",
        "model.lora.alpha",
        "model.lora.targets",
    ]


def test_measuring_alone_is_not_held_to_the_rules_of_training():
    changes = [
        ("rollout.temperature", 0.0),
        ("rollout.top_p", 0.9),
        ("rollout.group_size", 1),
        ("loss.reduction", "constant"),
    ]
    assert len(check(config(*changes))) == 4
    assert check(config(*changes), training=False) == []
    assert [p.split(": ")[0] for p in check(config(("data.eval", [])), training=False)] == [
        "data.eval"
    ]
    assert check(config(("model.device", "gpu")), training=False) != []


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    homely = [
        ("model.path", "~"),
        ("model.chat_template", "~/chat.jinja"),
        ("model.lora", {"start": "~"}),
    ]
    assert check(config(*homely)) == []
    assert config(*homely).model.lora.start == str(tmp_path)  # what every reader is given
    for name, value in (("path", "~/no"), ("chat_template", "~/no"), ("lora", {"start": "~/no"})):
        assert len(check(config((f"model.{name}", value)))) == 1


def test_exact_numerics_need_one_type_and_keys_of_the_present_weights():
    exact = ("model.numerics", "exact")
    assert found(exact, ("engine.dtype", "float32")) == ["engine.dtype"]  # auto may be bfloat16
    assert found(exact, ("engine.dtype", "float32"), ("model.dtype", "float32")) == []
    for decoder in ("auto", "native", "torch"):
        assert found(exact, ("engine.decoder", decoder)) == []
    ahead = config(exact, ("schedule.max_lag", 1))
    assert [note.split(":")[0] for note in notes(ahead)] == ["engine.kv_on_update"]
    assert notes(config(exact, ("schedule.max_lag", 1), ("engine.kv_on_update", "recompute"))) == []


def test_float16_is_for_measuring_and_for_engines():
    (problem,) = check(config(("model.dtype", "float16")))
    assert problem.startswith("model.dtype: float16 is not trained in")
    assert "bfloat16 or float32 (engine.dtype: float16" in problem
    assert check(config(("model.dtype", "float16")), training=False) == []
    assert found(("engine.dtype", "float16")) == []


def test_8_bit_weights_cannot_be_exact():
    exact, weights = ("model.numerics", "exact"), ("engine.weights", "int8")
    assert found(exact, weights) == ["engine.weights"]
    assert found(exact, weights, ("train.rounded_weights", True)) == ["engine.weights"]
    assert found(weights) == []


def test_products_of_integers_need_c_on_both_sides():
    int16 = ("model.products", "int16")
    assert found(int16) == found(int16, ("model.numerics", "exact")) == []
    others = [
        ("model.numerics", "fast"),
        ("model.lora", {"rank": 2}),
        ("engine.decoder", "torch"),
        ("engine.dtype", "bfloat16"),
        ("engine.weights", "int8"),
        ("model.device", "cuda:1"),
    ]
    float32 = ("model.dtype", "float32")
    for key, value in others:
        problems = check(config(int16, float32, (key, value)))
        told = [each for each in problems if each.startswith("model.products: int16")]
        assert len(told) == 1 and f"set {key}: " in told[0]
        assert not [
            each
            for each in check(config(float32, (key, value)))
            if each.startswith("model.products")
        ]
    for training in (True, False):
        problems = check(config(int16, float32, *others), training=training)
        assert len([each for each in problems if "in C" in each]) == len(others)


def test_rounded_weights_need_something_that_rounds():
    rounds = ("train.rounded_weights", True)
    assert found(rounds) == ["train.rounded_weights"]
    assert found(rounds, ("engine.weights", "fp8")) == []


def test_a_draft_needs_a_model_that_is_there(tmp_path: Path):
    draft = ("engine.speculate.kind", "draft")
    path = "engine.speculate.path"
    assert found(draft) == [path]
    assert found(draft, (path, str(tmp_path))) == []
    assert found(draft, (path, str(tmp_path / "none"))) == [path]
    assert found(draft, (path, "some/hub-id")) == []


def test_keys_of_speculation_that_do_nothing_are_noted():
    def noted(kind: str) -> list[str]:
        keys = {"tokens": 3, "max_running": 2, "match": 2, "path": "some/hub-id"}
        changed = [(f"engine.speculate.{name}", value) for name, value in keys.items()]
        lines = notes(config(("engine.speculate.kind", kind), *changed))
        assert all(line.endswith(f": not used while kind is {kind}") for line in lines)
        return [line.split(":")[0].rpartition(".")[2] for line in lines]

    assert noted("none") == ["tokens", "max_running", "match", "path"]
    assert noted("ngram") == ["path"]
    assert noted("draft") == ["match"]
