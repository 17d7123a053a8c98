"""What may attend what, derived from ``document_ids`` alone.

``document_ids`` is ``[batch, seq]``: every token's document, the documents of a row contiguous and -1 marking padding.
Padding is a document like any other here, so that no query is ever left without a key. Each function below turns ids
into the form that one kernel wants; they agree because all of them start from :func:`first_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class MaskSpec:
    """The rule of one layer's mask.

    causal: a token attends no later token (always so in this project).
    document: a token attends no other document.
    sliding_window: a token attends that many tokens, itself included (Hugging Face's meaning); None: all.
    """

    causal: bool = True
    document: bool = True
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if not self.causal:
            raise ValueError("MaskSpec(causal=False): only causal masks exist here")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"MaskSpec(sliding_window={self.sliding_window}): a window holds at least the token itself"
            )


Chunks = tuple[tuple[int, int], ...]
"""Stretches [lo, hi) of a row, all of one length: the queries to attend, in this order, of a rank that holds only these
tokens. The keys are always those of the whole row."""


def document_boundaries(document_ids: Tensor) -> Tensor:
    """[batch, seq] bool: True at the first token of every document. A row's first token always is one: the last
    document of a row and the first of the next may carry the same id."""
    boundaries = torch.ones_like(document_ids, dtype=torch.bool)
    boundaries[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return boundaries


def first_keys(document_ids: Tensor, spec: MaskSpec) -> Tensor:
    """[batch, seq] int64: the first key, as an index into the row, that each query attends under ``spec``.

    The last one is the query itself and all in between are attended too, so this is the whole mask. It never falls
    along a row.
    """
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    first = torch.zeros_like(index)
    if spec.document:
        first = torch.where(document_boundaries(document_ids), index, first).cummax(dim=1).values
    if spec.sliding_window is not None:
        first = torch.maximum(first, index - (spec.sliding_window - 1))
    return first


def query_ranges(document_ids: Tensor, spec: MaskSpec, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """First and last key of each query of ``chunks``: int64 [batch, queries], and [queries] for the last, which is the
    query's own place in the row."""
    query = torch.cat([torch.arange(lo, hi, device=document_ids.device) for lo, hi in chunks])
    return first_keys(document_ids, spec)[:, query], query


def dense_mask(document_ids: Tensor, spec: MaskSpec, chunks: Chunks | None = None) -> Tensor:
    """[batch, 1, queries, seq] bool, True where the query (third axis) attends the key (fourth). The queries are those
    of ``chunks``, or of the whole row."""
    seq = document_ids.shape[1]
    key = torch.arange(seq, device=document_ids.device)
    first, last = query_ranges(document_ids, spec, chunks or ((0, seq),))
    return ((key >= first[..., None]) & (key <= last[:, None]))[:, None]


def cumulative_lengths(
    document_ids: Tensor, spec: MaskSpec, max_documents_per_row: int | None = None, cut: int | None = None
) -> Tensor:
    """Offsets of the documents in the batch flattened to ``batch * seq`` tokens, for variable-length kernels.

    Returns int32 ``[batch * (max_documents_per_row + 1) + 1]``: one place more than documents per row, for padding.
    Unused places repeat the end, documents of length zero. The shape depends on nothing but the cap, so that
    compiled code sees one shape; nothing is read back from the device. None as the cap: ``seq``. With ``cut``, a
    document that goes on across that place of its row counts as two, and each row has one place more.

    The packer holds each row to the cap; here rows share their places. Raises ValueError on CPU when the batch does not
    fit; on CUDA, where looking would wait for the device, the scatter below fails with a device assertion instead of
    attending wrongly.
    """
    batch, seq = document_ids.shape
    places = batch * ((max_documents_per_row or seq) + 1 + (cut is not None))
    boundaries = document_boundaries(document_ids)
    if not spec.document:
        boundaries = torch.zeros_like(boundaries)
        boundaries[:, 0] = True
    if cut is not None:
        boundaries[:, cut] = True
    segment = boundaries.flatten().cumsum(0) - 1  # [batch * seq], which document a token belongs to
    if segment.device.type == "cpu" and segment[-1] >= places:
        raise ValueError(
            f"{int(segment[-1]) + 1} documents in a batch of {batch} rows exceed the {places} that "
            f"max_documents_per_row={max_documents_per_row} leaves room for"
        )
    starts = torch.full((places,), batch * seq, dtype=torch.int64, device=document_ids.device)
    index = torch.arange(batch * seq, device=document_ids.device)
    starts = starts.scatter_reduce(0, segment, index, "amin")
    return F.pad(starts, (0, 1), value=batch * seq).to(torch.int32)


def chunk_offsets(
    document_ids: Tensor, spec: MaskSpec, max_documents_per_row: int | None, chunk: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Offsets of the documents among the queries of one chunk of each row, [batch * (hi - lo)], and among all keys,
    [batch * seq]. Both int32, of one static length; see :func:`cumulative_lengths`.

    Documents are cut where the chunk ends. So the keys of a document with queries here end with its last query, which
    is how variable-length kernels align the two. The other documents have no queries, yet their keys are in the table:
    kernels leave the gradient of a key that no document covers unwritten.
    """
    (lo, hi), seq = chunk, document_ids.shape[1]
    cu_k = cumulative_lengths(document_ids, spec, max_documents_per_row, cut=hi if hi < seq else None)
    row, place = cu_k // seq, cu_k % seq
    return row * (hi - lo) + place.clamp(lo, hi) - lo, cu_k
