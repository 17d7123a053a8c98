"""Which documents share a row: a plan made from lengths alone, before any token is read.

Documents are taken in consecutive windows, shuffled by the seed inside each, so that what it needs beside the lengths
and the plan does not grow with their number. A strategy lays a window's documents into rows; what it leaves over goes
into the next window. A document longer than a row is dealt with first, as ``oversize`` says. Where documents are cut,
every piece is a document to the model: it has its own id, its positions start at 0, and its last token has no target.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.packing.best_fit import best_fit_rows

PACKING_VERSION = 2
"""Raised whenever the same lengths and settings would give another plan; a resume across versions is refused."""

STRATEGIES = ("best_fit", "greedy", "split", "none")
OVERSIZE_RULES = ("split", "truncate", "drop", "error")


class PackingError(ValueError):
    """Documents that cannot be packed as the settings ask."""


@dataclass(frozen=True)
class PackingSettings:
    """All that a plan depends on beside the lengths; see the data section of the configuration for each."""

    seq_len: int
    max_documents_per_row: int
    seed: int
    strategy: str = "best_fit"
    oversize: str = "split"
    window: int = 100_000

    def __post_init__(self) -> None:
        for name in ("seq_len", "max_documents_per_row", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"packing: {name}={getattr(self, name)} must be at least 1.")
        for name, choices in (("strategy", STRATEGIES), ("oversize", OVERSIZE_RULES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"packing: {name}={getattr(self, name)!r} must be one of {', '.join(choices)}.")


def packing_settings(config: Config) -> PackingSettings:
    """The settings of a run."""
    return PackingSettings(
        seq_len=config.training.seq_len,
        max_documents_per_row=resolved_max_documents(config),
        seed=config.training.seed,
        strategy=config.data.packing,
        oversize=config.data.oversize,
        window=config.data.packing_window,
    )


def resolved_max_documents(config: Config) -> int:
    """The cap on documents per row that ``data.max_documents_per_row`` stands for, never above seq_len."""
    seq_len = config.training.seq_len
    return min(config.data.max_documents_per_row or max(16, seq_len // 32), seq_len)


@dataclass(frozen=True)
class PackingPlan:
    """Rows of documents, as flat arrays: row ``r`` holds segments ``row_offsets[r] : row_offsets[r + 1]``.

    Segment ``s`` is ``length[s]`` tokens of document ``document[s]``, from its token ``start[s]`` on. The order of the
    rows has no meaning.
    """

    seq_len: int
    row_offsets: np.ndarray  # [rows + 1] int64
    document: np.ndarray  # [segments] int64
    start: np.ndarray  # [segments] int32
    length: np.ndarray  # [segments] int32
    empty_documents: int
    truncated_documents: int = 0
    dropped_documents: int = 0
    tokens_lost: int = 0  # by truncating and dropping

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens of each row without its padding, [rows] int64."""
        before = np.concatenate([[0], np.cumsum(self.length, dtype=np.int64)])
        return np.diff(before[self.row_offsets])

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """(document, start, length) of each segment of a row, from left to right."""
        part = slice(self.row_offsets[index], self.row_offsets[index + 1])
        return list(
            zip(self.document[part].tolist(), self.start[part].tolist(), self.length[part].tolist(), strict=True)
        )


def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of range(size), int64, that depends on the key alone.

    It sorts raw generator output, which NumPy promises to keep the same in every version; its shuffles may change.
    """
    seed = np.random.SeedSequence([part % 2**64 for part in key])
    return np.argsort(np.random.PCG64(seed).random_raw(size), kind="stable")


def pack(lengths: np.ndarray, settings: PackingSettings) -> PackingPlan:
    """Plans rows of at most ``seq_len`` tokens and ``max_documents_per_row`` documents.

    Documents without tokens are left out and counted, as is what truncating and dropping loses. Beside the lengths and
    the plan it needs memory for the pieces of two windows.

    Args:
        lengths: tokens of each document, [documents] of any integer type.

    Raises:
        PackingError: ``oversize`` is ``error`` and a document is longer than a row.
        ValueError: a length is negative or beyond int32.
    """
    lengths = np.asarray(lengths)
    _check_lengths(lengths, settings)
    fill = {"best_fit": _best_fit, "greedy": _next_fit, "split": _end_to_end, "none": _one_per_row}[settings.strategy]
    plan = _PlanBuilder(settings)
    left_over = _Pieces(*(np.empty(0, dtype=np.int64) for _ in _Pieces._fields))
    for window, first in enumerate(range(0, len(lengths), settings.window)):
        in_window = lengths[first : first + settings.window].astype(np.int64)
        order = permutation(len(in_window), settings.seed, 0, window)
        documents = _Pieces(first + order, np.zeros_like(order), in_window[order])
        pieces = left_over.followed_by(plan.apply_oversize(documents))
        is_last = first + settings.window >= len(lengths)
        pieces, row_sizes = fill(pieces, settings, is_last)
        laid = int(row_sizes.sum())
        plan.add_rows(pieces.take(slice(laid)), row_sizes)
        left_over = pieces.take(slice(laid, None))
    return plan.finish()


class _Pieces(NamedTuple):
    """Documents and pieces of documents, as parallel arrays [pieces] int64; see :class:`PackingPlan`."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def take(self, index: np.ndarray | slice) -> _Pieces:
        return _Pieces(*(field[index] for field in self))

    def followed_by(self, other: _Pieces) -> _Pieces:
        return _Pieces(*map(np.concatenate, zip(self, other, strict=True)))


