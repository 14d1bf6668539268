"""What an engine process and its owner tell each other: one frozen record for each message."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lagzero.engine.request import Completion, Request
from lagzero.errors import LagzeroError

if TYPE_CHECKING:  # it would load torch, which engines without tensors do not need
    from lagzero.engine.engine import EngineCounters


class EngineFailed(LagzeroError):
    """An engine's step raised; the process goes on without the requests that it had."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Sample this. Ids are never used twice."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Take requests back; what they sampled so far is not reported."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeBack:
    """End requests as they stand: each unfinished member is reported with what it sampled."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """Go on with the weights that lie in a slot of the shared memory."""

    version: int
    slot: int


@dataclass(frozen=True, slots=True)
class ForgetPrefixes:
    """Cached prefixes must not be found any more; running sequences go on."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Stand still from the next step boundary on. All other messages are obeyed meanwhile."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on after a pause; without one, nothing happens."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave everything and exit."""


@dataclass(frozen=True, slots=True)
class Together:
    """Messages of one moment. They are read as one, so that no step sees only some of them."""

    messages: tuple[ToEngine, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of another process, in words."""

    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), trace)


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine waits for requests."""

    pid: int


@dataclass(frozen=True, slots=True)
class Crashed:
    """The engine could not be made, or its process cannot go on; it exits."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Completions:
    """Members that ended in one engine step, the engine's totals, and its policy version."""

    completions: tuple[Completion, ...]
    counters: EngineCounters
    version: int


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The engine cannot serve this request at all."""

    request_id: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Failed:
    """A step raised. The engine was reset: the requests that it had are gone."""

    failure: Failure
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsTaken:
    """The engine computes with this slot and has left every other; its totals so far."""

    version: int
    slot: int
    counters: EngineCounters


@dataclass(frozen=True, slots=True)
class WeightsRefused:
    """The slot does not hold what was announced; the engine goes on with what it had."""

    version: int
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Paused:
    """The engine stands still, between two steps."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process is alive, however long a step takes."""


ToEngine = (
    AddRequest | Abort | TakeBack | TakeWeights | ForgetPrefixes | Pause | Resume | Stop | Together
)
FromEngine = (
    Ready
    | Crashed
    | Completions
    | RequestRefused
    | Failed
    | WeightsTaken
    | WeightsRefused
    | Paused
    | Heartbeat
)
