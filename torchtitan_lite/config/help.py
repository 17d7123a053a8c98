"""``--help``: every key with its type, the value it has, and the docstring under its field of the schema."""

from __future__ import annotations

import ast
import functools
import inspect
import shutil
import textwrap
from typing import Any, Literal, get_args, get_origin

from torchtitan_lite.config import schema
from torchtitan_lite.config.fields import KEYS, SECTIONS, Key, spell

USAGE = """\
usage: ./run_train.sh [--section.key=value ...]

A setting comes from the command line, else from the TOML file (CONFIG_FILE in
the environment, or --job.config_file), else from its default.
  switches   --x.flag  --x.no-flag  --x.flag=true  --x.flag=false
  lists      --x.list=a,b  or  --x.list a b
  numbers    may be written 3e-4 or 1e3
  None       unsets a key that may be unset
"""


def help_text(config: schema.Config, width: int | None = None) -> str:
    """The whole help, for a terminal of ``width`` columns (default: the one at hand), with the values of ``config``."""
    width = min(width or shutil.get_terminal_size().columns, 120)
    wrap = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    lines = [USAGE.rstrip()]
    for section in SECTIONS:
        lines.append(f"\n[{section}]")
        for key in KEYS.values():
            if key.name.rpartition(".")[0] == section:
                lines.append(
                    wrap(
                        f"--{key.name}  ({describe(key)}; now {spell(value_of(config, key.name))})",
                        initial_indent="  ",
                        subsequent_indent="      ",
                    )
                )
                lines.append(wrap(field_docs()[key.name], initial_indent="      ", subsequent_indent="      "))
                for item in key.item_keys.values():
                    text = f"{item.name}  ({describe(item)})  {field_docs()[f'{key.name}[].{item.name}']}"
                    lines.append(wrap(text, initial_indent="        ", subsequent_indent="            "))
    return "\n".join(lines)


def describe(key: Key) -> str:
    """What a key takes, in words: ``integer``, ``AdamW | Adam``, ``list of true | false``."""
    kind = key.item
    if key.item_keys:
        words = "tables"
    elif get_origin(kind) is Literal:
        words = " | ".join(get_args(kind))
    else:
        words = {bool: "true | false", int: "integer", float: "number", str: "text"}[kind]
    return f"list of {words}" if key.is_list else words


def value_of(config: schema.Config, name: str) -> Any:
    """The value of a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


@functools.cache
def field_docs() -> dict[str, str]:
    """The docstring under each field of the schema, as one line, by the key's dotted name (``data.mix[].weight`` for
    the fields of a list's tables).

    Python drops these strings, so they are read from the source.
    """
    default = schema.Config()
    docs = {}
    for name, key in KEYS.items():
        section, _, leaf = name.rpartition(".")
        docs[name] = _docs_of(type(value_of(default, section)))[leaf]
        docs.update({f"{name}[].{item}": _docs_of(key.item)[item] for item in key.item_keys})
    return docs


@functools.cache
def _docs_of(section: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(section)).body
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(field.target, ast.Name)
    }
