"""The endless order in which the rows of one or several sources are read: a pure function of the seed.

Each source is read epoch after epoch, every epoch in a permutation of its own. Sources are interleaved by tokens, in
the manner of stride scheduling (Waldspurger and Weihl 1995): a row is due at the time

    (tokens of its source before it + half of its own) / weight of the source

and rows come in the order in which they are due. So at any time the tokens read from each source are as its weight, to
within a row, however full or empty its rows are; and when a finite source ends, the others keep their proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_lite.data.packing.plan import permutation

_ROWS_PER_BLOCK = 4096


class Rows(NamedTuple):
    """Which rows to read, in order."""

    source: np.ndarray  # [rows] int64
    row: np.ndarray  # [rows] int64, within the source


class _Epoch(NamedTuple):
    """One source's rows in the order of one epoch."""

    row: np.ndarray  # [rows] int64
    tokens_before: np.ndarray  # [rows + 1] int64, since the very start
    due: np.ndarray  # [rows] float64, rising


class RowOrder:
    """Random access to the sequence of rows.

    Time is cut into blocks of about the same number of rows. How many rows are due before a block is known without
    looking at those in between, and a block is sorted when it is read.

    Args:
        row_tokens: for each source the tokens of its rows without padding, [rows], at least 1 each.
        weights: share of the tokens of each source, relative to the others.
        epochs: passes over each source before it ends. 0: no end.
        seed: decides the permutations.
    """

    def __init__(self, row_tokens: Sequence[np.ndarray], weights: Sequence[float], epochs: Sequence[int], seed: int):
        if any(len(tokens) == 0 for tokens in row_tokens):
            raise ValueError("A source without rows has no order.")
        self.num_rows = np.array([len(tokens) for tokens in row_tokens], dtype=np.int64)
        self._row_tokens = [np.asarray(tokens, dtype=np.int64) for tokens in row_tokens]
        self._epoch_tokens = np.array([int(tokens.sum()) for tokens in self._row_tokens])
        self._weights = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        self._epochs = list(epochs)
        self._seed = seed
        self._last_block: int | None = None
        rows_per_time = float((self._weights * self.num_rows / self._epoch_tokens).sum())
        self._block_time = _ROWS_PER_BLOCK / rows_per_time
        # Two epochs of each source, as a block may lie across the end of one.
        self._epoch = lru_cache(maxsize=2 * len(row_tokens))(self._build_epoch)
        self._block = lru_cache(maxsize=2)(self._build_block)

    @property
    def total_rows(self) -> int | None:
        """Rows until every source has ended; None if some never do."""
        return int(self.num_rows @ self._epochs) if all(self._epochs) else None

    def rows(self, start: int, count: int) -> Rows:
        """``count`` rows of the sequence, from its row ``start`` on.

        Raises:
            IndexError: every source ends before.
        """
        if self.total_rows is not None and start + count > self.total_rows:
            raise IndexError(f"Row {start + count - 1} of a sequence that ends after {self.total_rows} rows.")
        parts = []
        while count > 0:
            block = self._block_of(start)  # not simply the next: many may be empty once a source of great weight ended
            first = self._rows_before(block)
            found = self._block(block)
            part = slice(start - first, start - first + count)
            parts.append(Rows(found.source[part], found.row[part]))
            taken = len(parts[-1].row)
            start, count = start + taken, count - taken
        return Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def rows_read(self, position: int) -> np.ndarray:
        """How many of the first ``position`` rows are of each source, [sources] int64."""
        if position == 0:
            return np.zeros(len(self.num_rows), np.int64)
        block = self._block_of(position - 1)
        inside = self._block(block).source[: position - self._rows_before(block)]
        return self._counts_before(block) + np.bincount(inside, minlength=len(self.num_rows))

    def tokens_read(self, position: int) -> np.ndarray:
        """Tokens, without padding, that the first ``position`` rows hold of each source, [sources] int64."""
        tokens = []
        for source, rows in enumerate(self.rows_read(position).tolist()):
            epoch, within = divmod(rows, int(self.num_rows[source]))
            tokens.append(
                self._epoch(source, epoch).tokens_before[within] if within else epoch * self._epoch_tokens[source]
            )
        return np.array(tokens, dtype=np.int64)

    def _build_epoch(self, source: int, epoch: int) -> _Epoch:
        row = permutation(int(self.num_rows[source]), self._seed, 1, epoch, source)
        tokens = self._row_tokens[source][row]
        before = np.concatenate([[0], np.cumsum(tokens)]) + epoch * self._epoch_tokens[source]
        return _Epoch(row, before, (before[:-1] + tokens / 2) / self._weights[source])

    def _build_block(self, block: int) -> Rows:
        """The rows due in a block of time, sorted; those due at once by source."""
        sources, rows, due = [], [], []
        for source, (first, last) in enumerate(
            zip(self._counts_before(block), self._counts_before(block + 1), strict=True)
        ):
            while first < last:
                epoch, within = divmod(int(first), int(self.num_rows[source]))
                part = slice(within, within + int(last - first))
                found = self._epoch(source, epoch)
                rows.append(found.row[part])
                due.append(found.due[part])
                sources.append(np.full(len(rows[-1]), source))
                first += len(rows[-1])
        if not rows:
            return Rows(np.empty(0, np.int64), np.empty(0, np.int64))
        source, row = np.concatenate(sources), np.concatenate(rows)
        order = np.lexsort((source, np.concatenate(due)))
        return Rows(source[order], row[order])

    def _counts_before(self, block: int) -> np.ndarray:
        """Rows of each source that are due before a block begins, [sources] int64."""
        time = block * self._block_time
        counts = []
        for source, rows in enumerate(self.num_rows.tolist()):
            # Rounding may put a time at the very end of an epoch into the next. No row is due within half a token of
            # it, so the count is the same.
            epoch = int(time * self._weights[source] // self._epoch_tokens[source])
            if self._epochs[source] and epoch >= self._epochs[source]:
                counts.append(self._epochs[source] * rows)
            else:
                counts.append(epoch * rows + int(np.searchsorted(self._epoch(source, epoch).due, time)))
        return np.array(counts, dtype=np.int64)

    def _rows_before(self, block: int) -> int:
        return int(self._counts_before(block).sum())

    def _block_of(self, position: int) -> int:
        """The block that holds a row of the sequence: from where the last one was found outwards, then by halving.

        A look at another epoch costs a permutation of it. So the first guess is a good one: as long as no source has
        ended, blocks have about the same number of rows.
        """
        low = position // _ROWS_PER_BLOCK if self._last_block is None else self._last_block
        high, step = low + 1, 1
        while self._rows_before(low) > position:
            low, high, step = max(low - step, 0), low, 2 * step
        while self._rows_before(high) <= position:
            low, high, step = high, high + step, 2 * step
        while high - low > 1:  # rows before low <= position < rows before high
            middle = (low + high) // 2
            low, high = (middle, high) if self._rows_before(middle) <= position else (low, middle)
        self._last_block = low
        return low
