"""Checks that never end, and workers that die."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from lagzero.score.checker_pool import CheckerError, CheckerPool, Job
from lagzero.score.decide import decide_at_once
from lagzero.score.math_answer import MathAnswer, check

# A worker that answers "true", hangs at "hang", and ends by itself at "die".
FAKE = """
import json, sys, time
print("ready", flush=True)
for line in sys.stdin:
    gold, answer, _ = json.loads(line)
    if answer == "hang":
        while True:
            pass
    if answer == "die":
        sys.exit(3)
    print(json.dumps(gold == answer), flush=True)
"""
COMMAND = (sys.executable, "-c", FAKE)

TOWERS = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    r"9^{9^{9^{9^{9}}}}",
    r"\frac{1}{9^{9^{9^9}}}",
    "99999999999!",
    "9!!!!!!!!!",
    r"\sqrt[3]{9^{9^{9^9}}}",
    r"\binom{10^{12}}{10^{11}}",
    r"\sin(9^{9^{9}})",
    r"\pi^{9^{9^9}}",
    r"e^{e^{e^{e^{9}}}}",
    r"(x+1)^{1000000000}",
    r"(x+1)^{9^{9^9}}",
    r"\sqrt{2}^{\sqrt{3}^{\sqrt{5}^{\sqrt{7}^{99}}}}",
    "(" * 5000 + "1" + ")" * 5000,
    "-" * 15000 + "1",
    "1" + "+1" * 9000,
    r"\frac{1}{" * 3000 + "1" + "}" * 3000,
    "2^" * 5000 + "2",
    "9" * 19999 + "!",
]


def in_thread(function):
    """Run a function in a thread that is not the main one and return what it returns."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    assert found, "the thread did not finish"
    return found[0]


def test_pathological_answers_are_wrong_within_the_limit() -> None:
    """RF1: 20 bad answers among 100 normal ones, from another thread; the workers stay."""
    reward = MathAnswer(timeout_s=0.75, workers=1)
    try:
        normal = [rf"\boxed{{\frac{{{n}}}{{7}}+\sqrt{{2}}}}" for n in range(20)] + [
            str(n) for n in range(80)
        ]
        golds = [rf"\sqrt2+\frac{{{n}}}{{7}}" for n in range(20)] + list(range(80))
        in_thread(lambda: reward.pool.check(Job("x+x", "2x")))
        workers = reward.pool.num_alive
        started = time.monotonic()
        replies = normal + [rf"\boxed{{{tower}}}" for tower in TOWERS]
        values = in_thread(lambda: reward(["p"] * 120, replies, answer=golds + ["7"] * len(TOWERS)))
        took_s = time.monotonic() - started
        assert values == [1.0] * 100 + [0.0] * 20
        assert reward.pool.num_alive == workers == 1
        assert took_s < 20 * (0.75 + 6) + 30  # every bad one at its limit, and a new worker, slowly
    finally:
        reward.close()


@pytest.mark.parametrize("answer", TOWERS, ids=range(len(TOWERS)))
def test_first_look_at_a_pathological_answer_is_short(answer) -> None:
    """RF1: what is decided without a worker is decided in a bounded time."""
    started = time.process_time()  # other work on the machine does not count
    assert decide_at_once("7", answer) in (None, False)
    assert time.process_time() - started < 3  # without the bound it takes minutes or for ever


def test_hung_worker_is_killed_and_replaced() -> None:
    """RF1: the limit holds whatever the worker is busy with, and the next check works."""
    with CheckerPool(0.5, 2, COMMAND) as pool:
        assert pool.check(Job("a", "a")) is True
        before = pool.num_alive
        started = time.monotonic()
        verdicts = pool.check_all([Job("a", "hang"), Job("a", "a"), Job("a", "hang")])
        assert verdicts == [False, True, False]
        assert time.monotonic() - started < 40  # the jobs themselves would never end
        assert pool.num_alive == before == 2
    assert pool.num_alive == 0


