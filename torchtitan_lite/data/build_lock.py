"""One process builds, the others wait for it: ranks of a run, or runs side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 60


@contextmanager
def build_lock(path: Path, what: str, timeout_seconds: float) -> Iterator[None]:
    """Holds the lock file ``path`` while ``what`` is built; says every minute that it waits.

    A file lock, outside of any collective: waiting there does not run into a collective's time limit, and a builder
    that fails or is killed frees it, so that the next in line meets the error itself.

    Raises:
        TimeoutError: another process held the lock for ``timeout_seconds``.
    """
    lock, began = FileLock(path), time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            lock.acquire(timeout=max(0, min(_REPORT_SECONDS, timeout_seconds - waited)))
            break
        except Timeout:
            waited = time.monotonic() - began
            if waited >= timeout_seconds:
                raise TimeoutError(
                    f"Another process has been at work on {what} for {waited:,.0f} s and holds {path}. Prepare the "
                    "data beforehand (scripts/prepare_data.py), or wait longer: comm.data_timeout_seconds."
                ) from None
            logger.info(f"Waiting for another process to prepare {what}, {waited:,.0f} s so far")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def built_once(path: Path, what: str, timeout_seconds: float) -> Iterator[None]:
    """As :func:`build_lock`, until the block has once run to its end: from then on nobody waits for anybody.

    So ranks that find everything built start side by side, and from a cache that they may only read. The block must
    find out for itself whether what was built is still what it wants.
    """
    done = path.with_suffix(".done")
    if done.exists():
        yield
        return
    with build_lock(path, what, timeout_seconds):
        yield
        done.touch()
