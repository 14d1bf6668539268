"""From configuration to objects."""

from __future__ import annotations

import pytest
import torch

from lagzero import build
from lagzero.config_load import parse_config


class Small:
    """What the size of a cache depends on: 1 layer of 2 heads of 8, in float32."""

    device = torch.device("cpu")
    dtype = torch.float32
    context_limit = 1000

    def hidden(self, ids, position_ids, plan):
        state = torch.zeros(len(ids), 2, 8)
        return plan.attend(0, state, state, state, 1.0, None)


@pytest.mark.parametrize(
    ("free", "expected"), [(128 * 640, 320), (0, 16), (1 << 40, 4 * Small.context_limit)]
)
def test_the_cache_takes_its_share_of_what_is_free_and_no_more_than_is_useful(
    free: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    """A token takes 2 * 2 * 8 * 4 = 128 bytes; at least one page, at most every slot's context."""
    monkeypatch.setattr(build, "free_bytes", lambda device: free)
    config = parse_config(
        {
            "data": {"train": [{"kind": "arithmetic"}]},
            "score": {"rewards": [{"use": "number_answer"}]},
            "eval": {"before": False, "after": False},
            "engine": {"kv_cache_share": 0.5, "max_running": 4, "page_size": 16},
        }
    )
    assert build._engine_limits(config, Small()).kv_cache_tokens == expected
