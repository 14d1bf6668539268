"""The inside of an engine process: messages are read between two steps and at no other time.

So an update never overlaps a forward pass, and taking weights aborts nothing. Nothing here needs
torch unless the engine does.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from lagzero.engine.request import Completion, Request
from lagzero.errors import LagzeroError, WeightSyncError
from lagzero.runtime.collector import without_collector
from lagzero.runtime.messages import (
    Abort,
    AddRequest,
    Completions,
    Crashed,
    Failed,
    Failure,
    ForgetPrefixes,
    FromEngine,
    Heartbeat,
    Pause,
    Paused,
    Ready,
    RequestRefused,
    Resume,
    Stop,
    TakeBack,
    TakeWeights,
    ToEngine,
    Together,
    WeightsRefused,
    WeightsTaken,
)

if TYPE_CHECKING:
    import torch

    from lagzero.engine.engine import EngineCounters

ORPHANED = 75  # exit code of a process whose owner has gone
CRASHED = 76
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


class ServableEngine(Protocol):
    """What a process serves: ``lagzero.engine.engine.Engine`` and its like."""

    version: int

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do or return anything."""
        ...

    @property
    def counters(self) -> EngineCounters:
        """Totals since the engine was made."""
        ...

    def add(self, request: Request) -> None:
        """Accept a request."""
        ...

    def step(self) -> list[Completion]:
        """Compute one forward pass and return the members that ended."""
        ...

    def abort(self, request_ids: Iterable[int]) -> list[Completion]:
        """Take requests back."""
        ...

    def weights_changed(self, version: int) -> None:
        """Take note of the version that the weights now are."""
        ...

    def forget_prefixes(self) -> None:
        """Let no later request find what earlier ones computed."""
        ...

    def reset(self) -> None:
        """Forget every request."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """An engine and the parameters that it computes with, by name.

    They must be the module's own ``torch.nn.Parameter`` objects, as ``named_parameters()`` gives
    them: taking weights points them at other memory.
    """

    engine: ServableEngine
    weights: Mapping[str, torch.Tensor]


class WeightReader(Protocol):
    """How weights reach the parameters of an engine."""

    def attach(self, weights: Mapping[str, torch.Tensor]) -> WeightTaker:
        """Connect to a process's parameters. Raises WeightSyncError when they do not match."""
        ...


class WeightTaker(Protocol):
    """The end of the weight transfer that lies in the engine's process."""

    def take(self, version: int, slot: int) -> None:
        """Make a slot the parameters' content, or raise WeightSyncError and change nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """What a process is told before its first message."""

    payload: bytes  # pickled: a function without arguments that returns Served, WeightReader | None
    owner_pid: int
    threads: int
    cores: tuple[int, ...] | None
    heartbeat_s: float


def run_engine_process(connection: Connection, start: ProcessStart) -> NoReturn:
    """Serve until told to stop. The process exits when its owner is gone."""
    outbox = _Outbox(connection)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    try:
        _prepare_process(start)
        _start_thread("messages", _receive, connection, inbox)
        _start_thread("heartbeat", _beat, outbox, start.heartbeat_s)
        with without_collector():
            served, taker = _make(start)
        outbox.send(Ready(os.getpid()))
        EngineLoop(served.engine, taker, inbox, outbox).run()
    except Exception as error:
        outbox.send(Crashed(Failure.of(error)))
        _exit(CRASHED)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """End now: tearing the interpreter down would first free memory that tensors point at."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prepare_process(start: ProcessStart) -> None:
    """Choose cores and math threads, before any library looks, and tie the process to its owner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the owner decides
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        # The channel's end tells as well, but not while something else in this process hangs.
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, b"lagzero-engine")  # what ps and top show
        if os.getppid() != start.owner_pid:  # it died before we asked
            os._exit(ORPHANED)
        if start.cores is not None:
            os.sched_setaffinity(0, start.cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(start.threads)


def _make(start: ProcessStart) -> tuple[Served, WeightTaker | None]:
    factory, reader = pickle.loads(start.payload)
    torch: Any = sys.modules.get("torch")
    if torch is not None:  # may have been loaded before the variables were set
        torch.set_num_threads(start.threads)
    served = factory()
    return served, None if reader is None else reader.attach(served.weights)


def _start_thread(name: str, work: Any, *args: Any) -> None:
    threading.Thread(target=work, args=args, name=f"lagzero-{name}", daemon=True).start()


def _beat(outbox: _Outbox, every_s: float) -> NoReturn:
    while True:
        outbox.send(Heartbeat())
        time.sleep(every_s)


def _receive(connection: Connection, inbox: queue.SimpleQueue[ToEngine]) -> None:
    """Move messages into memory, so that their sender never waits for a step to end."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(ORPHANED)
    except Exception:  # not what was agreed on; a process that hears nothing must not live on
        traceback.print_exc()
        os._exit(CRASHED)


