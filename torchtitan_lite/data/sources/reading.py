"""Where documents come from: registered data sets, Hugging Face data sets, local files, and mixtures of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

import datasets
import pyarrow

from torchtitan_lite.data.sources.chats import maker_of
from torchtitan_lite.data.sources.document import (
    Document,
    OnBadRecord,
    Source,
    SourceError,
    TextMaker,
    TextOf,
    bad_record_error,
)
from torchtitan_lite.data.sources.files import Files, FileShards, find_files, load_files
from torchtitan_lite.data.sources.hub import load_hub, open_hub
from torchtitan_lite.data.sources.registered import RegisteredShards, load_registered
from torchtitan_lite.data.sources.resolve import kind_of


class DocumentShards(Protocol):
    """A source to be read in parts, from any record on. Pickles, so that it can travel to loader workers."""

    @property
    def num_shards(self) -> int: ...

    @property
    def identity(self) -> str:
        """Digest of what would be read, wherever it lies and whatever becomes of bad records."""

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        """The documents of a shard from its record ``start`` on; record k is always the same one, bad ones count.

        Raises:
            SourceError: a bad record where those are errors; in any case where disk, network or library fail.
        """


def load_documents(
    source: Source, *, on_bad_record: OnBadRecord, num_proc: int, cache_dir: str | None
) -> datasets.Dataset:
    """All documents of a source, read once into the data sets library's cache.

    Columns: ``text``, "" for a bad record, and ``problem``, which says what is wrong with it and is else null.

    Args:
        on_bad_record: whether bad records are an error or rows of their own.
        num_proc: processes to read with.
        cache_dir: None for the library's own.

    Raises:
        SourceError: no such data set or file, one that cannot be read, a bad record with ``on_bad_record="error"``, or
            no document at all.
    """
    kind = kind_of(source)
    with progress_on_terminal():
        if kind == "registered":
            documents = load_registered(source.dataset)
        elif kind == "files":
            files, text_of = _files(source)
            documents = load_files(files, text_of, num_proc=num_proc, cache_dir=cache_dir)
        else:
            documents = load_hub(source, num_proc=num_proc, cache_dir=cache_dir)
    problems = documents.data.column("problem")
    bad = len(problems) - problems.null_count
    if bad == len(documents):  # skipping them would not help
        reason = f"all of its {bad:,} records are bad, the first one for {_first(problems)}" if bad else "it is empty"
        raise SourceError(f"{source.name}: no samples, {reason}.")
    if bad and on_bad_record == "error":
        more = f" (and {bad - 1:,} more bad records among {len(documents):,})" if bad > 1 else ""
        raise bad_record_error(_first(problems) + more)
    return documents


def open_shards(source: Source, *, on_bad_record: OnBadRecord) -> DocumentShards:
    """A source as shards to stream from: each file is one, a registered data set is one.

    Raises:
        SourceError: no such data set or file.
    """
    kind = kind_of(source)
    if kind == "registered":
        return RegisteredShards(source.dataset)
    if kind == "files":
        files, text_of = _files(source)
        return FileShards(files, text_of, on_bad_record)
    return open_hub(source, on_bad_record=on_bad_record)


@contextlib.contextmanager
def progress_on_terminal() -> Iterator[None]:
    """Shows the data sets library's progress bars on a terminal, and nowhere else."""
    hide = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()


def _files(source: Source) -> tuple[Files, TextMaker]:
    files = find_files(source.dataset, source.dataset_path)
    # A text file has no fields; its whole text is handed on under the name that needs no setting.
    return files, TextOf("text") if files.format == "text" else maker_of(source)


def _first(problems: pyarrow.ChunkedArray) -> str:
    return next(chunk.drop_null()[0].as_py() for chunk in problems.chunks if chunk.null_count < len(chunk))
