"""Named shared memory that is as large as it says, and that is not left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from lagzero.errors import LagzeroError

_FOLDER = Path("/dev/shm")  # where Linux shows the segments
_NAME = re.compile(r"lagzero-(\d+)-[0-9a-f]{8}")


class Segment:
    """Shared memory of a fixed size that this process owns; other processes open it by name.

    The resource tracker of ``multiprocessing`` removes it should this process be killed: it is
    registered once here, and again, without effect, by each process that it spawned. Therefore
    ``close`` only when those have ended.
    """

    def __init__(self, num_bytes: int):
        """Create and reserve it. Raises LagzeroError when there is not so much shared memory."""
        self._memory = SharedMemory(
            f"lagzero-{os.getpid()}-{secrets.token_hex(4)}", create=True, size=num_bytes
        )
        self._lock: int | None = None
        if sys.platform == "linux":
            try:
                self._lock = _reserve(_FOLDER / self.name, num_bytes)
            except BaseException:
                self._remove()
                raise

    @property
    def name(self) -> str:
        """The name that other processes open it by."""
        return self._memory.name

    @property
    def memory(self) -> SharedMemory:
        """The memory itself. No tensor may point into it after ``close``."""
        return self._memory

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._remove()

    def _remove(self) -> None:
        self._memory.close()
        with contextlib.suppress(FileNotFoundError):
            self._memory.unlink()


def _reserve(path: Path, num_bytes: int) -> int:
    """Lock a segment as in use and fill it with zeros; return the descriptor that holds the lock.

    Without that, memory that is not there would show as a bus error in the middle of a copy.
    """
    import fcntl

    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        free = os.statvfs(_FOLDER)
        raise LagzeroError(
            f"shared memory is too small: two copies of the weights need {num_bytes / 1e9:.3g} GB, "
            f"and {_FOLDER} has {free.f_bavail * free.f_frsize / 1e9:.3g} GB left. In a container, "
            "start it with a larger one (docker run --shm-size=...); else free some"
        ) from error
    return descriptor


def remove_abandoned() -> list[str]:
    """Remove segments whose owner was killed together with all that could clean up after it.

    One is abandoned when its owner's process number is free and nobody holds its lock, which the
    system releases at the owner's death. Returns the names.
    """
    removed: list[str] = []
    if sys.platform != "linux" or not _FOLDER.is_dir():
        return removed
    import fcntl

    for path in _FOLDER.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        with contextlib.suppress(OSError):  # locked, another user's, or removed meanwhile
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(descriptor)
    return removed
