"""Keep freed memory in the process, so that large temporaries do not fault their pages in again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>


def keep_freed_memory(limit_bytes: int = 1 << 30) -> bool:
    """Let glibc reuse freed blocks of up to ``limit_bytes`` instead of unmapping them.

    By default glibc returns every block above a threshold to the system, and each new one is
    faulted in page by page: gathering 16 MB of keys took 14 ms instead of 4 (bench in
    ``docs/log.md``). All threads share the first arena: those of other threads consist of parts of
    64 MB, which are returned whatever the thresholds. Returns False, changing nothing, where the
    C library is another.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, limit_bytes),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(name, value) for name, value in wanted)
