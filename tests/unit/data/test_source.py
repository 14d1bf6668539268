"""Reading files, and naming sources."""

import builtins
import json
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagzero.config import SourceConfig
from lagzero.data.rows import Columns, check_records
from lagzero.data.source import check_source, read_records, source_labels
from lagzero.errors import LagzeroError

OPTION = "at.options.min_number"


def jsonl(path, *lines):
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return SourceConfig(kind="jsonl", path=str(path))


def test_jsonl_rows_carry_their_line_numbers_over_blank_lines(tmp_path):
    records = read_records(jsonl(tmp_path / "a.jsonl", '{"a": 1}', "", '{"a": "\u2028"}', ""))
    assert [(r.number, r.place, r.fields) for r in records.records] == [
        (1, "line 1", {"a": 1}),
        (3, "line 3", {"a": "\u2028"}),
    ]


def test_each_line_that_is_no_json_object_is_a_problem_with_its_line(tmp_path):
    source = jsonl(
        tmp_path / "a.jsonl", "\ufeff{}", '{"a": 1', "[1]", b'{"a": "\xff"}', "[" * 100_000
    )
    records = read_records(source)
    assert [record.number for record in records.records] == [1]
    assert list(records.problems) == [2, 3, 4, 5]
    assert all(text.startswith(f"line {n}: ") for n, text in records.problems.items())
    assert records.problems[2] == "line 2: not JSON (Expecting ',' delimiter at column 8)"
    assert "list" in records.problems[3]
    assert "UTF-8" in records.problems[4]


def test_size_is_the_most_that_is_read(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", *[json.dumps({"a": n}) for n in range(5)])
    assert len(read_records(source.model_copy(update={"size": 3})).records) == 3
    assert len(read_records(source.model_copy(update={"size": 9})).records) == 5


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "answer": n, "extra": None}
        for n in range(10)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    one = SourceConfig(kind="parquet", path=str(tmp_path / "a.parquet"), size=7)
    other = jsonl(tmp_path / "a.jsonl", *map(json.dumps, rows)).model_copy(update={"size": 7})
    columns = Columns("prompt", "answer")
    checked = [check_records(read_records(s), columns, "s", True) for s in (one, other)]
    assert checked[0] == checked[1]
    assert len(checked[0][0]) == 7


def test_a_file_that_is_no_parquet_says_so(tmp_path):
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(LagzeroError, match=r"a\.parquet is not a Parquet file"):
        read_records(SourceConfig(kind="parquet", path=str(tmp_path / "a.parquet")))


def found(**settings):
    return [line.split(": ")[0] for line in check_source("at", SourceConfig(**settings))]


def test_all_faults_of_a_file_source_are_reported_together(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", "{}").path
    assert found(kind="jsonl", path=file) == []
    extra = {"split": "eval", "options": {"a": 1}, "name": "x", "seed": 2}
    wrong = ["at.name", "at.split", "at.options", "at.seed"]
    assert found(kind="jsonl", path=file, **extra) == wrong
    assert found(kind="parquet", path=str(tmp_path / "no"), **extra) == [*wrong, "at.path"]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"kind": "arithmetic", "split": "test"}, "at.split"),
        ({"kind": "arithmetic", "path": "x"}, "at.path"),
        ({"kind": "arithmetic", "name": "x"}, "at.name"),
        ({"kind": "arithmetic", "options": {"tasks": [{"kind": "ad"}]}}, "at.options.tasks.0.kind"),
        ({"kind": "reasoning_gym"}, "at.name"),
        ({"kind": "reasoning_gym", "name": "countdwn"}, "at.name"),
        ({"kind": "reasoning_gym", "name": "gcd", "options": {"min_number": 1}}, OPTION),
        ({"kind": "reasoning_gym", "name": "gcd", "options": {"min_numbers": 0}}, "at.options"),
        ({"kind": "hub"}, "at.path"),
        ({"kind": "hub", "path": "a/b", "seed": 1}, "at.seed"),
        ({"kind": "jsonl"}, "at.path"),
    ],
)
def test_each_impossible_setting_is_named_by_its_path(settings, path):
    assert found(**settings) == [path]


def test_a_path_may_start_at_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(tmp_path / "a.jsonl", '{"a": 1}')
    source = SourceConfig(kind="jsonl", path="~/a.jsonl")
    assert check_source("at", source) == []
    assert len(read_records(source).records) == 1


def test_a_hub_source_without_the_package_names_the_extra(monkeypatch):
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(LagzeroError, match=r"lagzero\[datasets\]"):
        read_records(SourceConfig(kind="hub", path="org/set"))


def test_a_hub_source_passes_its_settings_on(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return [{"a": n} for n in range(5)]

    package = types.ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    source = SourceConfig(
        kind="hub", path="org/set", name="main", split="test", size=2, options={"revision": "r"}
    )
    records = read_records(source)
    assert calls == [(("org/set",), {"name": "main", "split": "test", "revision": "r"})]
    assert [record.fields for record in records.records] == [{"a": 0}, {"a": 1}]


@given(
    st.lists(
        st.builds(
            SourceConfig,
            kind=st.sampled_from(["jsonl", "hub"]),
            path=st.text("a/.#2:", max_size=6),
            name=st.none() | st.sampled_from(["a", "a#2"]),
            split=st.sampled_from(["train", "t/x", "t.x", ""]),
        ),
        max_size=8,
    )
)
def test_labels_are_unique_and_end_at_the_first_slash_of_an_id(sources):
    """DI4."""
    labels = source_labels(sources)
    assert len(set(labels)) == len(sources)
    assert not any("/" in label for label in labels)
