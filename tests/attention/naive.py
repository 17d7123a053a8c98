"""What attention should give, written as loops: rows, documents, heads, queries. Slow, and hard to get wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(rows: list[list[int]], seq: int) -> Tensor:
    """Rows of document lengths -> int32 [batch, seq]; what they leave of a row is padding."""
    ids = torch.full((len(rows), seq), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for document, length in enumerate(lengths):
            ids[row, start : start + length] = document
            start += length
        assert start <= seq
    return ids


def segments(row: list[int]) -> list[tuple[int, int]]:
    """Runs of equal values as (start, end)."""
    starts = [i for i, value in enumerate(row) if i == 0 or value != row[i - 1]]
    return list(zip(starts, [*starts[1:], len(row)], strict=True))


def brute_force_mask(ids: Tensor, *, documents: bool, window: int | None) -> Tensor:
    """bool [batch, seq, seq], each pair decided on its own by the words of the rule."""
    batch, seq = ids.shape
    mask = torch.zeros(batch, seq, seq, dtype=torch.bool)
    for row, query, key in ((b, i, j) for b in range(batch) for i in range(seq) for j in range(seq)):
        earlier = key <= query
        near = window is None or query - key < window
        together = not documents or ids[row, query] == ids[row, key]
        mask[row, query, key] = earlier and near and together
    return mask


def naive_attention(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, window: int | None = None) -> Tensor:
    """Softmax attention of each document on its own, in fp64.

    q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim]. Each group of ``heads / kv_heads``
    neighbouring query heads shares a key head.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    rows = []
    for row in range(q.shape[0]):
        documents = []
        for start, end in segments(ids[row].tolist()):
            length = end - start
            visible = torch.tensor(
                [[i - j >= 0 and (window is None or i - j < window) for j in range(length)] for i in range(length)]
            )
            heads = []
            for head in range(q.shape[2]):
                queries, keys, values = (
                    q[row, start:end, head],
                    k[row, start:end, head // group],
                    v[row, start:end, head // group],
                )
                scores = queries @ keys.T / q.shape[-1] ** 0.5
                heads.append(scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ values)
            documents.append(torch.stack(heads, dim=1))
        rows.append(torch.cat(documents))
    return torch.stack(rows)
