"""Loading end to end, with a tokenizer of one token a character."""

import json
import subprocess
import sys
import textwrap

import pytest

from lagzero.config import DataConfig, SourceConfig
from lagzero.data.load import drop_overlap, load_prompts
from lagzero.errors import ConfigError, DataError


class CharTokenizer:
    """Ids are code points; the template adds ``U:`` before and ``R:`` after, and BOS is 0."""

    chat_template = "used"
    bos_token_id = 0

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [[0] * add_special_tokens + [ord(c) for c in t] for t in text]}

    def apply_chat_template(self, conversation, *, chat_template, tokenize, add_generation_prompt):
        assert add_generation_prompt
        assert not tokenize
        return ["".join(f"U:{m['content']}" for m in chat) + "R:" for chat in conversation]


ADDED = len("U:R:") + 1


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(kind="jsonl", path=str(path))


def rows_of(*lengths):
    return [{"prompt": "x" * n, "answer": n} for n in lengths]


def load(*sources, which="train", evals=(), loading=None, **data):
    config = DataConfig(train=list(sources), eval=list(evals), **data)
    return load_prompts(config, CharTokenizer(), which=which, **(loading or {}))


def prompts_of(prompts):
    return [prompts.at(index) for index in range(len(prompts))]


def test_two_sources_that_both_number_rows_from_the_start_give_six_prompts(tmp_path):
    """DI4."""
    (tmp_path / "b").mkdir()
    one = jsonl(tmp_path / "a.jsonl", *rows_of(1, 2, 3))
    other = jsonl(tmp_path / "b" / "a.jsonl", *rows_of(1, 2, 3))
    prompts, report = load(one, other)
    assert len(prompts) == report.num_rows == 6
    assert len({p.id for p in prompts_of(prompts)}) == 6


def test_a_file_with_a_repeated_id_is_refused_before_anything_runs(tmp_path):
    """DI4."""
    source = jsonl(
        tmp_path / "a.jsonl",
        {"id": "q", "prompt": "p", "answer": 4},
        {"id": "q", "prompt": "p", "answer": 5},
    )
    with pytest.raises(DataError, match="line 2: id 'q' repeats that of line 1"):
        load(source, id_column="id")


def test_number_answers_reach_the_reward_as_text_and_bad_ones_name_their_line(tmp_path):
    """DI2."""
    good = jsonl(tmp_path / "a.jsonl", {"prompt": "p", "answer": 3}, {"prompt": "p", "answer": 3.0})
    assert [p.columns["answer"] for p in prompts_of(load(good)[0])] == ["3", "3"]
    bad = jsonl(
        tmp_path / "b.jsonl", {"prompt": "p", "answer": None}, {"prompt": "p", "answer": ""}
    )
    with pytest.raises(DataError) as error:
        load(bad)
    assert [line.split(":")[0] for line in error.value.problems] == ["line 1", "line 2"]


def test_an_absent_column_is_named_at_load(tmp_path):
    """DI2."""
    source = jsonl(tmp_path / "a.jsonl", {"question": "p", "answer": 3})
    with pytest.raises(DataError, match="no column 'prompt'.*question.*set data.prompt_column"):
        load(source)
    assert load(source, prompt_column="question")[0].at(0).content == "p"


def test_bad_rows_of_all_sources_are_listed_with_their_file(tmp_path):
    one = jsonl(tmp_path / "a.jsonl", {"prompt": "", "answer": 1})
    other = jsonl(tmp_path / "b.jsonl", {"prompt": "p", "answer": 1}, {"prompt": "p"})
    with pytest.raises(DataError) as error:
        load(one, other)
    assert len(error.value.problems) == 2
    assert "a.jsonl: line 1:" in error.value.problems[0]
    assert "b.jsonl: line 2:" in error.value.problems[1]


def test_settings_of_all_sources_are_reported_together():
    bad = SourceConfig(kind="arithmetic", split="test")
    with pytest.raises(ConfigError) as error:
        load(bad, SourceConfig(kind="jsonl"))
    assert [problem.split(": ")[0] for problem in error.value.problems] == [
        "data.train.0.split",
        "data.train.1.path",
    ]


