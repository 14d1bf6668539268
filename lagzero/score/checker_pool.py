"""Worker processes for checks that may not end, each under a hard time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from lagzero.errors import LagzeroError

START_LIMIT_S = 120.0
_COMMAND = (sys.executable, "-m", "lagzero.score.check_worker")


class CheckerError(LagzeroError):
    """The checker's own machinery failed; the answer is not to blame."""


@dataclass(frozen=True, slots=True)
class Job:
    """One check; ``round_to_gold`` accepts what rounds to a decimal gold answer."""

    gold: str
    answer: str
    round_to_gold: bool = False


class CheckerPool:
    """Decides checks in worker processes. Any thread may call it; it holds no event loop.

    A check that takes longer than ``timeout_s`` seconds is wrong: its worker is killed and another
    started in its place, so the number of workers stays the same. Workers start at the first check.
    """

    def __init__(
        self, timeout_s: float = 10.0, workers: int = 1, command: Sequence[str] = _COMMAND
    ):
        self.timeout_s = timeout_s
        self.workers = workers
        self._command = tuple(command)
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> CheckerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_alive(self) -> int:
        """Return how many worker processes run now; 0 before the first check."""
        with self._lock:
            return sum(worker.process.poll() is None for worker in self._all)

    def check(self, job: Job) -> bool:
        """Return the verdict, False at the time limit. Blocks the calling thread.

        Raises CheckerError when two workers in a row end by themselves, or none starts.
        """
        for _ in range(2):
            worker = self._take()
            try:
                reply = worker.ask(json.dumps([job.gold, job.answer, job.round_to_gold]), self)
            except BaseException:
                self._replace(worker)
                raise
            if reply.timed_out:
                self._replace(worker)
                return False
            if reply.line:
                self._idle.put(worker)
                return bool(json.loads(reply.line))
            self._replace(worker)
        raise CheckerError("a checker process ended by itself, twice, over one answer")

    def check_all(self, jobs: Sequence[Job]) -> list[bool | CheckerError]:
        """Return the verdict on each job, in order, using every worker."""

        def attempt(job: Job) -> bool | CheckerError:
            try:
                return self.check(job)
            except CheckerError as error:
                return error

        if len(jobs) < 2 or self.workers == 1:
            return [attempt(job) for job in jobs]
        with ThreadPoolExecutor(min(len(jobs), self.workers)) as threads:
            return list(threads.map(attempt, jobs))

    def close(self) -> None:
        """End the workers; checks are refused afterwards."""
        with self._lock:
            self._closed = True
            workers, self._all = self._all, []
        for worker in workers:
            worker.end()

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise CheckerError("the checker is closed")
            while len(self._all) < self.workers:
                self._add()
        while True:
            try:
                return self._idle.get(timeout=0.2)
            except queue.Empty:
                if self._closed:
                    raise CheckerError("the checker is closed") from None

    def _add(self) -> None:
        worker = _Worker(self._command)
        self._all.append(worker)
        self._idle.put(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            if worker in self._all:
                self._all.remove(worker)
                if not self._closed:
                    self._add()


@dataclass(frozen=True, slots=True)
class _Reply:
    line: str
    timed_out: bool


class _Worker:
    def __init__(self, command: Sequence[str]):
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.ready = False

    def ask(self, line: str, pool: CheckerPool) -> _Reply:
        """Send one line and return the reply; the time limit does not count the start."""
        if not self.ready:
            greeting = self._within(START_LIMIT_S, None)
            if greeting.timed_out or greeting.line != "ready\n":
                raise CheckerError(f"a checker process did not start: {greeting.line!r}")
            self.ready = True
        return self._within(pool.timeout_s, line)

    def end(self) -> None:
        """Kill the process and wait for it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                _close(stream)

    def _within(self, limit_s: float, line: str | None) -> _Reply:
        # Killing the process ends the read, whatever the process is busy with.
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self.process.kill()

        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(limit_s, stop)
        timer.daemon = True
        timer.start()
        try:
            if line is not None:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            reply = ""
        finally:
            timer.cancel()
        return _Reply(reply, timed_out.is_set())


def _close(stream: IO[str]) -> None:
    # What was still to be written went to a process that is gone.
    with contextlib.suppress(BrokenPipeError):
        stream.close()
