"""From a TOML file and a command line to a :class:`Config`, and back to TOML.

Precedence: command line, then file, then the schema's defaults. File and line are both read into the same form, dotted
names and values, and held against the schema by the same code (:mod:`torchtitan_lite.config.fields`), so that they
accept the same values, complain in the same words, and all that is wrong is said at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from torchtitan_lite.config.fields import KEYS, SECTIONS, coerce, from_words, unknown_key
from torchtitan_lite.config.help import help_text
from torchtitan_lite.config.schema import Config


class ConfigError(ValueError):
    """Everything that is wrong with a configuration: one message a problem, printed together."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "The configuration has a problem:" if count == 1 else f"The configuration has {count} problems:"
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])


def load_config(argv: Sequence[str] | None = None) -> Config:
    """The configuration of a run from its command line (default: ``sys.argv[1:]``) and the file named there.

    ``--help`` or ``-h`` prints the keys with the values they would have, and exits.
    Raises ConfigError with every problem of the file and of the line.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    problems: list[str] = []
    line = _read_line(argv, problems)
    path = line.get("job.config_file")
    file = _read_file(path, problems) if path else {}

    config = Config()
    for values in (file, line):
        for name, value in values.items():
            _assign(config, name, value)
    if "-h" in argv or "--help" in argv:
        # Whatever the problems: whoever asks may be looking for the right key.
        print(help_text(config))
        raise SystemExit(0)

    # A shell leaves the ~ of --job.dump_folder=~/runs as it is, and a file has no shell.
    config.job.dump_folder = os.path.expanduser(config.job.dump_folder)
    if config.checkpoint.initial_load_path is not None:
        config.checkpoint.initial_load_path = os.path.expanduser(config.checkpoint.initial_load_path)
    config.model.flavor = _merge_flavors({str(path): file, "command line": line}, problems)
    if problems:
        raise ConfigError(problems)
    return config


def save_config(config: Config, path: str | Path) -> None:
    """Write every setting of ``config`` as a TOML file that :func:`load_config` reads back to the same values.

    Unset keys are left out. job.config_file is too: the file written stands on its own.
    """
    tables = _without_unset(dataclasses.asdict(config))
    tables["job"].pop("config_file", None)
    source = config.job.config_file
    head = "# Resolved configuration of a run" + (f", read from {source}" if source else "")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"{head}\n\n{tomli_w.dumps(tables)}", encoding="utf-8")


# --- the file -------------------------------------------------------------------------------------------------------


def _read_file(path: str, problems: list[str]) -> dict[str, Any]:
    """The valid settings of a TOML file by dotted name; what is wrong with the others goes to ``problems``."""
    try:
        table = tomli.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin files with a mark
    except OSError as error:
        problems.append(f"job.config_file={path}: {error.strerror} (looked from {Path.cwd()})")
        return {}
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path}: not valid TOML: {error}")
        return {}
    values = {}
    for name, value in _leaves(table):
        if name == "job.config_file":
            problems.append(f"{path}: {name}: a file cannot name another file; give this one on the command line")
        elif name not in KEYS:
            problems.append(f"{path}: {name}: {unknown_key(name)}")
        else:
            try:
                values[name] = coerce(value, KEYS[name])
            except ValueError as error:
                problems.append(f"{path}: {name}: {error}")
    return values


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every entry that is not itself a section, known or not."""
    for part, value in table.items():
        name = prefix + part
        if isinstance(value, dict) and name not in KEYS and (value or name in SECTIONS):
            yield from _leaves(value, name + ".")
        else:
            yield name, value


# --- the command line -----------------------------------------------------------------------------------------------


def _read_line(argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The valid settings of a command line by dotted name; a key given twice counts as given last."""
    values = {}
    position = 0
    while position < len(argv):
        option, has_value, text = argv[position].partition("=")
        position += 1
        if option in ("-h", "--help"):
            continue
        if not option.startswith("--") or option == "--":
            problems.append(f"{argv[position - 1]}: a value without a key; settings are written --section.key=value")
            continue
        name, negated = _resolve_option(option)
        if has_value:
            words = [text]
        else:
            words = _words_from(argv, position, None if negated else name)
            position += len(words)
        try:
            if name not in KEYS:
                raise ValueError(unknown_key(name))
            values[name] = _line_value(name, words, negated)
        except ValueError as error:
            problems.append(f"{option}: {error}")
    return values


def _resolve_option(option: str) -> tuple[str, bool]:
    """The dotted name an option means, and whether it is spelt as a switch turned off (``--x.no-flag``)."""
    name = option[2:].replace("-", "_")
    section, dot, leaf = name.rpartition(".")
    candidates = [section + dot + leaf.removeprefix("no_"), name.removeprefix("no_")]
    for candidate in candidates:
        if name not in KEYS and candidate in KEYS and KEYS[candidate].kind is bool:
            return candidate, True
    return name, False


def _words_from(argv: Sequence[str], position: int, name: str | None) -> list[str]:
    """The words from ``position`` on that belong to the option ``name``: one, or for a list all up to the next option.

    An unknown option takes all of them as well, so that its values are not reported as strays.
    """
    if name is None:
        return []
    end = position
    while end < len(argv) and not argv[end].startswith("--") and argv[end] != "-h":
        end += 1
    takes_one = name in KEYS and not KEYS[name].is_list
    return list(argv[position : min(end, position + 1) if takes_one else end])


def _line_value(name: str, words: list[str], negated: bool) -> Any:
    key = KEYS[name]
    if negated:
        if words:
            raise ValueError(f"takes no value; write --{name}={words[0]} or --{name}=false")
        return False
    if not words:
        if key.kind is bool:
            return True
        raise ValueError(f"needs a value: --{name}=...")
    return coerce(from_words(words, key), key)


# --- the result -----------------------------------------------------------------------------------------------------


def _assign(config: Config, name: str, value: Any) -> None:
    *sections, leaf = name.split(".")
    setattr(functools.reduce(getattr, sections, config), leaf, copy.copy(value))


def _merge_flavors(layers: dict[str, dict[str, Any]], problems: list[str]) -> str:
    """SIZE or SIZE_ATTENTION from the flavors that file and line name: an attention alone keeps the size so far, a
    size alone means plain attention."""
    from torchtitan_lite.models.llama3.flavors import join_flavor, split_flavor  # imports torch; --help does not wait

    merged = Config().model.flavor
    for source, values in layers.items():
        flavor = values.get("model.flavor")
        if flavor is None:
            continue
        try:
            size, attention = split_flavor(flavor)
        except ValueError as error:
            problems.append(f"{source}: model.flavor: {error}")
            continue
        merged = join_flavor(size or split_flavor(merged)[0], attention)
    return merged


def _without_unset(table: dict[str, Any]) -> dict[str, Any]:
    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return _without_unset(value)
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return {name: cleaned(value) for name, value in table.items() if value is not None}
