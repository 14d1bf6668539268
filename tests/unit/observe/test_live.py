"""What a person and a log see."""

from __future__ import annotations

import io

from rich.console import Console

from lagzero.observe.catalog import find
from lagzero.observe.live import (
    FIGURES,
    LineView,
    LiveView,
    duration,
    make_view,
    share_text,
    sparkline,
    stage_bar,
    stage_shares,
    time_left,
)

STEP = {
    "reward/mean": 0.5,
    "reward/positive_share": 0.25,
    "length/mean": 12.4,
    "mismatch/kl_k3": 1.5e-7,
    "time/step_s": 4.0,
    "time/generate_s": 3.0,
    "time/train_s": 1.0,
}


def test_a_log_gets_one_line_a_step_without_control_codes():
    out = io.StringIO()
    view = make_view(Console(file=out, width=40), 100)
    assert isinstance(view, LineView)
    view.stage(["generate"])
    view.show(98, STEP)
    view.show(98, {"eval/greedy_accuracy": 0.375})
    view.close()
    assert out.getvalue().splitlines() == [
        "step 98/100  reward 0.500  reward > 0 25%  tokens 12  mismatch KL 1.5e-07  "
        "4.0 s (generate 75% train 25%)  left 8 s",
        "step 98/100  greedy 37.5%",
    ]


def test_a_terminal_gets_a_panel_with_everything_measured():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110, height=30, _environ={})
    view = make_view(console, 100)
    assert isinstance(view, LiveView)
    view.stage(["generate", "score"])
    view.show(0, {"eval/greedy_accuracy": 0.375, "time/evaluate_s": 30.0})
    view.show(1, STEP)
    view.show(2, STEP | {"reward/mean": 1.0})
    plain = Console(file=io.StringIO(), width=110)
    plain.print(view.render())
    view.close()
    text = plain.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "evaluate" not in text  # its time is no part of a step
    for part in (
        "greedy 37.5%",
        "step 2/100",
        "6:32 left",
        "generate + score",
        "reward ▁█ 1.000",
        "mismatch KL 1.5e-07",
        "generate 75% train 25%",
    ):
        assert part in text


def test_a_panel_can_be_drawn_before_the_first_step():
    view = LiveView(Console(file=io.StringIO(), force_terminal=True), 10, now=lambda: 5.0)
    plain = Console(file=io.StringIO(), width=80)
    plain.print(view.render())
    view.close()
    assert "step 0/10   0 s so far   ? left" in plain.file.getvalue()  # pyright: ignore


def test_every_figure_shown_is_a_documented_metric():
    assert all(find(name) for _, name, _ in FIGURES)


def test_a_sparkline_spans_its_values_and_averages_what_does_not_fit():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 40) == "▁▂▃▄▅▆▇█"
    assert sparkline([2, 2], 40) == "▁▁"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert len(sparkline(list(range(101)), 40)) == 40


def test_shares_are_of_the_time_in_stages_and_the_bar_keeps_its_width():
    thirds = {f"time/{stage}_s": 1.0 for stage in ("generate", "score", "train")}
    assert stage_shares(thirds) == {"generate": 1 / 3, "score": 1 / 3, "train": 1 / 3}
    assert stage_bar(thirds, 40).plain.count("█") == 40
    assert stage_shares({}) == {}
    assert share_text({"time/generate_s": 999.0, "time/sync_s": 1.0}) == "generate 100%"


def test_the_time_left_follows_the_last_ten_steps():
    assert time_left([], 5) is None
    assert time_left([100.0] + [2.0] * 10, 5) == 10
    assert time_left([2.0], -1) == 0


def test_durations_are_short():
    cases = {None: "?", 0.4: "0 s", 59.6: "1:00", 200: "3:20", 7400: "2:03:20"}
    assert {seconds: duration(seconds) for seconds in cases} == cases
