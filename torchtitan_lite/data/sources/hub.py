"""Data sets of the Hugging Face hub, and local folders laid out like one, as the data sets library reads them.

What a bad record is, is the same as in files. But a file that the library cannot read stops the run whatever
``data.on_bad_record`` says: from outside, it cannot be told from a failure of the network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import datasets
import pyarrow
from datasets.packaged_modules.cache.cache import Cache

from torchtitan_lite.data.sources.chats import maker_of
from torchtitan_lite.data.sources.document import (
    FEATURES,
    Document,
    OnBadRecord,
    Source,
    SourceError,
    TextMaker,
    TextOf,
    document_of,
    listed,
    reason,
)
from torchtitan_lite.data.sources.readers import READER_VERSION, table_records

_ROWS_AT_A_TIME = 100  # of any length


def load_hub(source: Source, *, num_proc: int, cache_dir: str | None) -> datasets.Dataset:
    """Downloads and prepares a data set; its documents as columns ``text`` and ``problem``.

    Raises:
        SourceError: no such data set, subset, split or field; the hub cannot be reached; a file cannot be read.
    """
    where, text_of = _where(source), maker_of(source)
    builder = _builder(source, cache_dir)
    processes = num_proc if num_proc > 1 else None
    try:
        builder.download_and_prepare(num_proc=processes)
        rows = builder.as_dataset(split=source.split)
    except Exception as error:  # of whatever kind the library's readers raise
        raise SourceError(f"{where}: {reason(error)}") from error
    _check_fields(where, text_of, rows.features)
    rows = rows.select_columns([name for name in text_of.columns if name in rows.features])

    def documents(columns: list[str]) -> datasets.Dataset:
        made = rows.with_format("arrow").map(
            _documents,
            with_indices=True,
            batched=True,
            batch_size=_ROWS_AT_A_TIME,
            num_proc=processes,
            remove_columns=rows.column_names,
            features=datasets.Features({name: FEATURES[name] for name in columns}),
            fn_kwargs={
                "columns": columns,
                "where": where,
                "text_of": dataclasses.replace(text_of),  # without what it has worked out
                "version": READER_VERSION,
            },
            desc="Checking" if columns == ["problem"] else "Making documents",
        )
        return made.with_format(None)

    if source.format == "text" and source.template is None:  # then the text is a column already
        problems = documents(["problem"])
        if problems.data.column("problem").null_count == len(problems):
            texts = rows.rename_columns({source.text_field: "text"})
            return datasets.concatenate_datasets([texts, problems], axis=1)  # refers to the text, which is not copied
    return documents(["text", "problem"])


@dataclass(frozen=True)
class HubShards:
    """A streamed data set with the library's own shards: as a rule, a file is one."""

    rows: datasets.IterableDataset
    where: str
    identity: str
    text_of: TextMaker
    on_bad_record: OnBadRecord

    @property
    def num_shards(self) -> int:
        return self.rows.num_shards

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        where, row = f"{self.where}, shard {shard}", 0
        rows = self.rows.shard(num_shards=self.num_shards, index=shard)
        try:
            # Unlike iter(rows), this never divides the rows among loader workers a second time.
            for table in rows.iter(_ROWS_AT_A_TIME):
                if row + table.num_rows > start:
                    records = table_records(table, self.text_of.columns, row + 1, table.column_names)
                    for record in records[max(start - row, 0) :]:
                        yield document_of(record, where, self.text_of, self.on_bad_record)
                row += table.num_rows
        except SourceError:
            raise
        except Exception as error:  # of whatever kind the library's readers raise
            raise SourceError(f"{where}: cannot be read on after row {row}: {reason(error)}") from error


def open_hub(source: Source, *, on_bad_record: OnBadRecord) -> HubShards:
    """Opens a data set for reading without downloading it first.

    Raises:
        SourceError: no such data set, subset, split or field; the hub cannot be reached.
    """
    where, text_of = _where(source), maker_of(source)
    builder = _builder(source, cache_dir=None)
    try:
        rows = builder.as_streaming_dataset(split=source.split)
    except Exception as error:  # of whatever kind the library's readers raise
        raise SourceError(f"{where}: {reason(error)}") from error
    if rows.features is not None:  # else they are not known before records are read
        _check_fields(where, text_of, rows.features)
    return HubShards(rows.with_format("arrow"), where, _identity(source, builder), text_of, on_bad_record)


