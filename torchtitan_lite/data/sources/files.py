"""Local files: which of them a path means, and their documents."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import datasets

from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.sources.document import (
    FEATURES,
    Document,
    OnBadRecord,
    SourceError,
    TextMaker,
    document_of,
    reason,
)
from torchtitan_lite.data.sources.readers import COMPRESSED, READER_VERSION, read_records, without_compression

SUFFIXES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".txt": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Format of a file by its suffix. Of json and text, one of ``COMPRESSED`` may follow."""

FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))

_UNSAID = Training().dataset
"""With a ``training.dataset_path`` the default of ``training.dataset`` names no format."""

_SAVED_DATASET = {"dataset_info.json", "dataset_dict.json", "state.json"}
"""What the data sets library puts beside the .arrow files it saves."""


class Files(NamedTuple):
    """Files to read, all in one format."""

    format: str
    paths: list[str]


def find_files(dataset: str, dataset_path: str) -> Files:
    """Resolves ``training.dataset_path``: a file, a folder (searched through and through) or a glob; sorted.

    ``training.dataset`` names the format; where it is left at its default the suffixes decide.

    Raises:
        SourceError: nothing there, no file of the format, files of several formats, or an unreadable file.
    """
    if dataset not in (*FORMATS, _UNSAID):
        raise SourceError(f"dataset={dataset}: with a dataset_path, this must be one of {', '.join(FORMATS)}.")
    where = f"dataset_path={dataset_path}"
    path = os.path.expanduser(dataset_path)
    if os.path.isdir(path):
        candidates = _files_under(Path(path), dataset if dataset in FORMATS else None)
    elif os.path.exists(path):
        if not os.path.isfile(path):
            raise SourceError(f"{where}: neither a file nor a folder (a pipe, say, could be read only once).")
        candidates = [path]
    else:
        candidates = [file for file in _matches(path) if os.path.isfile(file)]
    files = sorted(os.path.abspath(file) for file in candidates)
    if not files:
        wanted = [suffix for suffix, format in SUFFIXES.items() if dataset in (format, _UNSAID)]
        raise SourceError(f"{where}: no such file, and no {', '.join(wanted)} file in a folder or glob of that name.")
    format = dataset if dataset in FORMATS else _common_format(where, files)
    for file in files:
        if not os.access(file, os.R_OK):
            raise SourceError(f"{where}: no permission to read {file}.")
    return Files(format, files)


