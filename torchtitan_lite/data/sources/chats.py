"""Records that hold a chat: what they must look like, and the one text that they are kept as.

That text is JSON: ``{"messages": [...], "tools": [...]}``, or ``{"prompt": ..., "completion": ...}``. No template and
no tokenizer has a say in it, so it is read, checked and cached like any other document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.data.sources.document import (
    BadRecord,
    Record,
    Source,
    TextMaker,
    TextOf,
    check_unicode,
    kind_of,
    listed,
    value_at,
)


@dataclass(frozen=True)
class ChatOf:
    """Makes the JSON of a chat of a record: of its ``messages_field``, or of its fields prompt and completion.

    Keys without a value are left out at any depth, as tables have every key in every row.
    """

    format: str  # messages or prompt_completion
    messages_field: str = "messages"

    @property
    def required(self) -> list[str]:
        """The top-level fields that a record must have."""
        return [self.messages_field] if self.format == "messages" else ["prompt", "completion"]

    @property
    def columns(self) -> list[str]:
        """The top-level fields that are read."""
        return list(dict.fromkeys([*self.required, "tools"]))

    @property
    def setting(self) -> str:
        """The setting that decides which fields are read."""
        return "data.messages_field" if self.format == "messages" else "data.format=prompt_completion"

    @property
    def identity(self) -> list[str | None]:
        """All that a record's text depends on beside the record."""
        return [self.format, self.messages_field]

    def __call__(self, record: Record) -> str:
        """The JSON of a record's chat.

        Raises:
            BadRecord: the record is broken, or is no chat; says why.
        """
        if record.fields is None:
            raise BadRecord(record.problem)
        names = record.fields if record.names is None else record.names
        values = [value_at(record.fields, (name,), names, self.setting) for name in self.required]
        if self.format == "messages":
            chat = {"messages": _messages(self.messages_field, values[0], self.setting)}
        else:
            chat = _prompt_and_completion(*values)
        if tools := _tools(record.fields.get("tools")):
            chat["tools"] = tools
        try:
            text = json.dumps(chat, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRecord(f"its chat cannot be written as JSON: {error}") from None
        check_unicode(text)
        return text


def maker_of(source: Source) -> TextMaker:
    """What makes the documents of a source whose records have fields."""
    if source.format == "text":
        return TextOf(source.text_field, source.template)
    return ChatOf(source.format, source.messages_field)


def _prompt_and_completion(prompt: Any, completion: Any) -> dict[str, Any]:
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRecord("field 'completion' is empty, so there is nothing to learn")
        return {"prompt": prompt, "completion": completion}
    if isinstance(prompt, list) and isinstance(completion, list):
        return {name: _messages(name, part) for name, part in (("prompt", prompt), ("completion", completion))}
    raise BadRecord(
        f"field 'prompt' is {kind_of(prompt)} and 'completion' {kind_of(completion)}; both must be text, or both a "
        "list of messages"
    )


def _messages(name: str, value: Any, setting: str = "") -> list[dict[str, Any]]:
    where = f" ({setting})" if setting else ""
    if not isinstance(value, list):
        raise BadRecord(f"field {name!r} is {kind_of(value)}, not a list of messages{where}")
    if not value:
        raise BadRecord(f"field {name!r} is an empty list{where}; a chat has messages")
    return [_message(f"{name}[{number}]", message) for number, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRecord(f"{where} is {kind_of(message)}, no object with role and content")
    message = _without_nulls(message)
    if "role" not in message and {"from", "value"} <= set(message):
        raise BadRecord(
            f"{where} has the keys from and value, as ShareGPT data do; rename them to role and content, and the "
            "values of from to what the chat template knows (human to user, gpt to assistant)"
        )
    if not isinstance(message.get("role"), str):
        has = f"its role is {kind_of(message['role'])}, not text" if "role" in message else "it has no role"
        raise BadRecord(f"{where}: {has}; its keys are {listed(message) or 'none'}")
    where = f"{where} ({message['role']})"
    if "content" not in message:
        if not message.get("tool_calls"):
            raise BadRecord(f"{where} has neither content nor tool_calls")
    elif not isinstance(message["content"], str):
        raise BadRecord(f"{where}: its content is {kind_of(message['content'])}, not text")
    if message.get("weight", 1) not in (0, 1):
        raise BadRecord(f"{where}: its weight is {message['weight']!r}; 1 trains on an answer, and 0 does not")
    return message


def _tools(value: Any) -> list[Any]:
    """The tools of a record; they may be given as JSON, as tables with one type for all rows have to."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise BadRecord(f"field 'tools' is text, but no JSON: {error}") from None
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRecord(f"field 'tools' is {kind_of(value)}, not a list of objects")
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