def _check_lengths(lengths: np.ndarray, settings: PackingSettings) -> None:
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError(f"packing: lengths must be a list of integers, not {lengths.dtype} of shape {lengths.shape}.")
    if not lengths.size:
        return
    shortest, longest = int(lengths.argmin()), int(lengths.argmax())
    if lengths[shortest] < 0:
        raise ValueError(f"packing: document {shortest} has a negative length, {lengths[shortest]}.")
    if lengths[longest] > np.iinfo(np.int32).max:
        raise ValueError(
            f"packing: document {longest} has {lengths[longest]:,} tokens, more than the {np.iinfo(np.int32).max:,} "
            "that a plan can count. Make several documents of it."
        )
    if settings.oversize == "error" and lengths[longest] > settings.seq_len:
        count = int(np.count_nonzero(lengths > settings.seq_len))
        raise PackingError(
            f"{count:,} of {len(lengths):,} documents are longer than a row of training.seq_len={settings.seq_len} "
            f"tokens; the longest is document {longest} with {int(lengths[longest]):,} tokens. What works: "
            f"data.oversize=split, truncate or drop, or training.seq_len={int(lengths[longest])} or more."
        )


class _PlanBuilder:
    """Takes finished rows, and counts what does not get into any."""

    def __init__(self, settings: PackingSettings):
        self.settings = settings
        self.rows = _Column(np.int64)
        self.pieces = _Pieces(_Column(np.int64), _Column(np.int32), _Column(np.int32))
        self.rows.append(np.zeros(1, np.int64))
        self.empty = self.truncated = self.dropped = self.tokens_lost = 0

    def apply_oversize(self, documents: _Pieces) -> _Pieces:
        """What is left to pack: nothing empty, and, but for the strategy ``split``, nothing as long as a row."""
        seq_len, rule = self.settings.seq_len, self.settings.oversize
        self.empty += int(np.count_nonzero(documents.length == 0))
        too_long = documents.length > seq_len
        if rule == "truncate":
            self.truncated += int(np.count_nonzero(too_long))
            kept = np.minimum(documents.length, seq_len)
        elif rule == "drop":
            self.dropped += int(np.count_nonzero(too_long))
            kept = np.where(too_long, 0, documents.length)
        else:
            kept = documents.length
        self.tokens_lost += int((documents.length - kept).sum())
        pieces = documents._replace(length=kept)
        if self.settings.strategy != "split":
            pieces = self._lay_full_pieces(pieces)
        return pieces.take(pieces.length > 0)

    def _lay_full_pieces(self, documents: _Pieces) -> _Pieces:
        """Makes a row of each piece that fills one, and returns what is left of the documents."""
        seq_len = self.settings.seq_len
        full, rest = np.divmod(documents.length, seq_len)
        index = np.arange(full.sum()) - np.repeat(np.cumsum(full) - full, full)  # 0, 1, 2, ... in each document
        rows = _Pieces(np.repeat(documents.document, full), index * seq_len, np.full(len(index), seq_len))
        self.add_rows(rows, np.ones(len(index), np.int64))
        return documents._replace(start=full * seq_len, length=rest)

    def add_rows(self, pieces: _Pieces, row_sizes: np.ndarray) -> None:
        """Rows of ``row_sizes`` pieces each, [rows] int64, which lie one after the other in ``pieces``."""
        self.rows.append(self.pieces.document.size + np.cumsum(row_sizes))
        for column, values in zip(self.pieces, pieces, strict=True):
            column.append(values)

    def finish(self) -> PackingPlan:
        return PackingPlan(
            self.settings.seq_len,
            self.rows.finish(),
            *(column.finish() for column in self.pieces),
            empty_documents=self.empty,
            truncated_documents=self.truncated,
            dropped_documents=self.dropped,
            tokens_lost=self.tokens_lost,
        )


