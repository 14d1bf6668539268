"""``lagzero explain`` as a whole: text, JSON, peers, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lagzero.algorithms.named import ALGORITHMS
from lagzero.cli import main
from lagzero.config import Config
from lagzero.config_load import parse_config
from lagzero.config_schema import dotted, keys
from lagzero.explain.choices import choices, value_at
from lagzero.explain.page import example
from lagzero.explain.peers import PEERS, known_paths
from lagzero.explain.report import as_json, departures, text

ROOT = Path(__file__).parents[3]
DEMO = str(ROOT / "recipes" / "demo.yaml")
GOLDEN = ROOT / "tests" / "golden" / "explain_demo.json"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_explained_in_lines_of_a_page(name: str):
    config = example(ALGORITHMS[name])
    out = text(config)
    assert [line for line in out.splitlines() if len(line) > 100] == []
    assert out.startswith(f"{ALGORITHMS[name].title}: ")
    for head in ("What is minimised", "What follows", "Whose default each choice is"):
        assert f"\n{head}\n" in out
    assert " is not in " not in out
    assert as_json(config)["algorithm"]["departures"] == {}


STD, LENGTH = "advantage.normalize_std", "loss.reduction"
ENGINE, BY_TOKEN = "loss.correction.kind", "loss.correction.level"
CAUTIONS = {
    "grpo": [STD, LENGTH, "loss.kl.estimator"],
    "dr_grpo": [],
    "dapo": [STD, "advantage.truncated"],
    "gspo": [STD, "loss.clip_high"],
    "cispo": [STD],
    "ppo": [],
    "rloo": [ENGINE],
    "reinforce": [ENGINE],
    "reinforce_pp": [LENGTH],
    "reinforce_pp_baseline": [LENGTH],
    "online_dpo": [],
    "distill": [BY_TOKEN],
    "olmo3": [BY_TOKEN],
    "icepop": [STD, LENGTH, BY_TOKEN],
    "scalerl": [],
    "areal": [BY_TOKEN],
}
NO_RATIO = ("rloo", "reinforce", "online_dpo", "distill")
RATIO_IS_1 = ("olmo3", "icepop", "areal")  # against the proximal policy, one pass


@pytest.mark.parametrize("name", CAUTIONS)
def test_what_speaks_against_an_algorithm_and_whether_its_bounds_act(name: str):
    body = as_json(example(ALGORITHMS[name]))
    assert [each["path"] for each in body["cautions"]] == CAUTIONS[name]
    acts = None if name in NO_RATIO else name not in RATIO_IS_1
    assert body["derived"].get("clip_can_act") is acts
    assert body["derived"]["lag_bound"] == (8 if name == "scalerl" else 0)
    kept = name in ("grpo", "ppo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    assert body["derived"]["keeps_reference"] is (kept or name in ("online_dpo", "distill"))


def test_departures_from_the_algorithm_are_named():
    tree = {
        "algorithm": "dr_grpo",
        "data": {"train": [{"kind": "arithmetic"}]},
        "score": {"rewards": [{"use": "right"}]},
        "eval": {"before": False, "after": False},
        "loss": {"clip_high": 0.3, "constant": 100.0},
    }
    config = parse_config(tree)
    found = departures(config, ALGORITHMS["dr_grpo"])
    assert found == {"loss.clip_high": (0.3, 0.2), "loss.constant": (100.0, 256)}
    assert "loss.clip_high is 0.3 here; Dr. GRPO has 0.2" in text(config)


def test_the_json_of_the_demo_is_as_it_was(capsys: pytest.CaptureFixture[str]):
    """A change of shape needs another ``format``; of values, a look at the difference."""
    assert said(capsys, DEMO, "--json") == GOLDEN.read_text("utf-8")


def test_the_json_says_what_the_text_says(capsys: pytest.CaptureFixture[str]):
    words = [DEMO, "--algorithm=gspo", "--schedule.max_lag=2"]
    told, body = said(capsys, *words), json.loads(said(capsys, *words, "--json"))
    assert body["objective"]["loss"] in told
    assert body["derived"]["lag_bound"] == 2
    assert [each["path"] for each in body["cautions"]] == [
        "advantage.normalize_std",
        "loss.clip_high",
    ]
    assert body["algorithm"]["name"] == "gspo"


def test_a_staleness_preset_is_written_out(capsys: pytest.CaptureFixture[str]):
    options = "--staleness.preset_options={max_head_offpolicyness: 4}"
    words = [DEMO, "--algorithm=areal", "--staleness.preset=areal", options, "--json"]
    body = json.loads(said(capsys, *words))
    assert body["derived"]["lag_bound"] is None  # first finished has none
    assert body["choices"]["schedule.max_lag"]["value"] == 4


def test_a_runs_folder_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").write_text(Path(DEMO).read_text("utf-8"))
    assert said(capsys, str(tmp_path)) == said(capsys, DEMO)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["no/such.yaml"], "no/such.yaml: neither a recipe nor a run's folder"),
        ([DEMO, "--algorithm=grpoo"], "did you mean grpo?"),
        ([DEMO, "--algorithm=distill"], "model.reference: missing; algorithm distill needs"),
    ],
)
def test_what_cannot_be_explained_ends_with_code_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["explain", *words]) == 2
    assert expected in capsys.readouterr().err


def test_explaining_needs_no_torch():
    code = (
        "import sys\nfrom lagzero.cli import main\n"
        f"assert main(['explain', {DEMO!r}, '--algorithm=olmo3']) == 0\n"
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


# --- peers ----------------------------------------------------------------------------------------


def test_every_peer_says_which_version_and_where():
    for peer in PEERS:
        assert peer.version
        assert "/" in peer.source
        assert all(default.name for default in peer.defaults.values())


def test_every_choice_of_a_peer_is_a_key_of_ours():
    known = {dotted(path) for path, _ in keys(Config)}
    used = {path for peer in PEERS for path in peer.defaults}
    assert used == set(known_paths())
    assert used <= known


def test_a_peers_default_would_be_valid_here():
    base = example(ALGORITHMS["reinforce"]).model_dump(mode="json")
    for peer in PEERS:
        for path, default in peer.defaults.items():
            place: dict = json.loads(json.dumps(base))
            top = place
            *parents, last = path.split(".")
            for part in parents:
                place[part] = place[part] or {}
                place = place[part]
            place[last] = default.value
            Config.model_validate_json(json.dumps(top))


def test_a_choice_lists_who_agrees_and_who_does_not():
    config = example(ALGORITHMS["dapo"])
    found = {each.path: each for each in choices(config)}
    reduction = found["loss.reduction"]
    assert reduction.same == ("TRL", "verl", "prime-rl", "open-instruct")
    assert reduction.others == (("slime", "sequence_mean"),)
    assert found["loss.clip_high"].same == ()


def test_a_choice_that_plays_no_part_is_left_out():
    found = {each.path for each in choices(example(ALGORITHMS["reinforce"]))}
    assert found.isdisjoint({"loss.clip_low", "loss.ratio", "loss.proximal", "loss.dual_clip"})
    assert found.isdisjoint({"loss.kl.where", "critic.clip", "advantage.zero_spread"})


def test_a_value_behind_null_is_null():
    config = example(ALGORITHMS["reinforce"])
    assert value_at(config, "critic.clip") is None
    assert value_at(config, "loss.clip_low") == 0.2
