"""Chats that need no file and no download: questions about Python, answered by the docstrings it brings along."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LARGEST_MODULE = 50_000  # bytes; larger ones take long to parse
_LONGEST_ANSWER = 800  # characters
_WITH_SYSTEM = 3  # every third chat begins with a system message


class _Member(NamedTuple):
    """A documented function or class of a module."""

    name: str
    does: str
    call: str | None  # how it is called, if it is a function


def pychat() -> Iterator[str]:
    """Chats about the modules of the running CPython's standard library and about the topics of its help, as JSON.

    Each documented module, function, class and topic makes one chat, of one or two questions.
    """
    system = f"You know Python {sys.version_info.major}.{sys.version_info.minor} and answer briefly."
    for number, turns in enumerate(_chats()):
        messages = [{"role": "system", "content": system}] if number % _WITH_SYSTEM == 0 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield json.dumps({"messages": messages}, ensure_ascii=False, separators=(",", ":"))


def _chats() -> Iterator[list[tuple[str, str]]]:
    """Each a list of (question, answer)."""
    with contextlib.suppress(ImportError):  # some distributions package pydoc's topics apart
        from pydoc_data.topics import topics

        for name in sorted(topics):
            if answer := _opening(topics[name]):
                yield [(f"What does Python's help say about {name!r}?", answer)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py")):
        # Sources that do not follow their own coding line, or are links to nowhere, have nothing to tell.
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError, ValueError):
            if path.stat().st_size <= _LARGEST_MODULE:
                with tokenize.open(path) as file:
                    yield from _about_module(path.stem, ast.parse(file.read()))


def _about_module(module: str, tree: ast.Module) -> Iterator[list[tuple[str, str]]]:
    members = list(_members(tree))
    does = _first_paragraph(ast.get_docstring(tree))
    if does:
        turns = [(f"What is the module {module} for?", does)]
        if members:
            turns.append(("What does it offer?", ", ".join(member.name for member in members[:20])))
        yield turns
    for name, member_does, call in members:
        turns = [(f"What does {module}.{name} do?", member_does)]
        if call:
            turns.append(("How is it called?", f"{module}.{call}"))
        yield turns


def _members(tree: ast.Module) -> Iterator[_Member]:
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if does := _first_paragraph(ast.get_docstring(node)):
            is_function = isinstance(node, ast.FunctionDef)
            yield _Member(node.name, does, f"{node.name}({ast.unparse(node.args)})" if is_function else None)


def _first_paragraph(docstring: str | None) -> str:
    """On one line; nothing where it is too long for an answer."""
    text = " ".join((docstring or "").strip().split("\n\n")[0].split())
    return text if len(text) <= _LONGEST_ANSWER else ""


def _opening(topic: str) -> str:
    """The first paragraphs below a topic's title that fit into an answer."""
    answer = ""
    for paragraph in topic.strip().split("\n\n")[1:]:
        longer = f"{answer}\n\n{paragraph}".strip()
        if len(longer) > _LONGEST_ANSWER:
            break
        answer = longer
    return answer