class _Column:
    """An array that grows in place, by steps of fixed size: joining parts at the end would hold everything twice."""

    STEP = 1 << 16

    def __init__(self, dtype: type):
        self.size = 0
        self._array = np.empty(0, dtype)

    def append(self, values: np.ndarray) -> None:
        end = self.size + len(values)
        if end > len(self._array):
            self._array.resize(end + self.STEP, refcheck=False)
        self._array[self.size : end] = values
        self.size = end

    def finish(self) -> np.ndarray:
        self._array.resize(self.size, refcheck=False)
        return self._array


# A strategy takes the pieces of a window and gives them back row after row, with the number of pieces in each row. What
# comes after those rows is left over for the next window; the last window leaves nothing.


def _best_fit(pieces: _Pieces, settings: PackingSettings, is_last: bool) -> tuple[_Pieces, np.ndarray]:
    """Best-fit decreasing. The rows with most free space are left over, up to a window's worth of documents."""
    row = best_fit_rows(pieces.length, settings.seq_len, settings.max_documents_per_row)
    row_sizes = np.bincount(row)
    left_over = np.zeros(len(row_sizes), dtype=bool)
    if not is_last:
        used = np.bincount(row, weights=pieces.length)
        emptiest = np.argsort(used, kind="stable")[: np.count_nonzero(used < settings.seq_len)]
        within = np.searchsorted(np.cumsum(row_sizes[emptiest]), settings.window, side="right")
        left_over[emptiest[:within]] = True
    layout = np.argsort(row + left_over[row] * len(row_sizes), kind="stable")
    return pieces.take(layout), row_sizes[~left_over]


def _next_fit(pieces: _Pieces, settings: PackingSettings, is_last: bool) -> tuple[_Pieces, np.ndarray]:
    """Pieces in their order; a row closes at the first that does not fit. The open row is left over."""
    row_sizes: list[int] = []
    free, count = settings.seq_len, 0
    for length in pieces.length.tolist():
        if length > free or count == settings.max_documents_per_row:
            row_sizes.append(count)
            free, count = settings.seq_len, 0
        free -= length
        count += 1
    if is_last and count:
        row_sizes.append(count)
    return pieces, np.array(row_sizes, dtype=np.int64)


def _end_to_end(pieces: _Pieces, settings: PackingSettings, is_last: bool) -> tuple[_Pieces, np.ndarray]:
    """Pieces in their order; what a full row cuts off goes on in the next. The open row is left over."""
    ends = np.cumsum(pieces.length)
    row_ends = np.array(_row_ends(ends.tolist(), settings, is_last), dtype=np.int64)
    piece = np.searchsorted(ends, row_ends)  # in which each row ends
    is_cut = ends[piece] > row_ends
    cuts = np.insert(ends, piece[is_cut], row_ends[is_cut])
    lengths = np.diff(cuts, prepend=0)
    of_piece = np.repeat(np.arange(len(ends)), 1 + np.bincount(piece[is_cut], minlength=len(ends)))
    starts = cuts - lengths - (ends - pieces.length)[of_piece] + pieces.start[of_piece]
    row_sizes = np.diff(piece + 1 + np.cumsum(is_cut) - is_cut, prepend=0)
    return _Pieces(pieces.document[of_piece], starts, lengths), row_sizes


def _row_ends(ends: list[int], settings: PackingSettings, is_last: bool) -> list[int]:
    """Where rows end in the tokens of all pieces laid end to end, given where the pieces end."""
    row_ends: list[int] = []
    first, start = 0, 0  # piece and token with which the row starts
    while first < len(ends):
        full = start + settings.seq_len
        last = first + settings.max_documents_per_row - 1
        if last < len(ends) and ends[last] <= full:
            start = ends[last]
        elif ends[-1] >= full:
            start = full
        elif is_last:
            start = ends[-1]
        else:
            break
        first = bisect_right(ends, start, first)
        row_ends.append(start)
    return row_ends


def _one_per_row(pieces: _Pieces, settings: PackingSettings, is_last: bool) -> tuple[_Pieces, np.ndarray]:
    return pieces, np.ones(len(pieces.length), dtype=np.int64)
