"""The package's logger: one line a record on stdout, only from the ranks that were asked for.

``LOG_RANK`` (default ``0``, a comma-separated list) names the ranks whose information and warnings are shown; errors
are shown from every rank. Lines go through ``tqdm.write``, so they do not tear a progress bar.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger("torchtitan_lite")

_ANSI = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


def paint(text: str, colour: str) -> str:
    """``text`` in ``colour`` where stdout is a terminal and NO_COLOR (https://no-color.org) is unset or empty."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return f"\033[{_ANSI[colour]}m{text}\033[0m"


class _Formatter(logging.Formatter):
    """``[HH:MM:SS] [rank N] WARNING: message``; the rank appears only where it could be in doubt."""

    def __init__(self, rank: int, name_rank: bool, name_rank_of_errors: bool) -> None:
        super().__init__("%(asctime)s", datefmt="%H:%M:%S")
        self._rank_text = f"[rank {rank}] "
        self._name_rank_from = logging.NOTSET if name_rank else logging.ERROR if name_rank_of_errors else sys.maxsize

    def formatMessage(self, record: logging.LogRecord) -> str:
        rank = self._rank_text if record.levelno >= self._name_rank_from else ""
        message = record.message
        if record.levelno >= logging.WARNING:
            colour = "red" if record.levelno >= logging.ERROR else "yellow"
            message = f"{paint(record.levelname + ':', colour)} {message}"
        return f"[{record.asctime}] {rank}{message}"


class _ConsoleHandler(logging.Handler):
    """Writes to whatever ``sys.stdout`` is at the time, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except Exception:
            self.handleError(record)


def logged_ranks(world_size: int | None = None) -> set[int]:
    """The ranks that LOG_RANK names. Raises ValueError if it is no list of ranks, or of none that a run of
    ``world_size`` has."""
    text = os.environ.get("LOG_RANK", "0")
    try:
        ranks = {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ValueError(
            f"LOG_RANK={text!r} must be a rank or a comma-separated list of ranks, such as 0 or 0,3"
        ) from None
    if world_size is not None and not ranks & set(range(world_size)):
        raise ValueError(f"LOG_RANK={text}: the ranks of this run are 0 to {world_size - 1}; nothing would be shown")
    return ranks


def init_logger() -> None:
    """Send the package's records to stdout. Reads LOG_RANK, and RANK and WORLD_SIZE as torchrun sets them.

    Calling it again replaces the earlier set-up.

    Raises:
        ValueError: LOG_RANK is not a list of whole numbers.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    ranks = logged_ranks()
    handler = _ConsoleHandler()
    handler.setFormatter(_Formatter(rank, name_rank=len(ranks) > 1, name_rank_of_errors=world_size > 1))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank in ranks else logging.ERROR)
    logger.propagate = False  # another library may have configured the root logger: every line would come twice


@contextmanager
def quiet_import() -> Iterator[None]:
    """For torchao, whose import warns of each kernel of its own that does not load, none of which is used here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@functools.cache
def info_once(message: str) -> None:
    """Log ``message`` the first time this process meets it."""
    logger.info(message)


@functools.cache
def warn_once(message: str) -> None:
    """Warn with ``message`` the first time this process meets it."""
    logger.warning(message)
