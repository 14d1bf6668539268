from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lagzero.cli import main
from lagzero.plan.timeline import bar

SMALL = "--lanes 2 --steps 2 --groups-per-step 2 --group-size 1 --lengths 1,3,1 --sync-s 0"


def lines_of(capsys: pytest.CaptureFixture[str], words: str) -> list[str]:
    assert main(["simulate", *words.split()]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["simulate", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    head, *problems = said.err.splitlines()
    assert head == f"{len(problems)} problem(s) on the command line:"
    return [each.strip() for each in problems]


def test_a_small_case_is_drawn_above_its_table(capsys: pytest.CaptureFixture[str]):
    lines = lines_of(capsys, SMALL + " --train-s 1 --train-token-s 0")
    assert lines[:4] == [
        "time     0   1   2   3   4   5   6",
        "lane A   [r0]............[r2]....",
        "lane B   [----r1----]....[r3]....",
        "trainer  ............[s0]....[s1]",
    ]
    assert lines[4:6] == ["", "time, s                          6.0"]
    assert any(line.split() == ["generation", "slots", "in", "use", "50.0", "%"] for line in lines)


def test_a_sweep_has_a_column_for_each_value(capsys: pytest.CaptureFixture[str]):
    lines = lines_of(
        capsys, SMALL + " --train-s 1 --train-token-s 0 --window none --sweep max-lag=0,1"
    )
    header = next(line for line in lines if "max_lag=0" in line and "max_lag=1" in line)
    table = lines[lines.index(header) :]
    assert table[1].split() == ["time,", "s", "6.0", "4.0"]


def test_a_sweep_over_distributions_is_set_apart_by_semicolons(capsys: pytest.CaptureFixture[str]):
    words = ["simulate", *SMALL.replace("--lengths 1,3,1", "").split()]
    assert main([*words, "--timeline=never", "--sweep", "lengths=list:1,3,1;fixed:2"]) == 0
    assert "lengths=list:1,3,1  lengths=fixed:2" in capsys.readouterr().out


def test_all_figures_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "out.json"
    lines_of(capsys, SMALL + f" --json {file} --sweep max_lag=0,2")
    first, second = json.loads(file.read_text())
    assert first["scenario"]["max_lag"] == "0"
    assert second["scenario"]["max_lag"] == "2"
    assert [each["step"] for each in first["steps"]] == [1, 2]
    assert {"time_s", "slot_use", "slot_idle", "lag_mean", "lag_max", "tok_per_s"} <= first.keys()


def test_a_case_without_lanes_is_not_drawn(capsys: pytest.CaptureFixture[str]):
    lines = lines_of(capsys, "--steps 1 --groups-per-step 2 --engines 1")
    assert not any(line.startswith("lane") for line in lines)


def test_data_that_end_early_are_pointed_out(capsys: pytest.CaptureFixture[str]):
    lines = lines_of(capsys, "--lanes 2 --group-size 1 --groups-per-step 2 --steps 5 --prompts 6")
    assert lines[-1] == "note: the data ended after 3 of 5 steps"
    lines = lines_of(capsys, "--lanes 2 --group-size 1 --steps 5 --prompts 6 --sweep max_lag=0,1")
    assert lines[-2] == "note: max_lag=0: the data ended after 1 of 5 steps"


def test_a_reader_that_goes_away_is_no_error():
    code = "from lagzero.cli import main; import sys; sys.exit(main(['simulate', '--steps', '1']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]):
    text = "\n".join(lines_of(capsys, "--help"))
    assert "--max-lag 0" in text
    assert "--sweep NAME=V,V" in text
    assert "--lengths lognormal:median=1500,sigma=0.9,min=64,max=16384" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--maxlag", "1"], "--maxlag is unknown; did you mean --max-lag?"),
        (["--max_lagg=1"], "--max_lagg is unknown; did you mean --max-lag?"),
        (["--max-lag", "-1"], "--max-lag: must be a whole number >= 0, not -1"),
        (["--max-lag", "1.5"], "--max-lag: must be a whole number >= 0, not '1.5'"),
        (["--max-lag"], "--max-lag needs a value, such as --max-lag 0"),
        (["--max-lag", "1", "--max-lag=2"], "--max-lag is given twice"),
        (["--window", "0"], "--window: must be a whole number >= 1, not 0; or 'none'"),
        (
            ["--router", "rund_robin"],
            "--router: must be one of least_loaded, round_robin, not 'rund_robin'; "
            "did you mean 'round_robin'?",
        ),
        (["--efficiency", "2"], "--efficiency: must be a number > 0 and <= 1, not 2"),
        (["--train-s", "nan"], "--train-s: must be a number >= 0, not nan"),
        (["--train-s", "inf"], "--train-s: must be a number >= 0, not inf"),
        (["--partial-cap", "9.5"], "--partial-cap: engines write whole tokens; give 10, not 9.5"),
        (["now"], "'now' is not understood; a flag is written --name value"),
        (["--sweep", "lag=1,2"], "--sweep: lag is unknown; did you mean --max-lag?"),
        (["--sweep", "max_lag"], "--sweep needs values, such as --sweep max_lag=0"),
        (
            ["--sweep", "max_lag=0,x"],
            "--max-lag: must be a whole number >= 0, not 'x'",
        ),
        (
            ["--sweep", "max_lag=1", "--max-lag", "1"],
            "--max-lag is given and swept; leave one out",
        ),
        (
            ["--timeline", "maybe"],
            "--timeline: must be one of auto, always, never, not 'maybe'",
        ),
        (
            ["--json", "/none/such/x.json"],
            "--json: /none/such/x.json is in a folder that does not exist",
        ),
        (
            ["--lengths", "lognorml:median=2"],
            "--lengths: 'lognorml' is no distribution; did you mean 'lognormal'? "
            "(valid: fixed, list, cycle, exponential, lognormal, trace)",
        ),
    ],
)
def test_a_wrong_flag_gets_one_line_that_says_what_is_valid(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
):
    assert refused(capsys, *words) == [problem]


def test_flags_that_cannot_work_together_are_refused(capsys: pytest.CaptureFixture[str]):
    [problem] = refused(capsys, "--extra-groups", "4")
    assert "--window none" in problem
    problems = refused(capsys, "--placement", "swap", "--engines", "3", "--window", "2")
    assert [each.split(":")[0] for each in problems] == ["--max-lag", "--window", "--engines"]
    [problem] = refused(capsys, "--action", "drop")
    assert problem.startswith("--bound: --action drop is for groups above a bound")
    [problem] = refused(capsys, "--surplus", "drop")
    assert "--extra-groups" in problem


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]):
    problems = refused(capsys, "--stepz", "1", "--seed", "x", "--router", "y")
    assert [each.split()[0].rstrip(":") for each in problems] == ["--stepz", "--seed", "--router"]


@pytest.mark.parametrize(("width", "drawn"), [(12, "[----r1----]"), (5, "[r1-]"), (4, "[r1]")])
def test_a_bar_fills_its_time(width: int, drawn: str):
    assert bar("r1", width) == drawn
    assert len(bar("r123456", width)) == width


def test_bars_too_short_for_a_label_stay_bars():
    assert [bar("r1", width) for width in (3, 2, 1, 0)] == ["[-]", "[]", "|", ""]
