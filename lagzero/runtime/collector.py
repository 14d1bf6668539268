"""Starts a process without looking for garbage: what is imported and loaded then, stays."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Generator[None]:
    """Collect no garbage within; then once, and never look at what is left again.

    Imports make some hundred thousand objects, and Python's collector would go through them time
    and again while they become more: a seventh of an engine's start (figures in ``docs/log.md``).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