@pytest.mark.parametrize("which", ["train", "eval"])
@pytest.mark.parametrize("system", [None, "s" * 8])
def test_overlong_prompts_are_measured_with_all_that_the_template_adds(tmp_path, which, system):
    """DI1."""
    added = ADDED + (len("U:") + 8 if system else 0)
    source = jsonl(tmp_path / "a.jsonl", *rows_of(5, 12, 40))
    prompts, report = load(
        source,
        evals=[source],
        which=which,
        max_prompt_tokens=5 + added,
        loading={"system_prompt": system},
    )
    assert [len(p.token_ids) for p in prompts_of(prompts)] == [5 + added]
    assert [row.id for row in report.dropped] == ["jsonl:a:train/2", "jsonl:a:train/3"]
    assert report.dropped[0].reason == f"prompt above {5 + added} tokens: has {12 + added}"
    assert f"2 left out (prompt above {5 + added} tokens)" in report.summary()
    assert (report.num_rows, report.num_prompts, report.max_prompt_tokens) == (3, 1, 5 + added)


def test_overlong_prompts_can_be_refused_and_are_all_named(tmp_path):
    """DI1."""
    source = jsonl(tmp_path / "a.jsonl", *rows_of(5, 12, 40))
    with pytest.raises(DataError) as error:
        load(source, max_prompt_tokens=5 + ADDED, long_prompts="refuse")
    assert len(error.value.problems) == 2


def test_a_prompt_must_leave_room_for_one_token_in_the_context(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", *rows_of(5, 6, 7))
    prompts, _ = load(source, loading={"context_limit": 7 + ADDED})
    assert sorted(len(p.content) for p in prompts_of(prompts)) == [5, 6]
    prompts, _ = load(source, max_prompt_tokens=5 + ADDED, loading={"context_limit": 100})
    assert len(prompts) == 1


def test_no_prompt_left_is_an_error_with_reasons(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", *rows_of(50))
    with pytest.raises(DataError, match="no prompt is left"):
        load(source, max_prompt_tokens=10)
    with pytest.raises(DataError, match="hold no rows"):
        load(jsonl(tmp_path / "b.jsonl"))


def test_held_out_prompts_render_alike_and_are_visited_once_in_order(tmp_path):
    """MT7."""
    source = jsonl(tmp_path / "a.jsonl", *rows_of(*range(1, 30)))
    train, _ = load(source)
    held_out, _ = load(source, evals=[source], which="eval")
    assert [len(p.content) for p in prompts_of(held_out)] == list(range(1, 30))
    assert held_out.at(29) is None
    assert train.at(29) is not None
    tokens = {p.content: p.token_ids for p in prompts_of(train)}
    assert tokens == {p.content: p.token_ids for p in prompts_of(held_out)}
    assert [p.id for p in prompts_of(train)] != [p.id for p in prompts_of(held_out)]


def test_no_held_out_source_is_an_error():
    with pytest.raises(ConfigError, match=r"data\.eval"):
        load(SourceConfig(kind="arithmetic", size=2), which="eval")


def test_held_out_prompts_that_are_also_training_prompts_are_dropped_and_named(tmp_path):
    train, _ = load(jsonl(tmp_path / "a.jsonl", *rows_of(1, 2, 3)))
    held_out = jsonl(tmp_path / "b.jsonl", *rows_of(2, 4, 3, 5))
    evals, _ = load(held_out, evals=[held_out], which="eval")
    left, dropped = drop_overlap(train, evals)
    assert [len(p.content) for p in prompts_of(left)] == [4, 5]
    assert [(d.id, d.reason) for d in dropped] == [
        ("jsonl:b:train/1", "also a training prompt: jsonl:a:train/2"),
        ("jsonl:b:train/3", "also a training prompt: jsonl:a:train/3"),
    ]
    assert drop_overlap(train, left)[1] == ()
    with pytest.raises(DataError, match="no held-out prompt is left"):
        drop_overlap(train, train)


def test_generators_name_their_own_columns_in_a_mix(tmp_path):
    files = jsonl(tmp_path / "a.jsonl", {"q": "p", "gold": 3})
    prompts, _ = load(
        files,
        SourceConfig(kind="arithmetic", size=3),
        prompt_column="q",
        answer_column="gold",
    )
    assert len(prompts) == 4
    assert all(isinstance(p.columns["answer"], str) for p in prompts_of(prompts))


def test_loading_imports_no_heavy_package():
    code = """
        import sys
        import lagzero.data.load
        heavy = {"torch", "transformers", "pyarrow", "datasets", "reasoning_gym", "jinja2"}
        sys.exit(", ".join(heavy & set(sys.modules)) or 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
