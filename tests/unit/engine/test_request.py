"""Requests are checked where they are made, and seeds are the same everywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lagzero.engine.request import Request, Sampling, Sequence, derive_seed
from lagzero.types import sampled_tokens


def test_derived_seeds_are_stable_across_processes():
    """EN4: blake2b-64 of the parts, little-endian; the numbers were computed apart from lagzero."""
    assert derive_seed(0, "train", 0, "row-0", 0) == 10236088331839962291
    code = "from lagzero.engine.request import derive_seed;print(derive_seed(7, 'eval', 3, 'é', 1))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "123", "PATH": ""},
    )  # fmt: skip
    assert int(out.stdout) == derive_seed(7, "eval", 3, "é", 1) == 6963032441076126928


def test_each_part_changes_the_seed_and_none_run_together():
    parts = [
        (0, "a", 1),
        (1, "a", 1),
        (0, "b", 1),
        (0, "a", 2),
        (0, "a1"),
        ("0a", 1),
        (0, "", "a1"),
    ]
    assert len({derive_seed(*p) for p in parts}) == len(parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"min_p": 1.0}, "min_p=1.0"),
        ({"stop_strings": ("a", "")}, "non-empty"),
    ],
)
def test_impossible_sampling_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 4, **changes})


def test_all_problems_of_a_sampling_are_named_at_once():
    with pytest.raises(ValueError, match=r"max_new_tokens=-2.*top_k=-1"):
        Sampling(-2, top_k=-1)


@pytest.mark.parametrize("seeds", [(), (-1,), (1 << 64,)])
def test_a_request_needs_64_bit_seeds(seeds):
    """A bad one would otherwise fail a whole step, and with it every other request."""
    with pytest.raises(ValueError, match="64-bit"):
        Request(3, (1, 2), seeds, Sampling(1))


def test_a_request_refuses_negative_tokens():
    with pytest.raises(ValueError, match="request 3: the prompt holds a negative"):
        Request(3, (1, -2), (0,), Sampling(1))


@pytest.mark.parametrize(
    ("versions", "number"),
    [([], 0), ([2, 2], 2), ([1, 2, 2], 2), ([2, 2, 3], 0), ([2, 1, 2], 1), ([1], 0)],
)
def test_only_the_newest_tokens_of_a_version_count_into_its_round(versions, number):
    begun = sampled_tokens([5] * len(versions), [-1.0] * len(versions), versions)
    seq = Sequence.all_of(Request(0, (1, 2), (0,), Sampling(9), (begun,)))[0]
    assert seq.num_sampled_by(2) == number
