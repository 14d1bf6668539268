"""The outside of one engine process: started, spoken to, listened to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lagzero.errors import LagzeroError
from lagzero.runtime.engine_process import (
    ProcessStart,
    Served,
    WeightReader,
    run_engine_process,
)
from lagzero.runtime.messages import Crashed, Failure, FromEngine, Stop, ToEngine, Together

_END_LIMIT_S = 5.0  # for a process that has closed its channel, or was told to stop, to be gone


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """How to make an engine process.

    ``factory`` is a top-level function, or a ``functools.partial`` of one: the process is a fresh
    interpreter that imports it. ``reader`` brings weights; None leaves those that were made.
    """

    factory: Callable[[], Served]
    reader: WeightReader | None = None
    threads: int = 1  # math threads
    cores: tuple[int, ...] | None = None  # CPU cores it may use; None: all

    def packed(self, heartbeat_s: float) -> ProcessStart:
        """Return the first message. Raises LagzeroError for a factory that cannot be sent."""
        try:
            payload = pickle.dumps((self.factory, self.reader))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LagzeroError(
                f"an engine process cannot be given {self.factory!r}: {error}. Use a function "
                "at the top of a module, or functools.partial of one"
            ) from error
        return ProcessStart(payload, os.getpid(), self.threads, self.cores, heartbeat_s)


class ProcessHandle:
    """One process and its channel. Messages arrive on the event loop that called ``start``.

    ``hear`` gets each message in the order of sending, then ``ended`` one text that says how the
    process ended. Neither is called any more after ``close`` has begun.
    """

    def __init__(
        self,
        name: str,
        start: ProcessStart,
        hear: Callable[[FromEngine], None],
        ended: Callable[[str], None],
    ):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.failure: Failure | None = None  # what the process said before it gave up
        self.num_heard = 0  # messages of any kind; read by whoever watches for silence
        self._ours, theirs = context.Pipe()
        self._theirs: Connection[Any, Any] = theirs
        # A daemon, so that an owner that fails to close it does not wait for it for ever.
        self._process = context.Process(
            target=run_engine_process, args=(theirs, start), name=name, daemon=True
        )
        self._hear, self._ended = hear, ended
        self._outgoing: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._moment: list[ToEngine] = []
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._closing = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def start(self) -> None:
        """Start the process. Its calling thread must outlive it: on Linux they end together."""
        with _sigint_blocked():  # else Ctrl-C would show a trace of an interpreter that starts
            self._process.start()
        self._theirs.close()  # only the process itself holds that end: it closes when it dies
        writer = threading.Thread(target=self._write, name=f"{self.name} writer", daemon=True)
        writer.start()
        reader = threading.Thread(
            target=self._read, args=(writer,), name=f"{self.name} reader", daemon=True
        )
        reader.start()

    def send(self, message: ToEngine) -> None:
        """Send without waiting. To a process that has ended it does nothing.

        Messages of one turn of the event loop travel together: what an engine's first step computes
        then does not depend on how fast they are read.
        """
        if not self._moment:
            self._loop.call_soon(self._flush)
        self._moment.append(message)

    def _flush(self) -> None:
        messages, self._moment = self._moment, []
        self._outgoing.put(messages[0] if len(messages) == 1 else Together(tuple(messages)))

    def kill(self) -> None:
        """End the process at once, also one that is stopped. ``ended`` follows."""
        self._process.kill()

    async def close(self) -> None:
        """Tell the process to stop, kill it when it does not, and wait until it is gone."""
        self._closing = True
        self.send(Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), _END_LIMIT_S)
        except asyncio.TimeoutError:
            self.kill()
            await self._gone.wait()

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._ours.send(message)
            except OSError:  # the reader finds out the same, and tells
                return

    def _read(self, writer: threading.Thread) -> None:
        try:
            while True:
                message = self._ours.recv()
                self.num_heard += 1
                self._on_loop(self._heard, message)
        except (EOFError, OSError):
            pass
        except Exception as error:
            self.failure = Failure.of(error)
        self._process.join(_END_LIMIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._outgoing.put(None)
        writer.join()
        self._ours.close()
        self._on_loop(self._has_ended)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody wants to know
            self._loop.call_soon_threadsafe(call, *args)

    def _heard(self, message: FromEngine) -> None:
        if isinstance(message, Crashed):
            self.failure = message.failure
        elif not self._closing:
            self._hear(message)

    def _has_ended(self) -> None:
        self._gone.set()
        if not self._closing:
            self._ended(self._how_it_ended())

    def _how_it_ended(self) -> str:
        if self.failure is not None:
            failure = self.failure
            return f"failed with {failure.kind}: {failure.message}\n{failure.trace.rstrip()}"
        code = self._process.exitcode
        if code is None:
            return "ended"
        if code < 0:
            number = -code
            known = number in set(signal.Signals)
            return f"was ended by {signal.Signals(number).name if known else f'signal {number}'}"
        return f"exited with code {code}"


@contextlib.contextmanager
def _sigint_blocked():
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
