"""From a configuration to a reward function."""

import pytest

from lagzero.config import RewardConfig, ScoreConfig
from lagzero.errors import ConfigError
from lagzero.score.load import BUILT_IN, load_reward
from lagzero.score.reward import build_scorer

SWITCHES = {
    "math_answer": [{}, {"extract": True}, {"extract": False}, {"last_number": True}],
    "number_answer": [{}, {"strict": True}, {"strict": False}],
    "exact_match": [{}, {"ignore_case": True}],
    "format": [{}],
    "reasoning_gym": [{"name": "basic_arithmetic"}],
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_route_gives_one_verdict_on_a_boxed_answer(name) -> None:
    """SV3: whether or not a layer strips the wrapper, the right answer scores 1."""
    for options in SWITCHES[name]:
        reward = load_reward(RewardConfig(use=name, options=options))
        for reply in (r"... so \boxed{12}", "12", "#### 12"):
            if (name, reply) in (("number_answer", "#### 12"), ("reasoning_gym", "#### 12")):
                continue  # they take the whole reply or its last line
            entry = [{"answer": "12", "metadata": {}}]
            values = reward(prompts=["p"], completions=[reply], answer=["12"], entry=entry)
            assert values == [1.0], (name, options, reply)


def test_every_built_in_name_has_its_switches_tested() -> None:
    """SV3: a new built-in cannot be left out."""
    assert set(SWITCHES) == set(BUILT_IN)


def test_function_from_a_file(tmp_path) -> None:
    """file.py:function, options as keyword arguments."""
    (tmp_path / "mine.py").write_text(
        "def length(prompts, completions, scale=1.0, **columns):\n"
        "    return [scale * len(c) for c in completions]\n"
    )
    config = RewardConfig(use="mine.py:length", options={"scale": 2.0})
    assert load_reward(config, folder=tmp_path)(prompts=["p"], completions=["abc"]) == [6.0]


def test_class_from_a_file_is_made_with_its_options(tmp_path) -> None:
    """A class whose instances are rewards."""
    (tmp_path / "mine.py").write_text(
        "class Length:\n"
        "    def __init__(self, *, scale=1.0):\n"
        "        self.scale = scale\n"
        "    def __call__(self, prompts, completions, **columns):\n"
        "        return [self.scale * len(c) for c in completions]\n"
    )
    config = RewardConfig(use="mine.py:Length", options={"scale": 3.0})
    assert load_reward(config, folder=tmp_path)(["p"], ["ab"]) == [6.0]


def test_function_from_a_package() -> None:
    """package.module:function."""
    reward = load_reward(RewardConfig(use="lagzero.score.text_rewards:Format"))
    assert reward(["p"], [r"\boxed{1}"]) == [1.0]


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("math_anser", {}, "nearest built-in is 'math_answer'"),
        ("number-answer", {}, "nearest built-in is 'number_answer'"),
        (
            "math_answer",
            {"extrct": True},
            "extrct: no such option; the nearest option is 'extract'",
        ),
        ("number_answer", {"stric": True}, "nearest option is 'strict'"),
        ("nowhere.py:f", {}, "no file"),
        ("no_such_package_x.y:f", {}, "does not load: ModuleNotFoundError"),
        ("mine.py:lenght", {}, "nearest name there is 'length'"),
        ("mine.py:number", {}, "not a function"),
        ("mine.py:narrow", {}, "does not accept prompts"),
        ("mine.py:narrow", {"scael": 1}, "nearest option is 'scale'"),
        ("broken.py:f", {}, "does not load: SyntaxError"),
        ("mine.py:", {}, "no such reward"),
    ],
)
def test_mistakes_name_what_would_be_valid(tmp_path, use, options, message) -> None:
    """Unknown names and options fail at load, with the nearest valid spelling."""
    (tmp_path / "mine.py").write_text(
        "number = 3\n"
        "def length(prompts, completions): return [1.0]\n"
        "def narrow(completions, scale=1): return [1.0]\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError) as caught:
        load_reward(RewardConfig(use=use, options=options), folder=tmp_path)
    assert message in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    """One error for the whole block."""
    config = ScoreConfig(
        rewards=[RewardConfig(use="math_anser"), RewardConfig(use="format", options={"x": 1})]
    )
    with pytest.raises(ConfigError) as caught:
        build_scorer(config)
    assert len(caught.value.problems) == 2
