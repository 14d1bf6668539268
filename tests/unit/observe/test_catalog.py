"""One table of metrics: whole, documented, and enforced."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lagzero.observe.catalog import CATALOG, REDUCTIONS, Metric, checked, find, markdown, schema
from lagzero.types import Finish


def test_each_row_is_whole_and_named_once():
    names = [metric.name for metric in CATALOG]
    assert len(names) == len(set(names))
    for metric in CATALOG:
        assert metric.reduction in REDUCTIONS
        assert metric.text.endswith("."), metric


def test_the_name_tells_the_unit_and_the_reduction():
    for metric in CATALOG:
        if metric.name.endswith("tok_per_s"):
            assert metric.unit == "tok/s", metric
        elif metric.name.endswith("_s"):
            assert metric.unit == "s", metric
        for word in ("max", "min", "share"):
            if metric.name.endswith(word):
                assert metric.reduction == word, metric


def test_the_page_has_one_line_for_each_metric():
    table = markdown()
    for metric in CATALOG:
        assert table.count(f"| `{metric.name}` |") == 1


def test_a_star_stands_for_any_one_name():
    rows = (Metric("reward/part/*/mean", "", "mean", "x"),)
    assert find("reward/part/math.py:f/mean", rows) is rows[0]
    assert find("reward/part//mean", rows) is None
    assert find("reward/part/a/max", rows) is None
    assert find("rewardxpart/a/mean", rows) is None


def test_each_way_to_finish_has_a_metric():
    assert all(find(f"finish/{finish.value}/share") for finish in Finish)


def test_an_unknown_metric_is_refused_with_every_name():
    with pytest.raises(ValueError, match="no/such, reward/men"):
        checked({"no/such": 1, "reward/mean": 1, "reward/men": 2})


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="reward/mean is 'x'"):
        checked({"reward/mean": "x"})


def test_values_become_plain_numbers_and_those_not_finite_are_left_out():
    """RF6"""
    values = {
        "reward/mean": np.float32(0.5),
        "groups/count": np.int64(3),
        "reward/std": math.nan,
        "reward/max": math.inf,
    }
    found = checked(values)
    assert found == {"reward/mean": 0.5, "groups/count": 3}
    assert [type(v) for v in found.values()] == [float, int]


def test_the_schema_says_unit_reduction_and_meaning():
    row = find("time/train_s")
    assert row is not None
    assert schema(["time/train_s"]) == {
        "time/train_s": {"unit": "s", "reduction": "sum", "text": row.text}
    }
