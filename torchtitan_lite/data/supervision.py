"""Which tokens of a document are to be predicted, kept in the tokens themselves.

A document is stored as one integer array. A token that no loss is to be taken of (the prompt of a chat) stands in it
as its bitwise complement, a negative number. So whatever cuts, packs, moves or saves documents takes the mask along
without knowing of it, and the two cannot get out of step. Text has no such tokens and is stored as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mark(ids: Sequence[int] | np.ndarray, supervised: np.ndarray) -> np.ndarray:
    """Token ids, [length], and which of them are to be predicted, [length] bool, as they are stored: [length] int32."""
    ids = np.asarray(ids, dtype=np.int32)
    return np.where(supervised, ids, ~ids)


def tokens_of(stored: np.ndarray) -> np.ndarray:
    """The token ids of what :func:`mark` made, of the same shape and type."""
    return np.where(stored < 0, ~stored, stored)


def is_supervised(stored: np.ndarray) -> np.ndarray:
    """Which tokens of what :func:`mark` made are to be predicted: bool, of the same shape."""
    return stored >= 0
