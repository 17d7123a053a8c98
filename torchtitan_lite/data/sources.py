"""Where documents come from: registered data sets and local files, as one column of text."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import datasets

from torchtitan_lite.config.schema import Config

SUFFIXES = {".json": "json", ".jsonl": "json", ".txt": "text", ".md": "text", ".parquet": "parquet"}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class SourceError(ValueError):
    """The training text cannot be found or read, or there is none."""


def pydocs() -> Iterator[str]:
    """Documentation topics and standard-library sources of the running CPython; each topic and each file a document.

    Tests and installed packages are left out, so the text is the same in every environment of one interpreter.
    """
    with contextlib.suppress(ImportError):  # some distributions package pydoc's topics apart
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py")}
    for name in sorted(paths):
        if name == "pydoc_data/topics.py" or _NOT_LIBRARY.intersection(name.split("/")):
            continue
        # Sources that do not follow their own coding line, or are links to nowhere, are nobody's training text.
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(paths[name]) as file:
            yield file.read()


DATASETS: dict[str, Callable[[], Iterator[str]]] = {"pydocs": pydocs}
"""Registered data sets: the name for ``training.dataset``, and a function that yields documents in a fixed order."""


def check_source(config: Config) -> list[str]:
    """Problems with ``training.dataset`` and ``dataset_path`` that show without reading any document."""
    try:
        if config.training.dataset_path is None:
            _check_registered(config.training.dataset)
        else:
            find_files(config.training.dataset, config.training.dataset_path)
    except SourceError as error:
        return [str(error)]
    return []


def load_documents(config: Config) -> datasets.Dataset:
    """The documents of ``training.dataset`` or ``training.dataset_path``, one column ``text`` of strings.

    Raises:
        SourceError: no such data set or file, a file that cannot be read, a missing field, or a value that is no text.
    """
    training, data = config.training, config.data
    if training.dataset_path is None:
        _check_registered(training.dataset)
        documents = list(DATASETS[training.dataset]())
        if not documents:
            raise SourceError(f"training.dataset={training.dataset}: no samples, the data set is empty.")
        return datasets.Dataset.from_dict({"text": documents})
    format, files = find_files(training.dataset, training.dataset_path)
    cache_dir = None if data.cache_dir is None else os.path.expanduser(data.cache_dir)
    with progress_on_terminal():
        return _load_files(format, files, "text" if format == "text" else data.text_field, cache_dir)


class Files(NamedTuple):
    """Files to read, all in one format."""

    format: str
    paths: list[str]


def find_files(dataset: str, dataset_path: str) -> Files:
    """Resolves ``training.dataset_path``: a file, a folder (searched through and through) or a glob; sorted.

    ``training.dataset`` names the format; where it is a registered name (its default) the suffixes decide.

    Raises:
        SourceError: nothing there, no file of the format, files of several formats, or an unreadable file.
    """
    if dataset not in FORMATS and dataset not in DATASETS:
        raise SourceError(f"training.dataset={dataset}: with a dataset_path, this must be one of {', '.join(FORMATS)}.")
    where = f"training.dataset_path={dataset_path}"
    path = os.path.expanduser(dataset_path)
    if os.path.isdir(path):
        candidates = [str(file) for file in _visible_files(Path(path))]
        if dataset in FORMATS:
            candidates = [file for file in candidates if _format_of(file) == dataset]
        else:
            candidates = [file for file in candidates if _format_of(file)]
    elif os.path.exists(path):
        candidates = [path]
    else:
        candidates = [file for file in glob.glob(path, recursive=True) if os.path.isfile(file)]
    files = sorted(os.path.abspath(file) for file in candidates)
    if not files:
        wanted = [suffix for suffix, format in SUFFIXES.items() if dataset in (format, *DATASETS)]
        raise SourceError(f"{where}: no such file, and no {', '.join(wanted)} file in a folder or glob of that name.")
    format = dataset if dataset in FORMATS else _common_format(where, files)
    for file in files:
        if not os.access(file, os.R_OK):
            raise SourceError(f"{where}: no permission to read {file}.")
        if format != "text" and os.path.getsize(file) == 0:
            raise SourceError(f"{where}: {file} is empty, which no {format} file can be.")
    return Files(format, files)


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


def _check_registered(name: str) -> None:
    if name in FORMATS:
        raise SourceError(f"training.dataset={name} needs training.dataset_path: the file, folder or glob to read.")
    if name not in DATASETS:
        close = difflib.get_close_matches(name, [*DATASETS, *FORMATS], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise SourceError(
            f"training.dataset={name}: no such data set.{hint} Registered: {', '.join(DATASETS)}; "
            f"or {', '.join(FORMATS)} for local files at training.dataset_path."
        )


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files under a folder; hidden ones and those in hidden folders (.git, .ipynb_checkpoints) are left out."""
    for file in folder.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
            yield file


def _format_of(file: str) -> str | None:
    return SUFFIXES.get(Path(file).suffix.lower())


def _common_format(where: str, files: list[str]) -> str:
    formats = sorted({_format_of(file) or Path(file).suffix or "no suffix" for file in files})
    if len(formats) > 1:
        raise SourceError(
            f"{where} holds files of several kinds ({', '.join(formats)}). Say which to read: "
            f"training.dataset={' or '.join(FORMATS)}."
        )
    if formats[0] not in FORMATS:
        raise SourceError(
            f"{where}: cannot tell the format of {files[0]} by its suffix (known: {', '.join(SUFFIXES)}). "
            f"Say it: training.dataset={' or '.join(FORMATS)}."
        )
    return formats[0]


def _load_files(format: str, files: list[str], field: str, cache_dir: str | None) -> datasets.Dataset:
    try:
        return _read(format, files, field, cache_dir)
    except Exception as error:  # the library wraps whatever its readers raise
        if len(files) == 1:
            raise SourceError(f"{files[0]}: {_reason(error)}") from error
    # Either one file is bad, and is named here, or the files have different columns beside the text.
    return datasets.concatenate_datasets([_load_files(format, [file], field, cache_dir) for file in files])


def _read(format: str, files: list[str], field: str, cache_dir: str | None) -> datasets.Dataset:
    options = {"sample_by": "document"} if format == "text" else {}
    loaded = datasets.load_dataset(
        format, data_files=[glob.escape(file) for file in files], split="train", cache_dir=cache_dir, **options
    )
    if field not in loaded.column_names:
        raise SourceError(f"no field {field!r} (data.text_field); it has {', '.join(loaded.column_names)}.")
    kind = loaded.features[field]
    if kind not in (datasets.Value("string"), datasets.Value("large_string")):
        raise SourceError(f"field {field!r} (data.text_field) must hold strings only, but its type is {kind}.")
    missing = loaded.data.column(field).is_null().to_numpy()
    if missing.any():
        raise SourceError(f"record {int(missing.argmax()) + 1} has no {field!r} (data.text_field).")
    return loaded.select_columns(field).rename_columns({field: "text"}).cast_column("text", datasets.Value("string"))


def _reason(error: BaseException) -> str:
    """The message of the error at the bottom: the library's own say no more than that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)
