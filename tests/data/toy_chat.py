"""Tokenizers with special tokens for chats, and templates like those that models come with."""

import json
from pathlib import Path

from data.toy_data import save_character_tokenizer
from tokenizers import Tokenizer

SPECIAL = ["<|start|>", "<|end|>", "<|header|>", "<|/header|>", "<|call|>"]

# A header of special tokens, trimmed content, BOS first: as Llama 3 has it.
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
# Roles in plain text between special tokens, a newline behind each turn, no BOS.
CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '\n' + message.content + '<|end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# EOS at the end of each turn, the roles plain text on lines of their own.
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
# No generation prompt, BOS before each question.
INST = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Tools as JSON, calls behind a special token, results as a role of their own.
TOOLS = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|header|>tools<|/header|>' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) + '\n' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|header|>' + message.role + '<|/header|>' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '<|call|>' + call.function.name + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '<|end|>' }}
        {%- continue %}
    {%- endif %}
    {{- message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>' }}{% endif %}
"""
# Says itself what the assistant writes; its end-of-turn token is followed by a newline outside.
MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant\n' }}
        {%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|start|>' + message.role + '\n' + message.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}
"""
TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML, "zephyr": ZEPHYR, "inst": INST, "tools": TOOLS, "marked": MARKED}

USER, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
TWO_TURNS = [USER, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Quite é sure."}]


def save_chat_tokenizer(folder: Path, template: str | None = None) -> Path:
    """One token per byte, and the special tokens above; <bos> and <eos> are 0 and 1."""
    save_character_tokenizer(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
