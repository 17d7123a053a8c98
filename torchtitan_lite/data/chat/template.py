"""Chat templates: Jinja text that comes with a model and writes a chat down as the model is to read it.

A template may be anybody's, so it runs in a sandbox. It is given what ``transformers`` gives it, and renders the same.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan_lite.data.sources.document import BadRecord, SourceError

TODAY = datetime(2024, 7, 26)
"""The day that every template is told it is: the one that Llama 3's own fall back to. A run that goes on tomorrow, or a
node that starts after midnight, must make the same tokens."""

BEGIN, END = "\ufdd0", "\ufdd1"
"""Put around what stands between generation markers. Unicode reserves both for such use inside a program."""


class ChatTemplateError(SourceError):
    """A chat template that is missing or broken, or does not show which tokens are to be trained on."""


class RefusedByTemplate(BadRecord):
    """The template itself says that it takes no such chat."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, or two: ``tool_use`` is for chats with tools, where there is one."""

    where: str  # for messages: the file it is from
    text: str
    tool_use: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, ... as the template may name them

    def __post_init__(self) -> None:
        """Raises ChatTemplateError where the text is no Jinja."""
        for text in filter(None, (self.text, self.tool_use)):
            try:
                _compiled(text)
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"{self.where}: the chat template is broken at its line {error.lineno}: {error.message}"
                ) from None

    @property
    def identity(self) -> list[Any]:
        """All that a rendering depends on beside the chat."""
        return [self.text, self.tool_use, sorted(self.special_tokens.items())]

    def marks_answers(self, tools: Sequence[Any]) -> bool:
        """Whether the template for chats with such tools has ``{% generation %}`` markers."""
        return _compiled(self._chosen(tools)).marks_answers

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, generation_prompt: bool = False
    ) -> str:
        """The chat as text, with BEGIN and END around what stands between generation markers.

        Args:
            generation_prompt: whether to end with what comes before an answer.

        Raises:
            BadRecord: the template refuses the chat or fails on it.
        """
        try:
            return _compiled(self._chosen(tools)).template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.special_tokens,
            )
        except _Refusal as error:
            raise RefusedByTemplate(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template's code may fail in any way
            raise BadRecord(f"the chat template ({self.where}) fails on it: {error}") from None

    def _chosen(self, tools: Sequence[Any]) -> str:
        return self.tool_use if tools and self.tool_use is not None else self.text


def load_chat_template(folder: Path, given: str | None) -> ChatTemplate | None:
    """The template in the file ``given`` by data.chat_template, or else a tokenizer folder's; None if it has none.

    A folder's is ``chat_template.jinja``, beside which ``additional_chat_templates/tool_use.jinja`` may lie, or else
    ``chat_template`` in ``tokenizer_config.json``: text, or a list of named ones of which "default" and "tool_use" are
    looked at.

    Raises:
        ChatTemplateError: the file cannot be read or is no template.
    """
    special_tokens = {
        name: text
        for file in ("special_tokens_map.json", "tokenizer_config.json")
        for name, value in _read_json(folder / file).items()
        if name.endswith("_token") and isinstance(text := _content(value), str)
    }
    own = folder / "chat_template.jinja"
    if given is not None or own.is_file():
        file = own if given is None else Path(given).expanduser()
        for_tools = folder / "additional_chat_templates" / "tool_use.jinja"
        tool_use = _read(for_tools) if given is None and for_tools.is_file() else None
        return ChatTemplate(str(file), _read(file), tool_use, special_tokens)
    where = str(folder / "tokenizer_config.json")
    found = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found, tool_use = named.get("default"), named.get("tool_use")
    else:
        tool_use = None
    if found is None:
        return None
    if not isinstance(found, str) or not isinstance(tool_use, str | None):
        raise ChatTemplateError(f"{where}: chat_template is no text")
    return ChatTemplate(where, found, tool_use, special_tokens)


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ChatTemplateError(f"{file}: no such file; give a Jinja file with a chat template") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{file}: the chat template cannot be read: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    """Empty where there is none. The tokenizer, which reads these files too, complains about broken ones."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# -- Jinja -------------------------------------------------------------------------------------------------------------


class _Refusal(Exception):
    """What ``raise_exception`` raises."""


class _Generation(Extension):
    """The block ``{% generation %} ... {% endgeneration %}`` around what the model writes."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


@dataclass(frozen=True)
class _Compiled:
    template: jinja2.Template
    marks_answers: bool


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> _Compiled:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    environment.globals["dict"] = _dict
    tokens = [(kind, value) for _, kind, value in environment.lex(text) if kind != "whitespace"]
    marks = any(
        kind == "block_begin" and value == ("name", "generation") for (kind, _), value in itertools.pairwise(tokens)
    )
    return _Compiled(environment.from_string(text), marks)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """For the type itself, whose ``update`` would change the chat."""
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As JSON has it; Jinja's own filter would escape what HTML must."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
