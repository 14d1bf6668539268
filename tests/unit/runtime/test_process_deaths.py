"""Real engine processes, really killed: nothing is lost, everything is named, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from lagzero.errors import EngineDied
from lagzero.types import Finish, Rollout, sampled_tokens

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # spawned processes inherit it
import process_factories as served  # noqa: E402
from process_bench import Bench, assert_right, is_there, until  # noqa: E402


def test_killing_the_only_engine_restarts_it_and_samples_again(tmp_path):
    async def main(bench: Bench):
        await bench.ask(0, new=7)
        before = bench.backend.counters.num_sampled_tokens
        bench.hold()
        tasks = [bench.ask(17), bench.ask(21, members=3)]
        (pid,) = bench.pool.pids.values()
        await bench.until_held(pid)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(bench.reports) == 1)
        late = bench.ask(30)
        bench.let_go()
        for task, number, members in zip((*tasks, late), (17, 21, 30), (2, 3, 2), strict=True):
            assert_right(await task, number, members=members)
        (new,) = bench.pool.pids.values()
        died, back = bench.reports
        assert died == (
            f"engine 0 (pid {pid}) was ended by SIGKILL while it worked on 2 request(s): "
            "group 17, group 21\nA new process is started in its place (restart 1 of at most 3)."
        )
        assert back == f"engine 0 is back (pid {new}), with its own weights"
        assert new != pid
        assert bench.backend.counters.num_sampled_tokens == before + 5 * 7

    Bench(tmp_path).run(main)


def test_what_one_of_two_had_goes_to_the_other_at_once(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        tasks = [bench.ask(n) for n in range(10)]
        pids = dict(bench.pool.pids)
        await bench.until_held(*pids.values())
        (bench.folder / "hold-start").touch()  # nothing may depend on the new process
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: len(bench.reports) == 1)
        bench.let_go()
        for number, task in enumerate(tasks):
            assert_right(await task, number)
        assert "group 1, group 3, group 5, group 7, group 9" in bench.reports[0]
        (bench.folder / "hold-start").unlink()
        await until(lambda: len(bench.reports) == 2)
        bench.hold()
        tasks = [bench.ask(n) for n in range(4)]
        await bench.until_held(*bench.pool.pids.values())  # the new one gets its share
        bench.let_go()
        await asyncio.gather(*tasks)

    Bench(tmp_path, 2).run(main)


def test_members_that_had_ended_are_not_sampled_again(tmp_path):
    """A request one of whose members has ended goes on without it."""

    async def main(bench: Bench):
        bench.hold()
        task = bench.ask(5, members=3)
        (pid,) = bench.pool.pids.values()
        await bench.until_held(pid)
        (entry,) = bench.backend._open.values()
        first = Rollout(1, sampled_tokens([4], [-1.0], [0]), "early", Finish.STOP)
        entry.ended[1] = first
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(bench.reports) == 1)
        (entry,) = bench.backend._open.values()
        assert entry.sent.seeds == (500, 502)
        bench.let_go()
        rollouts = await task
        assert rollouts[1] is first
        assert rollouts[2].tokens["id"].tolist() == served.expected(502, 5)

    Bench(tmp_path).run(main)


@dataclass
class Case:
    rule: dict
    what: str


@pytest.mark.parametrize(
    "case",
    [
        Case({"on_death": "stop"}, "group 0, group 2"),
        Case({"max_restarts": 0}, "0 restarts are used up"),
    ],
)
def test_without_a_restart_every_caller_is_told_and_no_process_is_left(tmp_path, case):
    async def main(bench: Bench):
        bench.hold()
        tasks = [bench.ask(n) for n in range(4)]
        pids = dict(bench.pool.pids)
        await bench.until_held(*pids.values())
        os.kill(pids[0], signal.SIGSEGV)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDied)
            assert f"engine 0 (pid {pids[0]}) was ended by SIGSEGV" in str(result)
            assert case.what in str(result)
        with pytest.raises(EngineDied, match="SIGSEGV"):
            await bench.ask(9)
        await until(lambda: not any(is_there(pid) for pid in pids.values()))

    bench = Bench(tmp_path, 2, **case.rule)
    bench.run(main)
    assert bench.reports == []


def test_an_engine_that_exits_by_itself_takes_its_restarts_and_no_more(tmp_path):
    """The request itself is what ends it, so sending it again cannot help for ever."""

    async def main(bench: Bench):
        with pytest.raises(EngineDied, match="exited with code 3") as died:
            await bench.ask(7, first=served.EXIT)
        assert "2 restarts are used up" in str(died.value)
        assert bench.pool.num_restarts == 2

    Bench(tmp_path, max_restarts=2).run(main)


def test_a_process_that_hangs_is_found_and_replaced(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        tasks = [bench.ask(n) for n in range(4)]
        pids = dict(bench.pool.pids)
        await bench.until_held(*pids.values())
        os.kill(pids[1], signal.SIGSTOP)
        await until(lambda: len(bench.reports) == 1)
        bench.let_go()
        for number, task in enumerate(tasks):
            assert_right(await task, number)
        assert f"engine 1 (pid {pids[1]}) has given no sign of life for 1 s" in bench.reports[0]
        assert "group 1, group 3" in bench.reports[0]
        assert bench.pool.num_restarts == 1

    Bench(tmp_path, 2, hang_limit_s=1.0).run(main)


def test_a_long_step_is_not_a_hanging_process(tmp_path):
    async def main(bench: Bench):
        bench.hold()
        task = bench.ask(1)
        (pid,) = bench.pool.pids.values()
        await bench.until_held(pid)
        handle = bench.pool._members[0].handle
        enough = handle.num_heard + 16  # heartbeats: twice the limit
        await until(lambda: handle.num_heard >= enough)
        bench.let_go()
        assert_right(await task, 1)
        assert bench.pool.pids == {0: pid}

    bench = Bench(tmp_path, hang_limit_s=1.0)
    bench.run(main)
    assert bench.reports == []


OWNER = """
    import asyncio, functools, os, sys
    from pathlib import Path
    import process_factories as served
    from lagzero.generate.process_backend import ProcessBackend
    from lagzero.runtime.messages import TakeWeights
    from lagzero.runtime.process_handle import ProcessPlan
    from lagzero.runtime.process_pool import DeathRule, EnginePool
    from lagzero.sync.segment import Segment

    async def main(folder, orderly):
        segment = Segment(64)
        factory = functools.partial(served.serve_fake, folder)
        plan = ProcessPlan(factory, served.OpensMemory(segment.name))
        pool = EnginePool([plan, plan], DeathRule(), lambda text: None)
        backend = ProcessBackend(pool)
        await backend.start()
        pids = list(pool.pids.values())
        print(segment.name, *pids, flush=True)
        if not orderly:
            await asyncio.sleep(600)
        await pool.switch(TakeWeights(0, await pool.free_slot()))
        os.kill(pids[0], 9)
        while len(set(pool.pids.values()) - set(pids)) == 0:
            await asyncio.sleep(0.01)
        await pool.switch(TakeWeights(1, await pool.free_slot()))
        await backend.close()
        segment.close()

    if __name__ == "__main__":
        asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "orderly"))
"""


def start_owner(folder: Path, mode: str) -> subprocess.Popen[str]:
    script = folder / "owner.py"
    script.write_text(textwrap.dedent(OWNER))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev/shm")
def test_an_owner_that_is_killed_leaves_no_process_and_no_memory(tmp_path):
    owner = start_owner(tmp_path, "killed")
    assert owner.stdout is not None
    name, *pids = owner.stdout.readline().split()
    assert (Path("/dev/shm") / name).exists()
    owner.kill()

    async def gone():
        await until(lambda: not any(is_there(int(pid)) for pid in pids))
        await until(lambda: not (Path("/dev/shm") / name).exists())

    assert len(pids) == 2
    asyncio.run(asyncio.wait_for(gone(), 30))
    owner.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev/shm")
def test_an_owner_that_ends_leaves_nothing_and_says_nothing(tmp_path):
    """Nor does a resource tracker complain, although an engine was killed."""
    owner = start_owner(tmp_path, "orderly")
    out, err = owner.communicate(timeout=60)
    assert (owner.returncode, err) == (0, "")
    name, *pids = out.split()
    assert not (Path("/dev/shm") / name).exists()
    assert not any(is_there(int(pid)) for pid in pids)
