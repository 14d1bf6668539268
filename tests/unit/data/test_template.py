"""Rendering to token ids, with real fast tokenizers over a small vocabulary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lagzero.data.rows import Row
from lagzero.data.template import Rendering, one_bos, render
from lagzero.errors import ConfigError

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<system>", "<reply>", "hello", "world", "be", "kind"]
BOS = 1
PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} {% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + PLAIN


def tokenizer(template=PLAIN, adds_bos=True, bos="<s>"):
    core = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token=bos)
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<system>", "<reply>"]})
    made.chat_template = template
    return made


def words(contents, using, **how):
    rows = [Row(f"s/{n}", content, {}) for n, content in enumerate(contents)]
    return [
        out if isinstance(out, str) else [WORDS[n] for n in out]
        for out in render(rows, using, Rendering(**how))
    ]


@pytest.mark.parametrize("template", [PLAIN, WITH_BOS])
def test_a_chat_prompt_has_one_bos_whether_or_not_its_template_writes_it(template):
    """MT7."""
    out = words(["hello world"], tokenizer(template))
    assert out == [["<s>", "<user>", "hello", "world", "<reply>"]]


@pytest.mark.parametrize("text", ["hello", "<s> hello", "<s> <s> hello"])
def test_a_raw_prompt_has_one_bos_whether_or_not_its_text_holds_it(text):
    """MT7."""
    assert words([text], tokenizer(), chat=False) == [["<s>", "hello"]]


def test_a_tokenizer_that_adds_no_bos_gets_only_what_the_template_writes():
    """MT7."""
    assert words(["hello"], tokenizer(PLAIN, False)) == [["<user>", "hello", "<reply>"]]
    assert words(["hello"], tokenizer(WITH_BOS, False))[0][:2] == ["<s>", "<user>"]
    assert words(["hello"], tokenizer(PLAIN, False), chat=False) == [["hello"]]
    assert words(["hello"], tokenizer(PLAIN, False, bos=None)) == [["<user>", "hello", "<reply>"]]


def test_a_bos_that_also_opens_turns_is_kept_inside():
    """MT7."""
    used = tokenizer("{% for m in messages %}<s> {{ m.content }} {% endfor %}<s>", False)
    assert words(["hello"], used) == [["<s>", "hello", "<s>"]]


@given(st.lists(st.integers(0, 3), max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_settling_bos_twice_changes_nothing_and_loses_nothing(ids, bos, adds):
    """MT7."""
    once = one_bos(ids, bos, adds)
    assert one_bos(once, bos, adds) == once
    if bos is None:
        assert once == ids
        return
    assert once[:2] != [bos, bos]
    body = list(ids)
    while body[:1] == [bos]:
        body.pop(0)
    assert once == ([bos] if adds or body != ids else []) + body


def test_messages_are_used_as_they_are_and_text_becomes_a_user_message():
    chat = ({"role": "system", "content": "be"}, {"role": "user", "content": "hello"})
    out = words([chat, "hello"], tokenizer(), system_prompt="kind")
    assert out == [
        ["<s>", "<system>", "be", "<user>", "hello", "<reply>"],
        ["<s>", "<system>", "kind", "<user>", "hello", "<reply>"],
    ]


def test_a_given_template_replaces_the_tokenizers_own():
    template = "world {{ messages[0].content }}"
    assert words(["hello"], tokenizer(), chat_template=template) == [["<s>", "world", "hello"]]


def test_a_tokenizer_without_a_template_is_refused_for_chat_only():
    with pytest.raises(ConfigError, match=r"no chat template.*data\.chat=false"):
        words(["hello"], tokenizer(None))
    assert words(["hello"], tokenizer(None), chat=False) == [["<s>", "hello"]]


def test_a_system_prompt_with_raw_text_is_refused():
    with pytest.raises(ConfigError, match="system_prompt"):
        words(["hello"], tokenizer(), chat=False, system_prompt="be kind")


def test_a_row_that_the_template_refuses_is_named_and_the_others_render():
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + PLAIN
    )
    bad = ({"role": "system", "content": "be"}, {"role": "user", "content": "hello"})
    out = words(["hello", bad, "world"], tokenizer(template))
    assert out[0] == ["<s>", "<user>", "hello", "<reply>"]
    assert out[1] == "the chat template refuses it: no system role"
    assert out[2] == ["<s>", "<user>", "world", "<reply>"]


def test_a_template_that_silently_leaves_something_out_is_refused():
    silent = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert words(["hello"], tokenizer(silent)) == [["<s>", "hello"]]
    (reason,) = words(["hello"], tokenizer(silent), system_prompt="be kind")
    assert reason == "the chat template leaves out the system prompt"
    (reason,) = words(["hello"], tokenizer("<reply>{# nothing #}"))
    assert reason == "the chat template leaves out the prompt's text"


def test_rows_keep_their_order_across_batches():
    texts = [["hello", "world"][n % 3 == 0] for n in range(2100)]
    rows = [Row(str(n), text, {}) for n, text in enumerate(texts)]
    out = list(render(rows, tokenizer(), Rendering(chat=False)))
    assert [WORDS[ids[1]] for ids in out] == texts
    assert out[0].dtype == np.int32
