"""From a configuration to a reward function."""

import pytest

from lagzero.config import RewardConfig, ScoreConfig
from lagzero.errors import ConfigError
from lagzero.score.load import BUILT_IN, check_reward, load_reward
from lagzero.score.reward import build_scorer

SWITCHES = {
    "math_answer": [{}, {"extract": True}, {"extract": False}, {"last_number": True}],
    "number_answer": [{}, {"strict": True}, {"strict": False}],
    "exact_match": [{}, {"ignore_case": True}],
    "format": [{}],
    "reasoning_gym": [{"name": "basic_arithmetic"}],
}


WITHOUT_A_GOLD_ANSWER = {"overlong", "reward_model", "judge"}


@pytest.mark.parametrize("name", SWITCHES)
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
    assert set(SWITCHES) | WITHOUT_A_GOLD_ANSWER == set(BUILT_IN)


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
        ("math_anser", {}, "r.use: 'math_anser' is unknown; did you mean 'math_answer'?"),
        ("number-answer", {}, "did you mean 'number_answer'?"),
        ("zzz", {}, "r.use: 'zzz' is unknown; valid: exact_match, "),
        (
            "math_answer",
            {"extrct": True},
            "r.options.extrct: 'extrct' is unknown; did you mean 'extract'?",
        ),
        (
            "number_answer",
            {"stric": True},
            "r.options.stric: 'stric' is unknown; did you mean 'strict'?",
        ),
        ("nowhere.py:f", {}, "r.use: there is no file"),
        ("no_such_package_x.y:f", {}, "does not load: ModuleNotFoundError"),
        ("mine.py:lenght", {}, "r.use: mine.py has no 'lenght'; did you mean 'length'?"),
        ("mine.py:number", {}, "not a function"),
        ("mine.py:narrow", {}, "does not accept prompts"),
        ("mine.py:narrow", {"scael": 1}, "did you mean 'scale'?"),
        ("broken.py:f", {}, "does not load: SyntaxError"),
        ("leaves.py:f", {}, "r.use: leaves.py does not load: SystemExit: 3"),
        ("mine.py:", {}, "r.use: 'mine.py:' is unknown"),
        (" ", {}, "r.use: ' ' is unknown"),
        ("reasoning_gym", {}, "r.options.name: missing"),
        ("reasoning_gym", {"name": "countdwn"}, "r.options.name: 'countdwn' is unknown"),
        ("reasoning_gym", {"name": "n_queens"}, "r.options.name: 'n_queens' may evaluate"),
        ("format", {"pattern": "("}, "r.options: "),
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
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError) as caught:
        load_reward(RewardConfig(use=use, options=options), folder=tmp_path, at="r")
    assert message in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    """One error for the whole block."""
    config = ScoreConfig(
        rewards=[RewardConfig(use="math_anser"), RewardConfig(use="format", options={"x": 1})]
    )
    with pytest.raises(ConfigError) as caught:
        build_scorer(config)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "score.rewards.0.use",
        "score.rewards.1.options.x",
    ]


def test_an_option_of_ones_own_may_be_called_like_a_setting_of_the_built_in_ones(tmp_path) -> None:
    """timeout_s is given to math_answer alone."""
    (tmp_path / "mine.py").write_text(
        "def f(prompts, completions, timeout_s=1): return [timeout_s] * len(completions)\n"
    )
    config = RewardConfig(use="mine.py:f", options={"timeout_s": 7})
    assert load_reward(config, folder=tmp_path)(prompts=["p"], completions=["c"]) == [7]
    assert check_reward("r", RewardConfig(use="math_answer", options={"timeout_s": 7})) != []
