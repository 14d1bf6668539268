"""What the user sets wins over the algorithm, and what that leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from lagzero.algorithms.apply import apply
from lagzero.config import Config
from lagzero.config_load import Rules, load_config, to_yaml
from lagzero.errors import ConfigError

BASE = """\
data:
  train: [{kind: arithmetic}]
score:
  rewards: [{use: number}]
eval: {before: false, after: false}
"""


@pytest.fixture
def recipe(tmp_path: Path):
    def write(text: str = "") -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(BASE + text)
        return path

    return write


def problems(path: Path, *overrides: str, training: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, Rules(training))
    return list(caught.value.problems)


def test_a_name_fills_in_what_the_file_leaves_open(recipe):
    config = load_config(recipe("algorithm: dapo\nloss: {clip_high: 0.25}\n"))
    assert config.algorithm == "dapo"
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.25)
    assert config.advantage.zero_spread == "resample"


def test_a_users_value_that_is_the_default_wins_as_well(recipe):
    text = "algorithm: gspo\nloss: {clip_low: 0.2, clip_high: 0.2}\n"
    assert load_config(recipe(text)).loss.clip_low == 0.2
    assert load_config(recipe("algorithm: gspo\n")).loss.clip_low == 3e-4


def test_the_command_line_wins_over_both(recipe):
    text = "algorithm: dapo\nloss: {clip_high: 0.25}\n"
    config = load_config(recipe(text), ["--loss.clip_high=0.3", "--advantage.truncated=keep"])
    assert config.loss.clip_high == 0.3
    assert config.advantage.truncated == "keep"


def test_the_command_line_may_name_change_or_take_back_an_algorithm(recipe):
    assert load_config(recipe(), ["--algorithm=olmo3"]).loss.clip_high == 0.272
    text = "algorithm: dapo\n"
    assert load_config(recipe(text), ["--algorithm=olmo3"]).loss.clip_high == 0.272
    assert load_config(recipe(text), ["--algorithm=null"]) == load_config(recipe())


def test_without_a_name_nothing_is_filled_in():
    tree = {"loss": {"clip_low": 0.1}}
    assert apply(tree).tree == tree
    assert apply(tree).filled == ()


def test_the_tree_and_blocks_that_it_shares_are_left_alone():
    shared = {"clip_low": 0.1}
    tree = {"algorithm": "dapo", "loss": shared, "other": shared}
    out = apply(tree).tree
    assert out["loss"]["clip_high"] == 0.28
    assert shared == {"clip_low": 0.1}
    assert out["other"] is shared
    assert tree["loss"] is shared


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("drgrpo", "dr_grpo"),
        ("dappo", "dapo"),
        ("olmo-3", "olmo3"),
        ("reinforce++", "reinforce"),
        ("scale_rl", "scalerl"),
    ],
)
def test_a_misspelt_name_meets_the_nearest(recipe, name: str, near: str):
    (problem,) = problems(recipe(f"algorithm: {name}\n"))
    assert problem.startswith(f"algorithm: found the text '{name}'; valid: one of grpo, dr_grpo, ")
    assert problem.endswith(f"; did you mean {near}?")


@pytest.mark.parametrize("value", ["7", "[dapo]", "{name: dapo}", "true"])
def test_what_is_no_name_is_refused_by_its_type(recipe, value: str):
    (problem,) = problems(recipe(f"algorithm: {value}\n"))
    assert problem.startswith("algorithm: found ")


# --- values that other keys decide ----------------------------------------------------------------


def test_dr_grpos_constant_is_the_length_limit_wherever_that_is_set(recipe):
    assert load_config(recipe("algorithm: dr_grpo\n")).loss.constant == 256
    text = "algorithm: dr_grpo\nrollout: {max_new_tokens: 24}\n"
    assert load_config(recipe(text)).loss.constant == 24
    assert load_config(recipe(text), ["--rollout.max_new_tokens=48"]).loss.constant == 48
    assert load_config(recipe(text), ["--loss.constant=3000"]).loss.constant == 3000


def test_a_length_limit_that_is_no_number_is_told_once(recipe):
    found = problems(recipe("algorithm: dr_grpo\nrollout: {max_new_tokens: long}\n"))
    assert found == ["rollout.max_new_tokens: found the text 'long'; valid: a whole number > 0"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("algorithm: dr_grpo\nloss: {reduction: token_mean}\n", "loss.constant"),
        ("algorithm: grpo\nloss: {kl: {coefficient: 0}}\n", "loss.kl.estimator"),
        ("algorithm: olmo3\nloss: {correction: {kind: none}}\n", "loss.correction.high"),
        ("algorithm: dapo\nloss: {policy: cispo}\n", "loss.clip_high"),
        ("algorithm: scalerl\nstaleness: {preset: sync}\n", "schedule.max_lag"),
        ("algorithm: ppo\ncritic: {shared: true}\n", "critic.optimizer.lr"),
        ("algorithm: ppo\ncritic: null\n", "critic.clip"),
        ("algorithm: ppo\nadvantage: {estimator: group_mean}\n", "critic.clip"),
    ],
)
def test_a_key_goes_with_the_choice_that_it_belongs_to(text: str, path: str):
    from lagzero import config_yaml

    assert path not in apply(config_yaml.parse(text)[0]).filled


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("algorithm: grpo\nloss: {kl: {coefficient: 0.01}}\n", "loss.kl.estimator"),
        ("algorithm: olmo3\nloss: {correction: {kind: truncate}}\n", "loss.correction.high"),
        ("algorithm: scalerl\nstaleness: {preset: null}\n", "schedule.max_lag"),
        ("algorithm: ppo\ncritic: {shared: false}\n", "critic.optimizer.lr"),
        ("algorithm: ppo\ncritic: {}\n", "critic.clip"),
    ],
)
def test_a_key_stays_where_that_choice_is_the_algorithms_own(text: str, path: str):
    from lagzero import config_yaml

    assert path in apply(config_yaml.parse(text)[0]).filled


# --- messages -------------------------------------------------------------------------------------


def test_what_the_user_has_to_give_is_one_clear_line(recipe):
    assert problems(recipe("algorithm: distill\n")) == [
        "model.reference: missing; algorithm distill needs the teacher there, a folder or hub id "
        "with the same tokenizer"
    ]
    assert problems(recipe("algorithm: distill\nmodel: {reference: null}\n"))[0].startswith(
        "model.reference: missing"
    )
    config = load_config(recipe("algorithm: distill\nmodel: {reference: org/teacher}\n"))
    assert config.model.reference == "org/teacher"


def test_measuring_needs_no_teacher(recipe):
    text = BASE.replace("data:\n", "data:\n  eval: [{kind: arithmetic, split: eval}]\n")
    path = recipe().with_name("measure.yaml")
    path.write_text(text + "algorithm: distill\n")
    assert load_config(path, (), Rules(training=False)).algorithm == "distill"


def test_a_problem_with_a_filled_in_key_names_the_algorithm(recipe):
    (problem,) = problems(recipe("algorithm: grpo\nadvantage: {estimator: none}\n"))
    assert problem.startswith("advantage.normalize_std: true needs a group baseline")
    assert problem.endswith("(set by algorithm: grpo)")


def test_a_problem_with_the_users_own_key_does_not(recipe):
    text = "algorithm: grpo\nadvantage: {estimator: none, normalize_std: true}\n"
    (problem,) = problems(recipe(text))
    assert "algorithm: grpo" not in problem


def test_blocks_that_are_no_blocks_are_told_as_they_are(recipe):
    found = problems(recipe("algorithm: dapo\nloss: 3\nadvantage:\n"))
    assert [line.partition(";")[0] for line in found] == [
        "advantage: found nothing",
        "loss: found 3",
    ]


# --- the written configuration --------------------------------------------------------------------


def written(config: Config, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config))
    return path


def test_a_runs_configuration_holds_the_keys_and_resumes_to_the_same(recipe, tmp_path: Path):
    from lagzero.build import prepare_process

    overrides = ["--loss.clip_high=0.25", "--model.device=cpu", "--model.dtype=float32"]
    config = prepare_process(load_config(recipe("algorithm: dapo\n"), overrides))
    assert config.algorithm is None
    assert (config.loss.clip_high, config.advantage.truncated) == (0.25, "mask")
    again = load_config(written(config, tmp_path))
    assert again == config
    assert prepare_process(again) == config


@pytest.mark.parametrize("name", ["gspo", "ppo"])
def test_a_name_that_decides_nothing_is_refused(recipe, tmp_path: Path, name: str):
    path = written(load_config(recipe()), tmp_path)
    assert problems(path, f"--algorithm={name}") == [
        f"algorithm: {name} decides nothing here, because each of its keys is given (a run's "
        "config.yaml has all of them written out); set the keys themselves, or start a new run "
        "from a recipe"
    ]
