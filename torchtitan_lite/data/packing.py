"""Which documents share a row: a plan made from lengths alone, before any token is read.

The packing is next-fit over a seeded shuffle. A document longer than a row is split: its full pieces are rows of their
own, the rest is packed like any document. Every piece is a document to the model: it has its own id, its positions
start at 0, and its last token has no target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchtitan_lite.config.schema import Config

PACKING_VERSION = 1
"""Raised whenever the same lengths and settings would give another plan; a resume across versions is refused."""


@dataclass(frozen=True)
class PackingSettings:
    """All that a plan depends on beside the lengths; see the data section of the configuration for each."""

    seq_len: int
    max_documents_per_row: int
    seed: int
    strategy: str = "best_fit"
    oversize: str = "split"
    window: int = 100_000


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


@dataclass(frozen=True)
class PackingPlan:
    """Rows of documents, as flat arrays: row ``r`` holds segments ``row_offsets[r] : row_offsets[r + 1]``.

    Segment ``s`` is ``length[s]`` tokens of document ``document[s]``, from its token ``start[s]`` on.
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


@dataclass(frozen=True)
class PackingStats:
    """What a plan makes of a data set."""

    documents: int
    empty_documents: int
    split_documents: int
    tokens: int
    rows: int
    segments: int
    padding_fraction: float

    @property
    def documents_per_row(self) -> float:
        return self.segments / self.rows

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents ({self.split_documents:,} split; {self.empty_documents:,} empty), "
            f"{self.tokens:,} tokens in {self.rows:,} rows: {self.documents_per_row:.2f} documents per row, "
            f"{self.padding_fraction:.2%} padding"
        )


def packing_stats(plan: PackingPlan) -> PackingStats:
    """Counts of a plan with at least one row. ``documents`` counts a split document once, ``segments`` its pieces."""
    pieces = np.unique(plan.document, return_counts=True)[1]
    tokens = int(plan.length.sum())
    return PackingStats(
        documents=len(pieces),
        empty_documents=plan.empty_documents,
        split_documents=int((pieces > 1).sum()),
        tokens=tokens,
        rows=plan.num_rows,
        segments=len(plan.document),
        padding_fraction=1 - tokens / (plan.num_rows * plan.seq_len),
    )


def resolved_max_documents(config: Config) -> int:
    """The cap on documents per row that ``data.max_documents_per_row`` stands for, never above seq_len."""
    seq_len = config.training.seq_len
    return min(config.data.max_documents_per_row or max(16, seq_len // 32), seq_len)


def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of range(size), int64, that depends on the key alone.

    It sorts raw generator output, which NumPy promises to keep the same in every version; its shuffles may change.
    """
    seed = np.random.SeedSequence([part % 2**64 for part in key])
    return np.argsort(np.random.PCG64(seed).random_raw(size), kind="stable")


def pack(lengths: np.ndarray, seq_len: int, max_documents_per_row: int, seed: int) -> PackingPlan:
    """Plans rows of at most ``seq_len`` tokens and ``max_documents_per_row`` documents.

    Args:
        lengths: tokens of each document, [documents]. Documents of length 0 are dropped and counted.
        seq_len: tokens per row.
        max_documents_per_row: a row closes when it holds this many.
        seed: decides which documents come to lie together.
    """
    if seq_len < 1 or max_documents_per_row < 1:
        raise ValueError(f"seq_len={seq_len} and max_documents_per_row={max_documents_per_row} must be at least 1.")
    lengths = np.asarray(lengths, dtype=np.int64)
    shuffled = permutation(len(lengths), seed, 0)
    full_pieces, rest = np.divmod(lengths[shuffled], seq_len)

    # Full pieces, each a row of its own: document d gives starts 0, seq_len, 2 seq_len, ...
    full_document = np.repeat(shuffled, full_pieces)
    first_piece = np.repeat(np.cumsum(full_pieces) - full_pieces, full_pieces)
    full_start = (np.arange(len(full_document)) - first_piece) * seq_len

    # What is left of each document (all of it, for a short one), packed side by side.
    has_rest = rest > 0
    rest = rest[has_rest]
    row_sizes = _next_fit(rest.tolist(), seq_len, max_documents_per_row)
    return PackingPlan(
        seq_len=seq_len,
        row_offsets=np.cumsum(np.concatenate([[0], np.ones(len(full_document), np.int64), row_sizes]), dtype=np.int64),
        document=np.concatenate([full_document, shuffled[has_rest]]),
        start=np.concatenate([full_start, full_pieces[has_rest] * seq_len]),
        length=np.concatenate([np.full(len(full_document), seq_len), rest]),
        empty_documents=int((lengths == 0).sum()),
    )


def _next_fit(lengths: list[int], seq_len: int, max_documents: int) -> np.ndarray:
    """Number of consecutive pieces in each row, when a row closes at the first piece that does not fit."""
    sizes: list[int] = []
    free, count = seq_len, 0
    for length in lengths:
        if length > free or count == max_documents:
            sizes.append(count)
            free, count = seq_len, 0
        free -= length
        count += 1
    if count:
        sizes.append(count)
    return np.array(sizes, dtype=np.int64)
