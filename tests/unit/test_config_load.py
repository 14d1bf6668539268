"""Reading a configuration: what is accepted, and how everything else is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero import config_yaml
from lagzero.config import Block, RewardConfig, SourceConfig
from lagzero.config_load import Rules, differences, load_config, parse_config, to_yaml
from lagzero.errors import ConfigError

BASE = """\
data:
  train: [{kind: arithmetic}]
  eval: [{kind: arithmetic, split: eval}]
score:
  rewards: [{use: number}]
"""


@pytest.fixture
def recipe(tmp_path: Path):
    def write(text: str = "") -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(BASE + text)
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return list(caught.value.problems)


def test_a_minimal_file_takes_every_default(recipe):
    config = load_config(recipe())
    assert config.rollout.group_size == 8
    assert config.train.optimizer.betas == (0.9, 0.999)
    assert config.data.train[0].kind == "arithmetic"


def test_overrides_reach_blocks_lists_optional_blocks_and_append(recipe):
    config = load_config(
        recipe(),
        [
            "--train.optimizer.lr=1e-5",
            "--data.train.0.size=64",
            "--data.train.1.kind=arithmetic",
            "--data.train.1.seed=3",
            "--model.lora.rank=4",
            "--rollout.stop=['a', \"b\\n\"]",
            "--train.optimizer.betas=[0.8, 0.9]",
            "--data.train.0.options.tasks=[{kind: add}]",
            "--seed=1",
            "--seed=2",
        ],
    )
    assert config.train.optimizer.lr == 1e-5
    assert [source.size for source in config.data.train] == [64, None]
    assert config.data.train[1].seed == 3
    assert config.model.lora is not None and config.model.lora.rank == 4
    assert config.rollout.stop == ["a", "b\n"]
    assert config.train.optimizer.betas == (0.8, 0.9)
    assert config.data.train[0].options == {"tasks": [{"kind": "add"}]}
    assert config.seed == 2


def test_an_override_may_start_a_list_and_null_a_block(recipe):
    text = "model: {lora: {rank: 4}}\n"
    assert load_config(recipe(text), ["--model.lora=null"]).model.lora is None
    path = recipe().with_name("bare.yaml")
    path.write_text("score: {rewards: [{use: number}]}\neval: {before: false, after: false}\n")
    assert load_config(path, ["--data.train.0.kind=arithmetic"]).data.train[0].seed == 0


def test_all_problems_of_a_file_and_its_overrides_are_listed_at_once(recipe):
    """LN7"""
    path = recipe(
        "schedule: {group_per_step: 3, steps: true}\n"
        "rollout: {group_size: 1, top_p: 0.9}\n"
        "loss: {reduction: constnt}\n"
        "train: {optimizer: {lr: -1, lr: 2}, micro_batch_tokens: 1.5}\n"
    )
    assert problems(path, "--eval.num_prompt=4", "nonsense", "--schedule.steps=0") == [
        f"{path}: line 9: lr is given twice in one block (first on line 9); keep one",
        "nonsense: not an override; write --a.b=c, for example --schedule.steps=20",
        "schedule.steps: found 0; valid: a whole number > 0 (set by --schedule.steps=0)",
        "schedule.group_per_step: unknown key; did you mean groups_per_step?",
        "loss.reduction: found the text 'constnt'; valid: one of token_mean, sequence_mean, "
        "constant; did you mean constant?",
        "train.micro_batch_tokens: found 1.5; valid: a whole number > 0",
        "eval.num_prompt: unknown key; did you mean num_prompts? (set by --eval.num_prompt=4)",
        "rollout.top_p: 0.9 cuts the sampled distribution while the trainer scores the full "
        "vocabulary, so an unchanged policy would have ratios below 1; set top_p: 1 (temperature "
        "may be lowered instead)",
        "rollout.group_size: 1 leaves advantage.estimator group_mean nothing to compare with, so "
        "every advantage would be 0; use at least 2, or advantage.estimator: none",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: {lr: 3}",
            "model.lr: unknown key; did you mean critic.optimizer.lr or train.optimizer.lr?",
        ),
        ("scedule: {}", "scedule: unknown key; did you mean schedule?"),
        ("checkpoint: {zzz: 1}", "checkpoint.zzz: unknown key; valid keys here: every, keep"),
        ("seed: '3'", "seed: found the text '3'; valid: a whole number"),
        ("seed: .nan", "seed: found nan; valid: a finite number"),
        ("data2: {1: 2}", "data2.1: a key must be text; put 1 in quotes"),
        ("data: {shuffle: no}", "data.shuffle: found the text 'no'; valid: true or false"),
        ("score: {rewards: []}", "score.rewards: found a list of 0; valid: a list of at least 1"),
        ("checkpoint:", "checkpoint: found nothing; valid: a block with every, keep"),
        ("model: {lora: {targets: [1]}}", "model.lora.targets.0: found 1; valid: text"),
        ("model: {lora: {targets: all}}", "model.lora.targets: found the text 'all'; valid: all-"),
        ("rollout: {top_p: 0}", "rollout.top_p: found 0; valid: a number > 0 and <= 1"),
        ("rollout: {min_p: 1}", "rollout.min_p: found 1; valid: a number >= 0 and < 1"),
        ("train: {optimizer: {betas: [1]}}", "train.optimizer.betas"),
    ],
)
def test_each_kind_of_fault_is_told_in_plain_words(tmp_path: Path, text: str, expected: str):
    path = tmp_path / "a.yaml"
    path.write_text(text + "\n")
    assert any(line.startswith(expected) for line in problems(path)), problems(path)


def test_a_value_that_yaml_allows_and_no_key_does_hides_no_other_problem(recipe):
    path = recipe("seed: .nan\nloss: {clip_low: .inf, 3: 4}\ncheckpoint: {evry: 1}\n")
    assert problems(path) == [
        "seed: found nan; valid: a finite number",
        "loss.clip_low: found inf; valid: a finite number",
        "loss.3: a key must be text; put 3 in quotes",
        "checkpoint.evry: unknown key; did you mean every?",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--data.train.size=3", "data.train is a list; say which item, for example data.train.0"),
        ("--data.train.7.size=3", "data.train has 1 item(s), counted from 0; 1 would append one"),
        ("--score.rewards.0.use.x=3", "score.rewards.0.use holds the text 'number', so it has no"),
        ("--seed", "not an override"),
        ("--a..b=1", "not an override"),
        ("--seed=[", "the value is not YAML: line 1"),
        ("--seed={a: 1, a: 2}", "a is given twice"),
        ("--schedul.steps=3", "did you mean schedule?"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(recipe, override: str, expected: str):
    assert any(expected in line for line in problems(recipe(), override))


def test_a_problem_names_the_override_that_led_to_it_from_above_or_below(recipe):
    found = problems(
        recipe(), "--rolout.group_size=4", "--rolout.top_k=3", "--model.lora={rank: 0}", "--seed=1"
    )
    assert found == [
        "model.lora.rank: found 0; valid: a whole number > 0 (set by --model.lora={rank: 0})",
        "rolout: unknown key; did you mean rollout? (set by --rolout.group_size=4, "
        "--rolout.top_k=3)",
    ]


def test_rules_of_other_rooms_see_every_sound_block_whatever_else_is_wrong(recipe):
    def named(path: str, block: Block) -> list[str]:
        return [f"{path}.kind: no"]

    rules = Rules(parts={SourceConfig: named, RewardConfig: lambda path, block: [path]})
    path = recipe("schedule: {stepz: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["--data.train.1.kind=nonsense", "--data.eval.0.size=3"], rules)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "data.train.1.kind",  # refused by its type, and not seen by the rule
        "schedule.stepz",
        "data.train.0.kind",
        "data.eval.0.kind",
        "score.rewards.0",
    ]
    assert load_config(recipe(), rules=Rules()) == load_config(recipe())


def test_a_problem_is_not_hidden_by_another_ones_name_within_it(recipe):
    rules = Rules(parts={SourceConfig: lambda path, block: [f"{path}.seed: not the run's seed"]})
    with pytest.raises(ConfigError) as caught:
        load_config(recipe("seed: x\n"), rules=rules)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "seed",
        "data.train.0.seed",
        "data.eval.0.seed",
    ]


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [\n", "a: \x07\n", "!!python/object:os.x {}\n"])
def test_a_file_that_is_no_block_of_keys_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert problems(path)[0].startswith(f"{path}: ")


def test_a_missing_file_is_a_configuration_error(tmp_path: Path):
    assert "cannot be read" in problems(tmp_path / "none.yaml")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("1.5", 1.5), (".5", 0.5), ("-2.", -2.0), ("3", 3),
        ("010", 10), ("-.inf", float("-inf")), ("true", True), ("~", None), ("", None),
        ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"), ("0x1f", "0x1f"), ("e5", "e5"), ("'1e-6'", "1e-6"),
    ],
)  # fmt: skip
def test_scalars_mean_what_they_look_like(text: str, value: object):
    found, faults = config_yaml.parse(text)
    assert (found, type(found), faults) == (value, type(value), [])


@pytest.mark.parametrize("text", ["a\x85b", "\u2028", "x\n y", "\tz", "中文", "a: b", "# c"])
def test_text_that_yaml_would_fold_or_cut_is_kept(text: str):
    value = {text: [text]}
    assert config_yaml.parse(config_yaml.dump(value)) == (value, [])


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(["1e-6", "no", "null", "010", "1:30", ".5", "~", "true", "<<", "=", "1_0"]),
)


@given(st.recursive(scalars, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8))
def test_what_is_written_reads_back_the_same(value: object):
    found, faults = config_yaml.parse(config_yaml.dump(value))
    assert (found, faults) == (value, [])


def test_a_run_folder_copy_reads_back_to_an_equal_configuration(recipe):
    config = load_config(
        recipe(), ["--rollout.stop=['1e-6', 'no']", "--model.lora.start=null", "--seed=3"]
    )
    copy = recipe().with_name("copy.yaml")
    copy.write_text(to_yaml(config))
    assert load_config(copy) == config


def test_differences_name_both_values(recipe):
    one, two = load_config(recipe()), load_config(recipe(), ["--model.lora.rank=4", "--seed=5"])
    found = differences(one, two)
    assert found["seed"] == (0, 5)
    assert found["model.lora.rank"] == (None, 4)
    assert differences(one, one) == {}
    three = load_config(recipe(), ["--train.optimizer.betas=[0.8, 0.9]"])
    assert differences(one, three) == {"train.optimizer.betas": ([0.9, 0.999], [0.8, 0.9])}


def test_plain_values_are_checked_like_a_file():
    with pytest.raises(ConfigError, match="score: missing"):
        parse_config({"data": {"train": [{"kind": "arithmetic"}]}})


def test_refusing_a_configuration_needs_neither_torch_nor_a_model_library(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("seed: x\n")
    code = (
        "import sys\nfrom lagzero.config_load import load_config\n"
        "from lagzero.errors import ConfigError\n"
        f"try:\n    load_config({str(path)!r})\nexcept ConfigError:\n"
        "    sys.exit(3 if {'torch', 'transformers'} & set(sys.modules) else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
