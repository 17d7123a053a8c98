"""Rows of documents to the four tensors that every other part works from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchtitan_lite.data.supervision import is_supervised, tokens_of

IGNORE_INDEX = -100
"""Label of a position without a target."""

PADDING_ID = -1
"""Document id of padding."""


class Batch(NamedTuple):
    """Packed rows. Whatever a model needs to know about documents derives from ``document_ids``."""

    tokens: torch.Tensor  # [batch, seq] int64
    labels: torch.Tensor  # [batch, seq] int64: next token of the same document; IGNORE_INDEX: none, or not supervised
    document_ids: torch.Tensor  # [batch, seq] int32: 0, 1, 2, ... along the row; PADDING_ID for padding
    positions: torch.Tensor  # [batch, seq] int32: 0, 1, 2, ... inside each document; 0 for padding


def collate_rows(rows: Sequence[Sequence[np.ndarray]], seq_len: int, pad_id: int, max_documents_per_row: int) -> Batch:
    """Lays documents side by side, one list of documents a row, and pads each row on the right.

    Args:
        rows: for each row its documents, 1-D arrays as they are stored (:mod:`torchtitan_lite.data.supervision`). They
            are copied.
        seq_len: length of every row of the batch.
        pad_id: token put into padding (nothing attends it and it has no target).
        max_documents_per_row: the cap that attention's offset tables are sized for.

    Raises:
        ValueError: a row is longer than ``seq_len``, has too many documents, or an empty one.
    """
    tokens = np.full((len(rows), seq_len), pad_id, dtype=np.int64)
    document_ids = np.full((len(rows), seq_len), PADDING_ID, dtype=np.int32)
    positions = np.zeros((len(rows), seq_len), dtype=np.int32)
    supervised = np.zeros((len(rows), seq_len), dtype=bool)
    for row, documents in enumerate(rows):
        if not documents:
            continue
        lengths = np.array([len(document) for document in documents])
        used = int(lengths.sum())
        _check_row(row, lengths, used, seq_len, max_documents_per_row)
        starts = np.cumsum(lengths) - lengths
        stored = np.concatenate(documents)
        tokens[row, :used] = tokens_of(stored)
        supervised[row, :used] = is_supervised(stored)
        document_ids[row, :used] = np.repeat(np.arange(len(documents)), lengths)
        positions[row, :used] = np.arange(used) - np.repeat(starts, lengths)

    labels = np.full_like(tokens, IGNORE_INDEX)
    has_target = (document_ids[:, :-1] == document_ids[:, 1:]) & supervised[:, 1:]
    labels[:, :-1][has_target] = tokens[:, 1:][has_target]
    return Batch(*(torch.from_numpy(field) for field in (tokens, labels, document_ids, positions)))


def num_targets(batch: Batch) -> int:
    """Positions of the batch that have a target: what its summed loss is to be divided by."""
    return int((batch.labels != IGNORE_INDEX).sum())


def _check_row(row: int, lengths: np.ndarray, used: int, seq_len: int, max_documents: int) -> None:
    if used > seq_len:
        raise ValueError(f"row {row}: its documents have {used} tokens, more than seq_len={seq_len}.")
    if len(lengths) > max_documents:
        raise ValueError(f"row {row}: {len(lengths)} documents, more than max_documents_per_row={max_documents}.")
    if lengths.min() == 0:
        raise ValueError(f"row {row}: document {int(lengths.argmin())} is empty.")
