"""Files of documents in every format, written by other means than the package's own."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet


def compress_zstd(raw: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(raw)
    return sink.getvalue().to_pybytes()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": compress_zstd,
}


def write_parquet(path: Path, rows_per_group: int = 1000, **columns) -> Path:
    # Plain, so that tests can damage a page and know what is in it.
    pyarrow.parquet.write_table(
        pyarrow.table(columns), path, row_group_size=rows_per_group, compression="none", use_dictionary=False
    )
    return path


def write_arrow(path: Path, new=pyarrow.ipc.new_stream, rows_per_batch: int = 1000, **columns) -> Path:
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        for row in range(0, max(len(table), 1), rows_per_batch):
            # Taken, not sliced: a slice may be written with the bytes of its neighbours.
            writer.write_table(
                table.take(pyarrow.array(range(row, min(row + rows_per_batch, len(table))), pyarrow.int64()))
            )
    return path


def text_array(values: list[bytes | None]) -> pyarrow.Array:
    """A column that says it is text, of any bytes."""
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())
