"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from torchtitan_lite.convert.weights import WeightsError


@contextmanager
def written_whole(folder: str | Path) -> Iterator[Path]:
    """A folder to write into, which gets its name ``folder`` once all is written, and is removed if that fails.

    Raises:
        WeightsError: ``folder`` exists and is not empty, or cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    require_free(folder)
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        put_in_place(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise WeightsError(f"{folder} cannot be written: {error}") from error
        raise


def require_free(folder: Path) -> None:
    """Raise WeightsError if ``folder`` exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists already; name another folder, or remove it first")


def partial_of(folder: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return folder.with_name(f"{folder.name}.partial")


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a folder that is written its name."""
    if folder.is_dir():
        folder.rmdir()  # empty
    os.replace(partial, folder)
