"""Attention over keys and values that were computed for earlier tokens.

The model itself does not change: its back-end is replaced by one for each layer that remembers. Rows are padded on the
left, so that all of a batch end together and a step writes one column.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.attention.masks import Chunks, MaskSpec
from torchtitan_lite.models.llama3.model import Transformer


class CacheMask:
    """What all layers share: how many columns are filled, and which of them a query attends.

    Args:
        padding: [batch] columns of padding at the left of each row.
        length: columns that there is room for.
    """

    def __init__(self, padding: Tensor, length: int) -> None:
        self.padding, self.length = padding, length
        self.filled = 0

    def prepare(self, document_ids: Tensor, spec: MaskSpec, chunks: Chunks | None = None) -> Tensor:
        """True where a query attends a key, [batch, 1, new columns, columns so far]. A row is one document."""
        queries = torch.arange(self.filled, self.filled + document_ids.shape[1], device=self.padding.device)[:, None]
        keys = torch.arange(self.filled + document_ids.shape[1], device=self.padding.device)
        attended = keys <= queries
        if spec.sliding_window is not None:
            attended &= keys > queries - spec.sliding_window
        # A padded query attends itself: a row of nothing would be NaN.
        return (attended & (keys >= self.padding[:, None, None]) | (keys == queries))[:, None]


class CachedAttention:
    """The keys and values of one layer, and attention over them."""

    def __init__(self, mask: CacheMask) -> None:
        self.mask = mask
        self.keys: Tensor | None = None  # [batch, kv heads, length, head_dim]
        self.values: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, spec: MaskSpec) -> Tensor:
        """q [batch, new, heads, head_dim], k and v [batch, new, kv_heads, head_dim] of the new columns -> like q."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        batch, heads, new, head_dim = k.shape
        if self.keys is None:
            self.keys = k.new_empty(batch, heads, self.mask.length, head_dim)
            self.values = torch.empty_like(self.keys)
        stop = self.mask.filled + new
        self.keys[:, :, stop - new : stop], self.values[:, :, stop - new : stop] = k, v
        out = F.scaled_dot_product_attention(
            q, self.keys[:, :, :stop], self.values[:, :, :stop], attn_mask=state, enable_gqa=heads != q.shape[1]
        )
        return out.transpose(1, 2)


@contextmanager
def cached(model: Transformer, padding: Tensor, length: int) -> Iterator[CacheMask]:
    """In this block ``model`` has an empty cache in place of its attention."""
    mask = CacheMask(padding, length)
    holders = [model, *(layer.attention for layer in model.layers.values())]
    before = [holder.backend for holder in holders]
    model.backend = mask
    for attention in holders[1:]:
        attention.backend = CachedAttention(mask)
    try:
        yield mask
    finally:
        for holder, backend in zip(holders, before, strict=True):
            holder.backend = backend