class _Outbox:
    """The channel to the owner, for several threads."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Send, or exit when nobody is there to read."""
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                os._exit(ORPHANED)


class Outbox(Protocol):
    """Where the engine's answers go."""

    def send(self, message: FromEngine) -> None:
        """Send one message."""
        ...


def _each(message: ToEngine) -> tuple[ToEngine, ...]:
    return message.messages if isinstance(message, Together) else (message,)


class EngineLoop:
    """Reads all messages, then takes one engine step; waits for messages when there is no work."""

    def __init__(
        self,
        engine: ServableEngine,
        taker: WeightTaker | None,
        inbox: queue.SimpleQueue[ToEngine],
        outbox: Outbox,
    ):
        self._engine = engine
        self._taker = taker
        self._inbox = inbox
        self._outbox = outbox
        self._open: dict[int, int] = {}  # request id -> members that have not ended
        self._paused = False

    def run(self) -> None:
        """Serve until ``Stop`` comes."""
        while True:
            for message in self._messages():
                if isinstance(message, Stop):
                    return
                self._handle(message)
            if self._may_step:
                self._step()

    @property
    def _may_step(self) -> bool:
        return self._engine.has_work and not self._paused

    def _messages(self) -> Iterable[ToEngine]:
        if not self._may_step:
            yield from _each(self._inbox.get())
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            yield from _each(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request):
                self._add(request)
            case Abort(ids):
                self._engine.abort(ids)
                for number in ids:
                    self._open.pop(number, None)
            case TakeBack(ids):
                self._report(self._engine.abort(ids))
            case TakeWeights(version, slot):
                self._take(version, slot)
            case ForgetPrefixes():
                self._engine.forget_prefixes()
            case Pause():
                self._paused = True
                self._outbox.send(Paused())
            case Resume():
                self._paused = False
            case _:
                raise TypeError(f"an engine process does not know the message {message!r}")

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except LagzeroError as error:
            self._outbox.send(RequestRefused(request.id, Failure.of(error)))
        else:
            self._open[request.id] = len(request.seeds)

    def _take(self, version: int, slot: int) -> None:
        try:
            if self._taker is None:
                raise WeightSyncError("this engine process has no shared memory for weights")
            self._taker.take(version, slot)
        except WeightSyncError as error:
            self._outbox.send(WeightsRefused(version, slot, str(error)))
        else:
            self._engine.weights_changed(version)
            self._outbox.send(WeightsTaken(version, slot, self._engine.counters))

    def _step(self) -> None:
        try:
            completions = self._engine.step()
        except Exception as error:
            lost = tuple(self._open)
            self._open.clear()
            self._engine.reset()
            self._outbox.send(Failed(Failure.of(error), lost))
            return
        self._report(completions)

    def _report(self, completions: Sequence[Completion]) -> None:
        for each in completions:
            left = self._open.pop(each.request_id, 1) - 1
            if left:
                self._open[each.request_id] = left
        if completions:
            engine = self._engine
            self._outbox.send(Completions(tuple(completions), engine.counters, engine.version))
