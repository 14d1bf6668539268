"""What tests of the C library share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def on_threads() -> Callable[..., Any]:
    """A call of a function on so many of torch's threads: (threads, function, *inputs)."""

    def call(threads: int, function: Callable[..., Any], *inputs: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return function(*inputs)
        finally:
            torch.set_num_threads(before)

    return call