def test_worker_that_dies_is_an_error_and_not_a_wrong_answer() -> None:
    """A failure of the machinery never becomes reward 0."""
    with CheckerPool(5.0, 1, COMMAND) as pool:
        with pytest.raises(CheckerError, match="ended by itself"):
            pool.check(Job("a", "die"))
        assert pool.check(Job("a", "a")) is True


def test_worker_that_cannot_start_is_an_error() -> None:
    """And says so, instead of hanging."""
    with (
        CheckerPool(5.0, 1, (sys.executable, "-c", "raise SystemExit(1)")) as pool,
        pytest.raises(CheckerError, match="did not start"),
    ):
        pool.check(Job("a", "a"))


def test_closed_pool_refuses() -> None:
    """It starts no new workers."""
    pool = CheckerPool(5.0, 1, COMMAND)
    pool.close()
    with pytest.raises(CheckerError, match="closed"):
        pool.check(Job("a", "a"))


def test_many_threads_share_the_workers() -> None:
    """Each thread gets the verdict on its own answer."""
    with CheckerPool(10.0, 2, COMMAND) as pool:

        async def ask() -> list[bool]:
            jobs = [Job(str(n), str(n if n % 3 else n + 1)) for n in range(30)]
            return await asyncio.gather(*(asyncio.to_thread(pool.check, job) for job in jobs))

        assert asyncio.run(ask()) == [n % 3 != 0 for n in range(30)]


def test_answers_are_never_run(tmp_path, monkeypatch) -> None:
    """SC1: a call in an answer leaves no file and scores 0; the next sample is judged as before."""
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    call = f"__import__('pathlib').Path('{marker}').touch()"
    reward = MathAnswer()
    try:
        attacks = [
            rf"\boxed{{{call}*0+2\pi}}",
            rf"\boxed{{2\pi+0*{call}}}",
            rf"\boxed{{\text{{{call}}}}}",
            rf"\boxed{{\operatorname{{eval}}({call})}}",
            rf"\boxed{{[{call} for x in (1,)]}}",
            f"The answer is {call}",
            f"#### open('{marker}','w')",
            rf"\boxed{{\frac{{{call}}}{{1}}}}",
        ]
        golds = [r"2\pi"] * len(attacks)
        assert reward(["p"] * len(attacks), attacks, answer=golds) == [0.0] * len(attacks)
        assert not marker.exists()
        later = [r"\boxed{3\pi}", r"\boxed{\pi+\pi}"]
        assert reward(["p"] * 2, later, answer=golds[:2]) == [0.0, 1.0]
    finally:
        reward.close()


def test_check_without_a_pool_cleans_up_after_itself() -> None:
    """The one-off form gives the same verdict."""
    assert check(r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}") is True


def test_real_worker_is_killed_at_the_limit() -> None:
    """RF1: the same with the worker that is really used and a check that is really slow."""
    with CheckerPool(0.4, 1) as pool:
        assert pool.check(Job("x", "x")) is True
        first = pool.num_alive
        started = time.monotonic()
        gold = "+".join(f"{name}!" for name in "nmkpqrstuvw")
        other = "+".join(rf"{name}\cdot({name}-1)!" for name in "nmkpqrstuvw")
        assert pool.check_all([Job(gold, other), Job(other, gold)]) == [False] * 2
        assert time.monotonic() - started < 40
        assert pool.num_alive == first == 1
        assert pool.check(Job("x", "x")) is True


def test_worker_ignores_ctrl_c_which_its_parent_answers() -> None:
    """A terminal sends the signal to the whole process group; a worker has no traceback to show."""
    with subprocess.Popen(
        [sys.executable, "-m", "lagzero.score.check_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout.readline() == "ready\n"
        worker.send_signal(signal.SIGINT)
        out, err = worker.communicate(json.dumps(["2", "2", False]) + "\n", timeout=60)
    assert (out, err, worker.returncode) == ("true\n", "", 0)
