"""The keys of the schema: their dotted names, the values they take, and what a wrong name was probably meant to be.

The file and the command line both come through here, so a value is right or wrong for both in the same way.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli

from torchtitan_lite.config.schema import Config


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting: ``kind`` is its type without ``None``; ``optional`` says whether it may be unset."""

    name: str
    kind: Any
    optional: bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is list

    @property
    def item(self) -> Any:
        """Type of a list's items, or of the value itself."""
        return get_args(self.kind)[0] if self.is_list else self.kind

    @property
    def item_keys(self) -> dict[str, Key]:
        """The keys of each table, where the value is a list of tables; else none."""
        if not dataclasses.is_dataclass(self.item):
            return {}
        return {entry.name: entry for entry in _walk(self.item) if isinstance(entry, Key)}


def _walk(section: type, prefix: str = "") -> Iterator[Key | str]:
    """Every section (as its dotted name) and every key below ``section``, in the order of the schema."""
    for name, hint in get_type_hints(section).items():
        dotted = prefix + name
        if dataclasses.is_dataclass(hint):
            yield dotted
            yield from _walk(hint, dotted + ".")
            continue
        optional = get_origin(hint) in (Union, types.UnionType)
        kind = next(arg for arg in get_args(hint) if arg is not types.NoneType) if optional else hint
        yield Key(dotted, kind, optional)


_ENTRIES = list(_walk(Config))
KEYS: dict[str, Key] = {entry.name: entry for entry in _ENTRIES if isinstance(entry, Key)}
SECTIONS: list[str] = [entry for entry in _ENTRIES if isinstance(entry, str)]

# What other trainers call some settings, where the spelling alone would not lead to ours.
ALIASES = {
    "batch_size": "training.local_batch_size",
    "data_path": "training.dataset_path",
    "epochs": "training.steps",
    "gradient_accumulation_steps": "training.global_batch_size",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "training.max_norm",
    "max_length": "training.seq_len",
    "max_steps": "training.steps",
    "num_epochs": "training.steps",
    "output_dir": "job.dump_folder",
    "tokenizer_path": "model.hf_assets_path",
}


# --- values ---------------------------------------------------------------------------------------------------------


def coerce(value: Any, key: Key) -> Any:
    """``value``, as TOML or :func:`from_words` gave it, as the type of ``key``.

    An integer serves as a float, and a float without a fraction (``1e3``) as an integer; nothing else is converted.
    Raises ValueError with what was expected and what was given.
    """
    if value is None and key.optional:
        return None
    if key.is_list:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, got {spell(value)}")
        if key.item_keys:
            return _coerce_tables(value, key)
        return [_coerce_one(item, key.item) for item in value]
    return _coerce_one(value, key.kind)


def _coerce_tables(tables: list[Any], key: Key) -> list[Any]:
    """Each table as an instance of the list's dataclass; all that is wrong with any of them in one ValueError."""
    items, problems = [], []
    for number, table in enumerate(tables, 1):
        if not isinstance(table, dict):
            problems.append(f"entry {number}: expected a table, got {spell(table)}")
            continue
        values = {}
        for name, value in table.items():
            try:
                if name not in key.item_keys:
                    close = get_close_matches(name.replace("-", "_"), key.item_keys, n=1)
                    hint = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(key.item_keys)}"
                    raise ValueError(f"no such key; {hint}")
                values[name] = coerce(value, key.item_keys[name])
            except ValueError as error:
                problems.append(f"entry {number}: {name}: {error}")
        items.append(key.item(**values))
    if problems:
        raise ValueError("; ".join(problems))
    return items


def _coerce_one(value: Any, kind: Any) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"{spell(value)} is not one of {', '.join(get_args(kind))}")
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if kind is float and number and abs(value) <= sys.float_info.max:  # an integer may be too large to convert
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    expected = {bool: "true or false", int: "an integer", float: "a finite number", str: "text in quotes"}[kind]
    raise ValueError(f"expected {expected}, got {spell(value)}")


def from_words(words: list[str], key: Key) -> Any:
    """The words given for ``key`` on the command line as the value TOML would have given, for :func:`coerce`.

    ``None`` unsets an optional key. Items of a list are separated by commas, or are words of their own; what begins
    with a bracket is written as in TOML, as a list of tables must be. A word that does not look like what the key wants
    stays text, for :func:`coerce` to refuse. Raises ValueError for what is no TOML.
    """
    if key.optional and words == ["None"]:
        return None
    if key.item_keys or (key.is_list and words[0].startswith("[")):
        try:
            return tomli.loads(f"value = {' '.join(words)}")["value"]
        except tomli.TOMLDecodeError as error:
            raise ValueError(f"not a TOML array{' of tables' if key.item_keys else ''}: {error}") from None
    if key.is_list:
        items = [item for word in words for item in word.split(",") if item]
        return [_from_word(item, key.item) for item in items]
    return _from_word(words[0], key.kind)


def _from_word(word: str, kind: Any) -> Any:
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    if kind in (int, float):
        for number in (int, float):
            try:
                return number(word)
            except ValueError:
                continue
    return word


def spell(value: Any) -> str:
    """A value as it stands in a file; ``unset`` for none."""
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and any(dataclasses.is_dataclass(item) for item in value):
        return f"{len(value)} {'table' if len(value) == 1 else 'tables'}"
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:  # dates and times
        return str(value)


# --- names ----------------------------------------------------------------------------------------------------------


def unknown_key(name: str) -> str:
    """The message for a dotted name that is no key: what it was probably meant to be, and where that lives."""
    if name in SECTIONS:
        return f"is a section, not a key; its keys are {', '.join(_keys_of(name))}"
    guesses = nearest_keys(name)
    if guesses:
        places = " or ".join(f"{guess} (in section [{guess.rpartition('.')[0]}])" for guess in guesses)
        return f"no such key; did you mean {places}?"
    section = name.rpartition(".")[0]
    if section in SECTIONS:
        return f"no such key; the keys of [{section}] are {', '.join(_keys_of(section))}"
    return f"no such key; the sections are {', '.join(SECTIONS)}"


def nearest_keys(name: str) -> list[str]:
    """The keys that the dotted ``name`` may have been meant to be, likeliest first; empty if none is near."""
    spelt = name.replace("-", "_").lower()
    leaf = spelt.rpartition(".")[2]
    by_lower_case = {key.lower(): key for key in KEYS}
    if spelt in by_lower_case:
        return [by_lower_case[spelt]]
    elsewhere = sorted((key for key in KEYS if _leaf(key) == leaf), key=lambda key: -_likeness(spelt, key))
    if elsewhere:
        return elsewhere[:1] if _likeness(spelt, elsewhere[0]) > 0.8 else elsewhere[:3]
    if leaf in ALIASES:
        return [ALIASES[leaf]]
    # A slip in the section, in the key, or both: whichever reading is nearer, and the section that was named first.
    section = spelt.rpartition(".")[0]
    score = {
        key: max(_likeness(leaf, _leaf(key)), _likeness(spelt, key)) + 0.1 * (key.rpartition(".")[0] == section)
        for key in KEYS
    }
    best = max(KEYS, key=score.__getitem__)
    return [best] if score[best] > 0.7 else []


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _keys_of(section: str) -> list[str]:
    return [_leaf(key) for key in KEYS if key.rpartition(".")[0] == section]


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()
