"""Files as records, one after another, each bad one named by its place in the file.

Record ``k`` of a file is always the same one, and a bad record counts as one too, so that a reader can begin at any of
them. Where a file cannot be read on (a truncated archive, say), all that is left of it is one bad record.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from torchtitan_lite.data.sources.document import Record, SourceError, Undecodable, kind_of

READER_VERSION = 1
"""Raised whenever the same files would give other records."""

_ROWS_AT_A_TIME = 1000
_ARROW_FILE = b"ARROW1"  # what the file format begins with, and the stream format never does
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)
_TABLE_DAMAGE = (pyarrow.ArrowException, OSError, ValueError)


def read_records(format: str, path: str, columns: Sequence[str], start: int = 0) -> Iterator[Record]:
    """The records of a file, from number ``start`` on (counted from 0).

    Args:
        format: json (lines, or in a file not called .jsonl or .ndjson also one array), text, parquet or arrow.
        columns: top-level fields that are wanted; the other columns of a table are not read.

    Raises:
        OSError: the disk or the network failed, which says nothing about the file.
        SourceError: the file needs something that is not installed.
    """
    if format != "text" and os.path.getsize(path) == 0:
        return iter([Record("", None, "the file is empty")][start:])
    if format == "parquet":
        return _parquet(path, columns, start)
    if format == "arrow":
        return _arrow(path, columns, start)
    if format == "json":
        return _json(path, start)
    return itertools.islice(_text(path), start, None)


def table_records(
    table: pyarrow.Table | pyarrow.RecordBatch, columns: Sequence[str], first_row: int, names: Sequence[str]
) -> list[Record]:
    """The rows of a table as records, numbered from ``first_row`` on, of a file that has the fields ``names``."""
    rows = range(first_row, first_row + table.num_rows)
    try:
        values = {name: _values(table.column(name)) for name in columns if table.schema.get_field_index(name) >= 0}
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        return [Record(f"row {row}", None, f"damaged: {error}") for row in rows]
    return [
        Record(f"row {row}", {name: column[index] for name, column in values.items()}, names=names)
        for index, row in enumerate(rows)
    ]


def without_compression(path: str) -> str:
    """A path without the suffix that says how its file is compressed, if it has one."""
    root, suffix = os.path.splitext(path)
    return root if suffix.lower() in _OPEN else path


def _text(path: str) -> Iterator[Record]:
    with _open(path) as file:
        raw, problem = _read_all(file)
    text, undecodable = _decoded(raw)
    problem = problem or undecodable
    if problem is None:
        yield Record("", {"text": text.replace("\r\n", "\n").replace("\r", "\n")})
    else:
        yield Record("", None, problem)


def _json(path: str, start: int) -> Iterator[Record]:
    array = _holds_array(path)
    with _open(path) as file:
        if array:
            yield from itertools.islice(_json_array(file), start, None)
        else:
            yield from _json_lines(file, start)


def _holds_array(path: str) -> bool:
    if Path(without_compression(path)).suffix.lower() in (".jsonl", ".ndjson"):
        return False
    with _open(path) as file:
        try:
            return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
        except _DAMAGE:
            return False


def _json_lines(file: BinaryIO, start: int) -> Iterator[Record]:
    number, records, last = 0, 0, None
    lines = enumerate(file, 1)
    while last is None:
        try:
            number, line = next(lines)
        except StopIteration:
            if records:
                return
            last = Record("", None, "the file is empty")
        except _DAMAGE as error:
            last = Record(f"after line {number}", None, _damage(error))
        else:
            if number == 1:
                line = line.removeprefix(_BOM)
            if line and not line.isspace():
                if records >= start:
                    yield _json_record(f"line {number}", line.rstrip(b"\r\n"))
                records += 1
    if records >= start:
        yield last


def _json_record(where: str, line: bytes) -> Record:
    try:
        return _object(where, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Record(where, None, _undecodable(error, "line"))
    except json.JSONDecodeError as error:
        return Record(where, None, f"broken JSON at column {error.colno}: {error.msg.removesuffix(' at')}")
    except (ValueError, RecursionError) as error:
        return Record(where, None, f"broken JSON: {error}")


def _json_array(file: BinaryIO) -> Iterator[Record]:
    """Elements of one array. It is read whole, and what follows something broken is lost."""
    raw, damage = _read_all(file)
    text, undecodable = _decoded(raw)
    del raw
    number, end = 1, "["
    position = _SPACE.match(text, text.find("[") + 1).end()
    try:
        if text.startswith("]", position):
            end, position = "]", position + 1
        while end != "]":
            value, position = _DECODER.raw_decode(text, position)
            yield _object(f"record {number}", value)
            number += 1
            position = _SPACE.match(text, position).end()
            end = text[position : position + 1]
            if end not in (",", "]"):
                raise json.JSONDecodeError("neither ',' nor ']' after a record", text, position)
            position = _SPACE.match(text, position + 1).end()
        if _SPACE.match(text, position).end() < len(text) or damage or undecodable:
            raise json.JSONDecodeError("more after the end of the array", text, position)
    except (ValueError, RecursionError) as error:
        yield Record(f"record {number}", None, damage or undecodable or f"broken JSON from here on: {error}")


def _object(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        return Record(where, None, f"the record is {kind_of(value)}, no object with fields")
    return Record(where, value)


def _parquet(path: str, columns: Sequence[str], start: int) -> Iterator[Record]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
        groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        if sum(groups) != file.metadata.num_rows or min(groups, default=0) < 0:
            raise pyarrow.ArrowInvalid("its footer contradicts itself")
    except _TABLE_DAMAGE as error:
        yield from [Record("", None, _damage(error))][start:]
        return
    with file:
        names = file.schema_arrow.names
        wanted = [name for name in columns if name in names]
        end = 0
        for group, rows in enumerate(groups):
            row, end = end, end + rows
            if end <= start:
                continue
            problem = "truncated or damaged: the file has fewer rows than its footer says"
            try:
                # Loader workers are forked, and threads do not survive that.
                for batch in file.iter_batches(_ROWS_AT_A_TIME, [group], wanted, use_threads=False):
                    if row + batch.num_rows > start:
                        yield from table_records(batch, columns, row + 1, names)[max(start - row, 0) : end - row]
                    row += batch.num_rows
            except _TABLE_DAMAGE as error:
                problem = _damage(error)
            for lost in range(max(row, start), end):  # each row, so that those after the group keep their numbers
                yield Record(f"row {lost + 1}", None, problem)


def _arrow(path: str, columns: Sequence[str], start: int) -> Iterator[Record]:
    row = 0
    try:
        with pyarrow.memory_map(path) as file:
            for batch in _arrow_batches(file):
                for first in range(0, batch.num_rows, _ROWS_AT_A_TIME):
                    part = batch.slice(first, _ROWS_AT_A_TIME)
                    if row + part.num_rows > start:
                        yield from table_records(part, columns, row + 1, part.schema.names)[max(start - row, 0) :]
                    row += part.num_rows
    except _TABLE_DAMAGE as error:
        if row >= start:
            yield Record(f"after row {row}", None, _damage(error))


def _arrow_batches(file: pyarrow.MemoryMappedFile) -> Iterator[pyarrow.RecordBatch]:
    if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
        reader = pyarrow.ipc.open_file(file)
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        file.seek(0)
        yield from pyarrow.ipc.open_stream(file)


def _values(column: pyarrow.Array | pyarrow.ChunkedArray) -> list[Any]:
    """A column as Python values. What its file says of it is checked first: the conversion trusts it blindly."""
    try:
        column.validate(full=True)
        return column.to_pylist()
    except pyarrow.ArrowInvalid:
        if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
            raise
        raw = column.cast(pyarrow.binary() if pyarrow.types.is_string(column.type) else pyarrow.large_binary())
        raw.validate(full=True)
        return [_decoded_value(value) for value in raw.to_pylist()]


def _decoded_value(raw: bytes | None) -> str | Undecodable | None:
    try:
        return None if raw is None else raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Undecodable(_undecodable(error, "value"))


def _open_zstd(path: str, mode: str) -> BinaryIO:
    if not pyarrow.Codec.is_available("zstd"):
        raise SourceError(f"{path}: this pyarrow was built without zstd; pip install --force-reinstall pyarrow.")
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(path, mode), "zstd"))


_OPEN: dict[str, Callable[[str, str], BinaryIO]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}

COMPRESSED = tuple(_OPEN)
"""What may follow the suffix of a json or text file."""


def _open(path: str) -> BinaryIO:
    return _OPEN.get(os.path.splitext(path)[1].lower(), open)(path, "rb")


def _read_all(file: BinaryIO) -> tuple[bytes, str | None]:
    """A file's bytes up to the damage in it, if there is any, and what that is."""
    parts = []
    try:
        while part := file.read1():  # small parts: what was read of the one that fails is lost
            parts.append(part)
    except _DAMAGE as error:
        return b"".join(parts), _damage(error)
    return b"".join(parts), None


def _decoded(raw: bytes) -> tuple[str, str | None]:
    """A file's text up to the first byte that is none, if there is one, and which that is."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff"), None
    except UnicodeDecodeError as error:
        return raw[: error.start].decode("utf-8").removeprefix("\ufeff"), _undecodable(error, "file")


def _undecodable(error: UnicodeDecodeError, whole: str) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start} of the {whole}"


def _damage(error: Exception) -> str:
    """What to call a file that cannot be read on. A system error is raised again: it is the disk's, not the file's."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    return f"truncated or damaged: {error}"
