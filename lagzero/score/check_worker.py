"""The process that decides the checks which may not end. It reads and writes lines of JSON.

Its parent ends it when a check takes too long. A line in: ``[gold, answer, round_to_gold]``; a line
out: ``true`` or ``false``. The texts are parsed by the grammar of ``lagzero.score``; nothing in
them is ever run.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time

MEMORY_BYTES = 4 * 2**30


def main() -> None:
    """Answer checks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    if hasattr(sys, "set_int_max_str_digits"):  # added in a patch release of 3.10
        sys.set_int_max_str_digits(0)
    _limit_memory()
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    # Loaded before the first check, whose time limit it must not use up.
    importlib.import_module("lagzero.score.symbolic")
    from lagzero.score.decide import decide_slowly

    print("ready", flush=True)
    for line in sys.stdin:
        gold, answer, round_to_gold = json.loads(line)
        try:
            verdict = decide_slowly(gold, answer, round_to_gold)
        except (MemoryError, RecursionError):
            verdict = False  # an answer that cannot be worked out is not shown to be right
        print(json.dumps(verdict), flush=True)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    if soft == resource.RLIM_INFINITY or soft > limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    main()
