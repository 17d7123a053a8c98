"""What every source comes down to: a record, and the text that its fields make, or why they make none."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import datasets

FEATURES = datasets.Features({"text": datasets.Value("string"), "problem": datasets.Value("string")})
"""Columns of loaded documents."""

OnBadRecord = Literal["error", "skip"]
"""What becomes of a bad record: an error, or a document without text that says what is wrong."""


class SourceError(ValueError):
    """The training text cannot be found or read, or there is none."""


@dataclass(frozen=True)
class Source:
    """One source of documents with all that it inherits; see the configuration's data section for each field."""

    name: str
    dataset: str
    dataset_path: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    template: str | None = None
    weight: float = 1.0
    epochs: int = 0
    format: str = "text"
    messages_field: str = "messages"
    chat_template: str | None = None
    train_on: str = "assistant"


class BadRecord(Exception):
    """A record that gives no text; the message says why."""


class Record(NamedTuple):
    """One record of a file: its fields, or the problem that kept them from being read."""

    where: str
    """Place in its file, such as "line 3"; empty where the file is the record."""

    fields: Mapping[str, Any] | None
    problem: str | None = None

    names: Collection[str] | None = None
    """All fields that there are, where ``fields`` holds only those that were asked for."""


class Document(NamedTuple):
    """The text of a record, or why it has none: exactly one of the two is set."""

    text: str | None
    problem: str | None


class TextMaker(Protocol):
    """Makes the text of a record's document."""

    @property
    def columns(self) -> list[str]:
        """The top-level fields that are read, without repeats."""

    @property
    def required(self) -> list[str]:
        """Those of them that a record must have."""

    @property
    def setting(self) -> str:
        """The setting that decides which fields are read."""

    @property
    def identity(self) -> list[str | None]:
        """All that a record's text depends on beside the record."""

    def __call__(self, record: Record) -> str:
        """The text. Raises BadRecord where a record gives none."""


Template = list[tuple[str, tuple[str, ...]]]
"""Literal text, and the path of the field that follows it (empty: none), in turn."""


def parse_template(template: str) -> Template:
    """Takes a template such as ``"{title}\\n\\n{meta.body}"`` apart.

    Raises:
        ValueError: unbalanced braces, anything but a plain or dotted field name in them, no field at all, or an escape
            that nothing has resolved.
    """
    if escape := re.search(r"\\[nt]", template):
        raise ValueError(
            f"{escape[0]} in it is a backslash and a letter, as the command line leaves it; to mean a line end or a "
            f"tab write $'...{escape[0]}...' in bash, or the template in double quotes in the file"
        )
    parts: Template = []
    for literal, name, spec, conversion in string.Formatter().parse(template):
        path = () if name is None else tuple(name.split("."))
        if spec or conversion:
            raise ValueError(f"{{{name}}} has a format or conversion; only the name of a field can stand in braces")
        if not all(part and not set("[]{}").intersection(part) for part in path) or name == "":
            raise ValueError(f"{{{name}}} is no name of a field; write {{field}}, or {{object.field}} for a nested one")
        if path and path[0].isdecimal():
            raise ValueError(f"{{{name}}} counts fields; only names can stand in braces, as in {{title}}")
        parts.append((literal, path))
    if not any(path for _, path in parts):
        raise ValueError("no field in it, so that every document would be the same; write its name as {field}")
    return parts


@dataclass(frozen=True)
class TextOf:
    """Makes a document of a record: the value of ``text_field``, or ``template`` filled in where there is one."""

    text_field: str
    template: str | None = None

    @cached_property
    def _template(self) -> Template:
        return parse_template(self.template)

    @property
    def columns(self) -> list[str]:
        """The top-level fields that are read, without repeats."""
        if self.template is None:
            return [self.text_field]
        return list(dict.fromkeys(path[0] for _, path in self._template if path))

    required = columns

    @property
    def setting(self) -> str:
        """The setting that decides which fields are read."""
        return "data.text_field" if self.template is None else "data.template"

    @property
    def identity(self) -> list[str | None]:
        """All that a record's text depends on beside the record."""
        return [self.text_field, self.template]

    def __call__(self, record: Record) -> str:
        """The text of a record.

        Raises:
            BadRecord: the record is broken, or a field missing, null, or of the wrong type.
        """
        if record.fields is None:
            raise BadRecord(record.problem)
        names = record.fields if record.names is None else record.names
        if self.template is None:
            text = value_at(record.fields, (self.text_field,), names, self.setting)
            if not isinstance(text, str):
                raise BadRecord(f"field {self.text_field!r} is {kind_of(text)}, not text (data.text_field)")
        else:
            text = "".join(
                literal + (self._rendered(record.fields, path, names) if path else "")
                for literal, path in self._template
            )
        check_unicode(text)
        return text

    @staticmethod
    def _rendered(fields: Mapping[str, Any], path: tuple[str, ...], names: Collection[str]) -> str:
        value = value_at(fields, path, names, "data.template")
        if not isinstance(value, (str, int, float)):
            raise BadRecord(f"field {'.'.join(path)!r} is {kind_of(value)}, neither text nor a number (data.template)")
        return str(value)


def document_of(record: Record, path: str, text_of: TextMaker, on_bad_record: OnBadRecord) -> Document:
    """The document that a record of ``path`` makes.

    Raises:
        SourceError: it makes none, and ``on_bad_record`` is "error".
    """
    try:
        return Document(text_of(record), None)
    except BadRecord as bad:
        problem = ": ".join(filter(None, (path, record.where, str(bad))))
        if on_bad_record == "error":
            raise bad_record_error(problem) from None
        return Document(None, problem)


def bad_record_error(problem: str) -> SourceError:
    """The error that ends a run which may not skip bad records."""
    return SourceError(f"{problem}. data.on_bad_record=skip would leave bad records out and count them.")


@dataclass(frozen=True)
class Undecodable:
    """Stands for a value whose bytes are no text."""

    problem: str


def kind_of(value: Any) -> str:
    """A value's type in JSON's words."""
    kinds = {
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        bytes: "bytes",
        type(None): "null",
    }
    return kinds.get(type(value), f"of type {type(value).__name__}")


def reason(error: BaseException) -> str:
    """What an error of the data sets library says. Its own, while generating, is no more than that something failed."""
    while isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def listed(names: Iterable[str], limit: int = 20) -> str:
    """Names with commas between them; the first ones where there are many."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def value_at(fields: Mapping[str, Any], path: tuple[str, ...], names: Collection[str], setting: str) -> Any:
    """The value of the field that a path leads to, of a record that has the top-level fields ``names``.

    Raises:
        BadRecord: there is none, or it is null or no text that could be decoded.
    """
    value: Any = fields
    for depth, name in enumerate(path):
        whole = ".".join(path[: depth + 1])
        if not isinstance(value, Mapping):
            raise BadRecord(
                f"no field {whole!r} ({setting}): {'.'.join(path[:depth])!r} is {kind_of(value)}, no object"
            )
        if name not in value:
            there = names if depth == 0 else value
            raise BadRecord(f"no field {whole!r} ({setting}); it has {listed(there) or 'no field at all'}")
        value = value[name]
        if value is None:
            raise BadRecord(f"field {whole!r} is null ({setting})")
        if isinstance(value, Undecodable):
            raise BadRecord(f"field {whole!r}: {value.problem}")
    return value


def check_unicode(text: str) -> None:
    """Raises BadRecord at half of a surrogate pair: JSON can spell one, and neither Arrow nor a tokenizer takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(
            f"character {error.start + 1} of its text is the lone surrogate \\u{ord(text[error.start]):04x}, "
            "which is half a character"
        ) from None
