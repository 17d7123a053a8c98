"""Which sources a configuration means, and what is wrong with them before any document is read."""

from __future__ import annotations

import difflib
import glob
import itertools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torchtitan_lite.config.schema import Config, Data, MixtureSource, Training
from torchtitan_lite.data.sources.document import Source, SourceError, parse_template
from torchtitan_lite.data.sources.files import FORMATS, find_files, stem
from torchtitan_lite.data.sources.registered import CHATS, DATASETS

Kind = Literal["files", "registered", "hub", "hub folder"]
"""Of a source; "hub" is a data set of the Hugging Face hub, "hub folder" a local folder laid out like one."""

_INHERITED = (
    "subset",
    "split",
    "revision",
    "text_field",
    "template",
    "format",
    "messages_field",
    "chat_template",
    "train_on",
)
_READS = {
    "text": frozenset({"text_field", "template"}),
    "messages": frozenset({"messages_field", "chat_template", "train_on"}),
    "prompt_completion": frozenset({"chat_template", "train_on"}),
}
"""Of the settings that sources share, those that each format makes use of."""
_ONLY = {
    "subset": "only Hugging Face data sets have subsets",
    "split": "only Hugging Face data sets have splits",
    "revision": "only data sets on the Hugging Face hub have revisions",
    "text_field": "text files and registered data sets have no fields",
    "template": "text files and registered data sets have no fields",
    "format": "text files and registered data sets have a format of their own",
    "messages_field": "text files and registered data sets have no fields",
    "chat_template": "text is no chat",
    "train_on": "of text, all is trained on",
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def sources_of(config: Config) -> list[Source]:
    """The sources of a run: the tables of ``data.mix``, or where there are none the one of ``training``.

    A table inherits what it does not set from ``data``. A table's ``text_field`` replaces an inherited template, too.
    """
    data = config.data
    tables = data.mix or [MixtureSource(dataset=config.training.dataset, dataset_path=config.training.dataset_path)]
    taken = {table.name for table in tables if table.name is not None}
    sources = []
    for table in tables:
        given = {name: getattr(table, name) for name in _INHERITED}
        inherited = {name: getattr(data, name) if value is None else value for name, value in given.items()}
        if table.text_field is not None and table.template is None:
            inherited["template"] = None
        name = table.name
        if name is None:
            name = _unique(_short_name(table), taken)
            taken.add(name)
        sources.append(
            Source(name, table.dataset, table.dataset_path, **inherited, weight=table.weight, epochs=table.epochs)
        )
    return sources


def kind_of(source: Source) -> Kind:
    """What a source is, judged by its names; only a local path is looked at.

    Raises:
        SourceError: it is nothing that could be read.
    """
    dataset = source.dataset
    if source.dataset_path is not None:
        return "files"
    if dataset in FORMATS:
        raise SourceError(f"dataset={dataset}: needs dataset_path, the file, folder or glob to read.")
    if dataset in DATASETS:
        return "registered"
    path = os.path.expanduser(dataset)
    if os.path.isdir(path):
        return "hub folder"
    if os.path.exists(path):
        raise SourceError(f"dataset={dataset}: is a file; give it as dataset_path.")
    if _HUB_NAME.fullmatch(dataset) and not dataset.startswith("."):
        return "hub"
    if "/" in dataset:
        raise SourceError(f"dataset={dataset}: no such folder, and a data set on the Hugging Face hub is OWNER/NAME.")
    close = difflib.get_close_matches(dataset, [*DATASETS, *FORMATS], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise SourceError(
        f"dataset={dataset}: no such data set.{hint} Registered: {', '.join(DATASETS)}; OWNER/NAME for one on the "
        f"Hugging Face hub; or {', '.join(FORMATS)} for local files at dataset_path."
    )


def format_of(source: Source) -> str:
    """What the documents of a source are: text, messages or prompt_completion. Raises SourceError as kind_of does."""
    kind = kind_of(source)
    if kind == "registered":
        return "messages" if source.dataset in CHATS else "text"
    if source.format == "text" or kind != "files":
        return source.format
    return "text" if find_files(source.dataset, source.dataset_path or "").format == "text" else source.format


def check_sources(config: Config) -> list[str]:
    """All that is wrong with the sources and shows without reading any document."""
    data = config.data
    problems, used = [], []
    for number, source in enumerate(sources_of(config), 1):
        table = f"data.mix, table {number}: " if data.mix else None
        try:
            used.append(_settings_used(source))
            problem = _empty_file(source) if data.on_bad_record == "error" else None
        except SourceError as error:
            used.append(frozenset(_INHERITED))  # nothing follows from what is not known
            problem = str(error)
        if problem is not None:
            problems.append((table or "training.") + problem)
        if data.streaming and "split" in used[-1] and re.search(r"[\[(+]", source.split):
            problems.append(
                f"{table or 'data.'}split={source.split}: streaming reads one whole split; data.streaming=false takes "
                "this too"
            )
        if data.mix:
            problems += [f"{table}{problem}" for problem in _table_problems(data.mix[number - 1], used[-1])]
    if config.samples.prompts and config.samples.chat:
        used.append(frozenset(["chat_template"]))
    return [*_mixture_problems(config), *problems, *_data_problems(data, frozenset().union(*used))]


def _mixture_problems(config: Config) -> Iterator[str]:
    tables, training = config.data.mix, config.training
    for setting in ("dataset", "dataset_path"):
        value = getattr(training, setting)
        if tables and value != getattr(Training(), setting):
            yield (
                f"training.{setting}={value}: nothing would read it beside data.mix; make it a table there, or leave "
                "it out"
            )
    names = [table.name for table in tables if table.name is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.mix: {names.count(name)} tables are named {name}; names must differ, or be left out"


def _data_problems(data: Data, used: frozenset[str]) -> Iterator[str]:
    if data.template is not None and data.text_field != Data().text_field:
        yield f"data.text_field={data.text_field}: data.template replaces it; leave one of the two out"
    for name in _INHERITED:
        value = getattr(data, name)
        if value != getattr(Data(), name):
            yield from (f"data.{problem}" for problem in _setting_problems(name, value, used))


def _settings_used(source: Source) -> frozenset[str]:
    """Which of the settings that sources share one of this kind makes use of."""
    kind = kind_of(source)
    if kind == "registered":
        return _READS["messages"] - {"messages_field"} if source.dataset in CHATS else frozenset()
    of_records = _READS[source.format] | {"format"}
    if kind == "files":
        format = find_files(source.dataset, source.dataset_path or "").format
        return frozenset() if format == "text" else of_records
    return of_records | {"subset", "split"} | ({"revision"} if kind == "hub" else set())


def _empty_file(source: Source) -> str | None:
    if source.dataset_path is None:
        return None
    files = find_files(source.dataset, source.dataset_path)
    for path in files.paths:
        if files.format != "text" and os.path.getsize(path) == 0:
            return (
                f"dataset_path={source.dataset_path}: {path} is empty, which no {files.format} file can be; "
                "data.on_bad_record=skip would leave it out and count it"
            )
    return None


def _table_problems(table: MixtureSource, used: frozenset[str]) -> Iterator[str]:
    if not (table.weight > 0 and math.isfinite(table.weight)):
        yield f"weight={table.weight}: must be a number above 0; leave the table out to read nothing of it"
    elif not 1e-15 <= table.weight <= 1e15:
        yield f"weight={table.weight}: must lie between 1e-15 and 1e15; only its proportion to the other weights counts"
    if table.epochs < 0:
        yield f"epochs={table.epochs}: must be at least 0, which means no end"
    if table.name is not None and not table.name.strip():
        yield "name is empty; leave it out to have one made"
    if table.text_field is not None and table.template is not None:
        yield f"text_field={table.text_field}: its template replaces it; leave one of the two out"
    for name in _INHERITED:
        value = getattr(table, name)
        if value is not None:
            yield from _setting_problems(name, value, used)


def _setting_problems(name: str, value: str, used: frozenset[str]) -> Iterator[str]:
    """What is wrong with a setting of sources that make use of the settings ``used``."""
    if name == "template":
        try:
            parse_template(value)
        except ValueError as error:
            yield f"template={value!r}: {error}"
    if name not in used:
        readers = [format for format, settings in _READS.items() if name in settings]
        reason = f"only format={' and '.join(readers)} does" if readers and "format" in used else _ONLY[name]
        yield f"{name}={value!r}: nothing would use it; {reason}"


def _short_name(table: MixtureSource) -> str:
    """The last part of a path or data set that is no pattern, without the suffixes of files."""
    for part in reversed(Path(table.dataset_path or table.dataset).parts):
        name = stem(part)
        if name.strip("~/.") and not glob.has_magic(name):
            return name
    return "files"


def _unique(name: str, taken: set[str]) -> str:
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)