def _builder(source: Source, cache_dir: str | None) -> datasets.DatasetBuilder:
    """Looks a data set up, subset and split too."""
    path = os.path.expanduser(source.dataset)
    try:
        builder = datasets.load_dataset_builder(path, source.subset, revision=source.revision, cache_dir=cache_dir)
    except ConnectionError as error:
        raise SourceError(
            f"{source.dataset}: the hub cannot be reached ({error}), and there is no local folder of that name."
        ) from error
    except Exception as error:  # the library has no kind of its own for a subset that does not exist
        subsets = [] if isinstance(error, OSError) else _subsets(path, source.revision)
        if source.subset is None and len(subsets) > 1:
            raise SourceError(
                f"{source.dataset}: has several subsets and none is given (data.subset); there are {listed(subsets)}."
            ) from error
        if source.subset is not None and subsets and source.subset not in subsets:
            raise SourceError(
                f"{source.dataset}: no subset {source.subset!r} (data.subset); there are {listed(subsets)}."
            ) from error
        revision = "" if source.revision is None else f" (data.revision={source.revision})"
        raise SourceError(f"{source.dataset}: {reason(error)}{revision}") from error
    # Where the library cannot look a data set up, it takes whatever commit was used last.
    if isinstance(builder, Cache) and source.revision not in (None, builder.hash):
        raise SourceError(
            f"{source.dataset}: revision {source.revision!r} (data.revision) cannot be looked up on the hub, and what "
            f"the cache has may be another one; its commit is {builder.hash}, which can be given as data.revision."
        )
    splits = [str(split) for split in _data_files(builder) or builder.info.splits or ()]
    for split in re.split(r"\+", re.sub(r"\[[^]]*\]?|\([^)]*\)?", "", source.split)):
        if splits and split.strip() not in (*splits, "all"):
            raise SourceError(f"{source.dataset}: no split {split.strip()!r} (data.split); there are {listed(splits)}.")
    return builder


def _subsets(path: str, revision: str | None) -> list[str]:
    try:
        return datasets.get_dataset_config_names(path, revision=revision)
    except Exception:
        return []  # the error that led here says why


def _check_fields(where: str, text_of: TextMaker, features: datasets.Features) -> None:
    for name in text_of.required:
        if name not in features:
            raise SourceError(f"{where}: no field {name!r} ({text_of.setting}); there are {listed(features)}.")
    if not isinstance(text_of, TextOf) or text_of.template is not None:
        return
    kind = features[text_of.columns[0]]
    dtype = getattr(kind, "dtype", type(kind).__name__)
    if dtype not in ("string", "large_string", "null"):
        raise SourceError(
            f"{where}: field {text_of.text_field!r} ({text_of.setting}) is not text, but of type {dtype}."
        )


def _documents(
    table: pyarrow.Table,
    indices: list[int],
    columns: Collection[str],
    where: str,
    text_of: TextMaker,
    version: int,
) -> dict[str, list[str | None]]:
    """For the data sets library, whose cache knows the arguments."""
    records = table_records(table, text_of.columns, indices[0] + 1, table.column_names)
    documents = [document_of(record, where, text_of, "skip") for record in records]
    made = {"text": [document.text or "" for document in documents], "problem": [d.problem for d in documents]}
    return {name: made[name] for name in columns}


def _identity(source: Source, builder: datasets.DatasetBuilder) -> str:
    """Of what is read: for the hub the files with their commit, for a folder the files in it with their sizes."""
    folder = os.path.expanduser(source.dataset)
    files = next((files for split, files in _data_files(builder).items() if split == source.split), [])
    if os.path.isdir(folder):
        read: list[object] = [(os.path.relpath(file, folder), os.path.getsize(file)) for file in files]
    else:
        read = [source.dataset, list(files) or source.revision]
    what = [READER_VERSION, read, builder.config.name, source.split, *maker_of(source).identity]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _data_files(builder: datasets.DatasetBuilder) -> Mapping[str, list[str]]:
    """Files of each split, unless it is not known before they are downloaded."""
    return builder.config.data_files or {}


def _where(source: Source) -> str:
    subset = "" if source.subset is None else f" subset {source.subset},"
    return f"{source.dataset},{subset} split {source.split}"