def load_files(files: Files, text_of: TextMaker, *, num_proc: int, cache_dir: str | None) -> datasets.Dataset:
    """The documents of files as columns ``text`` and ``problem``, read once into the data sets library's cache.

    Raises:
        SourceError: the disk or the network fails.
    """
    processes = min(num_proc, len(files.paths))
    what = {
        "files": [(path, os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files.paths],
        "format": files.format,
        "text_of": dataclasses.replace(text_of),  # without what it has worked out, which must not be part of the key
        "version": READER_VERSION,
    }
    try:
        return datasets.Dataset.from_generator(
            _rows,
            features=FEATURES,
            cache_dir=cache_dir,
            num_proc=processes if processes > 1 else None,
            writer_batch_size=100,  # a document may well have megabytes
            gen_kwargs=what,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise SourceError(reason(error)) from error
    except ValueError:  # as the library ends where there is no row at all
        if next(_rows(**what), None) is not None:
            raise
        return datasets.Dataset.from_dict({name: [] for name in FEATURES}, features=FEATURES)


@dataclass(frozen=True)
class FileShards:
    """Files as shards."""

    files: Files
    text_of: TextMaker
    on_bad_record: OnBadRecord

    @property
    def num_shards(self) -> int:
        return len(self.files.paths)

    @cached_property
    def identity(self) -> str:
        """Of the files' names below the folder they share, their sizes, and what makes a record's text."""
        folder = os.path.commonpath([os.path.dirname(path) for path in self.files.paths])
        names = [(os.path.relpath(path, folder), os.path.getsize(path)) for path in self.files.paths]
        what = [READER_VERSION, self.files.format, *self.text_of.identity, names]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def read(self, shard: int, start: int = 0) -> Iterator[Document]:
        return read_documents(self.files.format, self.files.paths[shard], self.text_of, self.on_bad_record, start)


def read_documents(
    format: str, path: str, text_of: TextMaker, on_bad_record: OnBadRecord, start: int = 0
) -> Iterator[Document]:
    """The documents of a file, from its record ``start`` on.

    Raises:
        SourceError: at a bad record with ``on_bad_record="error"``; in any case where the disk or the network fails.
    """
    try:
        for record in read_records(format, path, text_of.columns, start):
            yield document_of(record, path, text_of, on_bad_record)
    except OSError as error:
        raise SourceError(f"{path}: {error}") from error


def _rows(
    files: list[tuple[str, int, int]],
    format: str,
    text_of: TextMaker,
    version: int,
) -> Iterator[dict[str, str | None]]:
    """For the data sets library, whose cache knows the arguments: sizes and times tell that a file was changed.

    Bad records are among the rows, so that the cache serves whoever skips them and whoever does not.
    """
    for path, _, _ in files:
        for document in read_documents(format, path, text_of, "skip"):
            yield {"text": document.text or "", "problem": document.problem}


def _files_under(folder: Path, format: str | None) -> list[str]:
    """Files of a format, or of any where it is None; hidden ones and hidden folders (.git, ...) are left out."""
    found = {}
    for below in _folders_from(str(folder)):
        for name in os.listdir(below):
            file = os.path.join(below, name)
            wanted = not name.startswith(".") and _format_of(file) in ((format,) if format else FORMATS)
            if wanted and os.path.isfile(file):
                found[file] = name
    if format is None and any(_format_of(file) == "arrow" for file in found):
        return [file for file, name in found.items() if name not in _SAVED_DATASET]
    return list(found)


def _matches(pattern: str) -> list[str]:
    """What a glob matches, as ``glob.glob`` with recursion has it, but for links that lead round in a circle."""
    head, *tails = re.split(r"(?:^|(?<=/))(?:\*\*/+)+", re.sub(r"(^|/)\*\*$", r"\1**/*", pattern))
    found = glob.glob(head) if head or not tails else ["."]
    for tail in tails:
        folders = [below for folder in found if os.path.isdir(folder) for below in _folders_from(folder)]
        found = [match for below in folders for match in glob.glob(os.path.join(glob.escape(below), tail))]
    return list(dict.fromkeys(found))


def _folders_from(top: str) -> Iterator[str]:
    """``top`` and the folders below it, hidden ones left out. Links are followed, but each folder is given once.

    Raises:
        SourceError: a folder cannot be read, so that its files would be missing.
    """
    seen = set()

    def fail(error: OSError) -> None:
        raise SourceError(f"{error.filename}: this folder of the data set cannot be read: {error.strerror}.")

    for folder, below, _ in os.walk(top, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("."))
        below.sort(key=lambda name: os.path.islink(os.path.join(real, name)))  # where a folder really lies goes first
        yield folder


def stem(name: str) -> str:
    """A file's name without the suffixes that say its format."""
    name = without_compression(name)
    root, suffix = os.path.splitext(name)
    return root if suffix.lower() in SUFFIXES else name


def _format_of(file: str) -> str | None:
    format = SUFFIXES.get(Path(file).suffix.lower())
    inner = SUFFIXES.get(Path(without_compression(file)).suffix.lower())
    return inner if inner in ("json", "text") else format


def _common_format(where: str, files: list[str]) -> str:
    formats = sorted({_format_of(file) or Path(file).suffix or "no suffix" for file in files})
    if len(formats) > 1:
        raise SourceError(
            f"{where} holds files of several kinds ({', '.join(formats)}). Say which to read: "
            f"training.dataset={' or '.join(FORMATS)}."
        )
    if formats[0] not in FORMATS:
        raise SourceError(
            f"{where}: cannot tell the format of {files[0]} by its suffix (known: {', '.join(SUFFIXES)}; for json and "
            f"text followed by {', '.join(COMPRESSED)} too). Say it: training.dataset={' or '.join(FORMATS)}."
        )
    return formats[0]
