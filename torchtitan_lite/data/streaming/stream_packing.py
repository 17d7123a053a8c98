"""Packing of documents that keep coming: rows are made from the few that are at hand.

As in a plan (:mod:`torchtitan_lite.data.packing.plan`), a document longer than a row is treated by ``oversize``, a
piece is a document to the model, and a piece that fills a row is a row of its own. Only the choice is narrower:

- ``best_fit``: from a pool of at most ``buffer`` documents a row's first is drawn by lot, so that the pool shuffles
  too; then the longest one that still fits (of equal ones the oldest), until none does.
- ``greedy``: the next documents until one does not fit; that one opens the next row.
- ``split``: documents end to end, cut at the row's end; the rest continues in the next row.
- ``none``: one document a row.

What comes out depends on the documents, their order and the key alone, not on how many were added at a time.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from torchtitan_lite.data.packing.plan import PackingError, PackingSettings
from torchtitan_lite.data.supervision import is_supervised

STREAM_PACKING_VERSION = 1
"""Raised whenever the same documents and settings would give other rows; a resume across versions is refused."""


@dataclass
class StreamCounts:
    """What became of the records so far."""

    documents: int = 0  # with at least one token; those truncated or dropped included
    empty: int = 0
    truncated: int = 0
    dropped: int = 0
    tokens_lost: int = 0  # by truncating and dropping
    skipped: int = 0  # bad records, left out before they became documents
    untrained: int = 0  # truncated so that no token to be predicted is left

    def __add__(self, other: StreamCounts) -> StreamCounts:
        return StreamCounts(*(getattr(self, name) + getattr(other, name) for name in asdict(self)))


class StreamPacker:
    """Documents in, rows out.

    Add documents while :attr:`wants_more`, then take a row; after the last document call :meth:`finish`, and take rows
    until one is empty.

    Args:
        settings: as for a plan; the window has no say.
        buffer: documents (pieces, where one was split) that ``best_fit`` chooses among.
        key: with the seed, determines the lots drawn; to be different for packers that run side by side.
    """

    def __init__(self, settings: PackingSettings, buffer: int, key: Sequence[int] = ()):
        if buffer < 1:
            raise ValueError(f"buffer={buffer} must be at least 1.")
        makers = {
            "best_fit": self._best_fit_row,
            "greedy": self._greedy_row,
            "split": self._split_row,
            "none": self._single_row,
        }
        self.settings = settings
        self.buffer = buffer
        self.key = tuple(key)
        self.counts = StreamCounts()
        self.rows = 0
        self._make_row = makers[settings.strategy]
        self._finished = False
        self._queue: deque[np.ndarray] = deque()  # came in, in this order, and not looked at yet
        self._queue_tokens = 0
        self._open: list[np.ndarray] = []  # greedy: the row that is being filled
        self._pool: dict[int, np.ndarray] = {}  # best_fit: by number, a higher one came later
        self._sizes: list[tuple[int, int]] = []  # best_fit: (length, -number) of the pool, sorted
        self._next_number = 0

    # -- documents in --------------------------------------------------------------------------------------------------

    @property
    def wants_more(self) -> bool:
        """Whether the next row would depend on a document that is not there yet."""
        if self._finished:
            return False
        held = len(self._queue)
        if self.settings.strategy == "best_fit":
            return len(self._pool) + held < self.buffer
        if self.settings.strategy == "none":
            return held == 0
        # A row ends by its length or the cap; what is held reaches neither, or surely one of them.
        tokens = _tokens(self._open) + self._queue_tokens
        return tokens < self.settings.seq_len and len(self._open) + held < self.settings.max_documents_per_row

    def add(self, tokens: np.ndarray) -> None:
        """Takes a document, [length] integers as they are stored, and copies it. One of no tokens is counted as empty.

        Raises:
            PackingError: it is longer than a row and ``oversize`` is ``error``.
        """
        if self._finished:
            raise RuntimeError("a document came after the last one.")
        length, seq_len = len(tokens), self.settings.seq_len
        if length == 0:
            self.counts.empty += 1
            return
        self.counts.documents += 1
        oversize = self.settings.oversize
        if length <= seq_len or (oversize == "split" and self.settings.strategy == "split"):
            self._enqueue(tokens)
        elif oversize == "split":
            for start in range(0, length, seq_len):
                self._enqueue(tokens[start : start + seq_len])
        elif oversize == "truncate":
            self.counts.truncated += 1
            self.counts.tokens_lost += length - seq_len
            self.counts.untrained += not is_supervised(tokens[1:seq_len]).any()
            self._enqueue(tokens[:seq_len])
        elif oversize == "drop":
            self.counts.dropped += 1
            self.counts.tokens_lost += length
        else:
            raise PackingError(
                f"a document of {length:,} tokens is longer than training.seq_len={seq_len} and data.oversize=error "
                "allows none; data.oversize=split, truncate or drop would, or a longer training.seq_len."
            )

    def finish(self) -> None:
        """There are no more documents: what is held goes out, the last rows filled as well as it allows."""
        self._finished = True

    def _enqueue(self, tokens: np.ndarray) -> None:
        # A copy, for a view would keep alive all that came with it.
        self._queue.append(np.array(tokens, dtype=np.int32))
        self._queue_tokens += len(tokens)

    def _dequeue(self) -> np.ndarray:
        tokens = self._queue.popleft()
        self._queue_tokens -= len(tokens)
        return tokens

    # -- rows out ------------------------------------------------------------------------------------------------------

    def next_row(self) -> list[np.ndarray]:
        """The documents of the next row, [length] int32 each; none at all once everything has gone out.

        Raises:
            RuntimeError: it wants more documents first.
        """
        if self.wants_more:
            raise RuntimeError("the next row depends on documents that have not been added yet.")
        row = self._make_row()
        self.rows += bool(row)
        return row

    def _single_row(self) -> list[np.ndarray]:
        return [self._dequeue()] if self._queue else []

    def _split_row(self) -> list[np.ndarray]:
        row: list[np.ndarray] = []
        free = self.settings.seq_len
        while self._queue and free and len(row) < self.settings.max_documents_per_row:
            tokens = self._dequeue()
            if len(tokens) > free:
                self._queue.appendleft(tokens[free:])
                self._queue_tokens += len(tokens) - free
                tokens = tokens[:free]
            row.append(tokens)
            free -= len(tokens)
        return row

    def _greedy_row(self) -> list[np.ndarray]:
        seq_len = self.settings.seq_len
        free = seq_len - _tokens(self._open)
        while self._queue and free and len(self._open) < self.settings.max_documents_per_row:
            length = len(self._queue[0])
            if length == seq_len:  # a row already; the open one need not close for it
                return [self._dequeue()]
            if length > free:
                break
            self._open.append(self._dequeue())
            free -= length
        row, self._open = self._open, []
        return row

    def _best_fit_row(self) -> list[np.ndarray]:
        while self._queue and len(self._pool) < self.buffer:
            tokens = self._dequeue()
            self._pool[self._next_number] = tokens
            insort(self._sizes, (len(tokens), -self._next_number))
            self._next_number += 1
        if not self._pool:
            return []
        row = [self._take(self._lot() % len(self._sizes))]
        free = self.settings.seq_len - len(row[0])
        while free and len(row) < self.settings.max_documents_per_row:
            fits = bisect_right(self._sizes, (free, 0))  # the pool's shortest documents
            if fits == 0:
                break
            row.append(self._take(fits - 1))
            free -= len(row[-1])
        return row

    def _take(self, index: int) -> np.ndarray:
        """Document ``index`` of the pool by size."""
        return self._pool.pop(-self._sizes.pop(index)[1])

    def _lot(self) -> int:
        """A random number of this row: a pure function of the key and the row's number, so there is no state of it."""
        parts = (self.settings.seed, 3, *self.key, self.rows)  # 3: apart from every other use of the seed
        return int(np.random.PCG64(np.random.SeedSequence([part % 2**64 for part in parts])).random_raw())

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is held, as plain values and two arrays: ``tokens`` [total] int32, of ``lengths`` [held] int64."""
        held = [*self._open, *self._pool.values(), *self._queue]
        return {
            "rows": self.rows,
            "finished": self._finished,
            "open": len(self._open),
            "pool": len(self._pool),
            "counts": asdict(self.counts),
            "lengths": np.array([len(tokens) for tokens in held], dtype=np.int64),
            "tokens": np.concatenate([np.empty(0, np.int32), *held]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of a packer with the same settings, buffer and key."""
        ends = np.cumsum(state["lengths"])
        held = [part.copy() for part in np.split(state["tokens"], ends[:-1])] if len(ends) else []
        self.rows = state["rows"]
        self._finished = state["finished"]
        self.counts = StreamCounts(**state["counts"])
        opened, pooled = state["open"], state["open"] + state["pool"]
        self._open = held[:opened]
        self._pool = dict(enumerate(held[opened:pooled]))
        self._sizes = sorted((len(tokens), -number) for number, tokens in self._pool.items())
        self._next_number = len(self._pool)
        self._queue = deque(held[pooled:])
        self._queue_tokens = _tokens(self._queue)


def _tokens(documents: Sequence[np.ndarray]) -> int:
    return sum(len(tokens) for tokens in documents)
