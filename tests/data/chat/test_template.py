"""Renderings, against those of transformers."""

import contextlib
import json

import pytest
from toy_chat import MARKED, TEMPLATES, TWO_TURNS, USER, save_chat_tokenizer
from transformers import PreTrainedTokenizerFast

from torchtitan_lite.data.chat.answers import render, render_answers
from torchtitan_lite.data.chat.template import (
    BEGIN,
    ChatTemplate,
    ChatTemplateError,
    RefusedByTemplate,
    load_chat_template,
)
from torchtitan_lite.data.sources.document import BadRecord
from torchtitan_lite.data.tokenizer import DEBUG_TOKENIZER

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"town": "<é & 'x'>", "n": [1, 2.5, None]}},
}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"town": "Zürich <b>"}}}],
}
CHATS = {
    "two turns": ([*TWO_TURNS], None),
    "white space": ([{"role": "user", "content": " \n a\n\n"}, {"role": "assistant", "content": "\tb "}], None),
    "tools": ([USER, CALL, {"role": "tool", "content": '{"c": 21}'}, TWO_TURNS[3]], [WEATHER]),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder as transformers loads it."""
    return PreTrainedTokenizerFast.from_pretrained(str(save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.mark.parametrize(
    ("name", "chat"), [*((name, chat) for name in TEMPLATES for chat in list(CHATS)[:2]), ("tools", "tools")]
)
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_renderings_are_those_of_transformers(tmp_path, theirs, name, chat, generation_prompt):
    messages, tools = CHATS[chat]
    template = load_chat_template(save_chat_tokenizer(tmp_path, TEMPLATES[name]), None)
    expected = theirs.apply_chat_template(
        messages,
        tools,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=generation_prompt,
    )
    rendered = template.render(messages, tools or [], generation_prompt=generation_prompt)
    assert rendered.replace("\ufdd0", "").replace("\ufdd1", "") == expected
    if not generation_prompt:
        assert render(template, messages, tools or []) == expected


def test_the_debug_template_is_rendered_as_by_transformers():
    theirs = PreTrainedTokenizerFast.from_pretrained(str(DEBUG_TOKENIZER))
    template = load_chat_template(DEBUG_TOKENIZER, None)
    for messages, tools in CHATS.values():
        messages = [{"role": "system", "content": "Be brief."}, *messages]
        rendering = render_answers(template, messages, tools or [])
        assert rendering.text == theirs.apply_chat_template(messages, tools, tokenize=False)
        whole = theirs.apply_chat_template(
            messages, tools, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        marked = "".join(rendering.text[begin:end] for begin, end in rendering.answers)
        pairs = zip(whole["input_ids"], whole["assistant_masks"], strict=True)
        assert theirs.decode([token for token, taken in pairs if taken]) == marked


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        (MARKED, True),
        ("{%- generation -%}x{%endgeneration%}", True),
        ("{{ generation }}", False),
        ("{# {% generation %} #}{{ '{% generation %}' }}", False),
        ("{% set generation = 1 %}", False),
    ],
)
def test_what_is_a_marker(text, marks):
    template = ChatTemplate("t", text)
    assert template.marks_answers([]) is marks
    assert (BEGIN in template.render(TWO_TURNS)) is marks


def test_where_the_template_comes_from(tmp_path):
    folder = save_chat_tokenizer(tmp_path)
    assert load_chat_template(folder, None) is None

    def configure(chat_template):
        config = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": chat_template}))

    configure("of the configuration {{ bos_token }} {{ eos_token }}")
    assert load_chat_template(folder, None).render([]) == "of the configuration <bos> <eos>"
    configure([{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "without"}])
    template = load_chat_template(folder, None)
    assert (template.render([]), template.render([], [WEATHER])) == ("without", "with tools")
    (folder / "chat_template.jinja").write_text("of its own file")
    assert load_chat_template(folder, None).render([]) == "of its own file"
    (tmp_path / "given.jinja").write_text("given {{ bos_token }}")
    assert load_chat_template(folder, str(tmp_path / "given.jinja")).render([]) == "given <bos>"


def test_a_template_for_tools_beside_the_default_one(tmp_path):
    """As transformers writes and reads several."""
    folder = save_chat_tokenizer(tmp_path, "without {{ bos_token }}")
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    theirs.chat_template = {"default": "without {{ bos_token }}", "tool_use": "with {{ tools | length }}"}
    theirs.save_pretrained(str(tmp_path / "saved"))
    ours = load_chat_template(tmp_path / "saved", None)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "saved"))
    for tools in ([], [WEATHER]):
        assert ours.render([USER], tools) == theirs.apply_chat_template([USER], tools or None, tokenize=False)
    given = load_chat_template(tmp_path / "saved", str(folder / "chat_template.jinja"))
    assert given.render([USER], [WEATHER]) == "without <bos>"


def test_templates_that_are_none(tmp_path):
    folder = save_chat_tokenizer(tmp_path, "a\n{% if x %}")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja: the chat template is broken at its line 2: "):
        load_chat_template(folder, None)
    with pytest.raises(ChatTemplateError, match=r"nowhere\.jinja: no such file"):
        load_chat_template(folder, "nowhere.jinja")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        load_chat_template(folder, None)


def test_a_template_may_refuse_and_may_fail():
    with pytest.raises(RefusedByTemplate, match="the chat template refuses it: Roles must alternate"):
        ChatTemplate("t", TEMPLATES["inst"], special_tokens={"bos_token": ""}).render([USER, USER])
    with pytest.raises(BadRecord, match=r"the chat template \(t\) fails on it: "):
        ChatTemplate("t", "{{ messages[0]['content'] + 1 }}").render([USER])


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.update(messages[0], dict(content='')) or '' }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(text):
    messages = [{**USER}]
    with contextlib.suppress(BadRecord):
        assert ChatTemplate("t", text).render(messages) == ""
    assert messages == [USER]


def test_the_day_is_always_the_same():
    """The tokens of a run that goes on tomorrow must be those of today."""
    assert ChatTemplate("t", "{{ strftime_now('%d %b %Y') }}").render([]) == "26 Jul 2024"
