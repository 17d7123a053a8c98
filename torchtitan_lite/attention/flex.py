"""``flex_block_causal``: FlexAttention under a BlockMask that is computed, not searched for.

``create_block_mask`` evaluates the mask on all seq x seq pairs. The masks here need only the first key of each query:
the key blocks a query block meets are a contiguous range, and so are those it attends fully, so the BlockMask follows
from two comparisons per pair of blocks.

FlexAttention has no CPU backward. On CPU the same mask, as a dense tensor, goes through SDPA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtitan_lite.attention.backends import BLOCK_SIZE
from torchtitan_lite.attention.masks import Chunks, MaskSpec, dense_mask, first_keys, query_ranges


class FlexAttention:
    """FlexAttention on CUDA, dense-mask SDPA on CPU; the same mask in both."""

    def prepare(self, document_ids: Tensor, spec: MaskSpec, chunks: Chunks | None = None) -> BlockMask | Tensor:
        """document_ids [batch, seq] -> BlockMask (CUDA) or bool [batch, 1, queries, seq] (CPU), on the same device."""
        if document_ids.device.type == "cpu":
            return dense_mask(document_ids, spec, chunks)
        return block_mask(document_ids, spec, chunks=chunks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: BlockMask | Tensor, spec: MaskSpec) -> Tensor:
        """q [batch, queries, heads, head_dim], k and v [batch, seq, kv_heads, head_dim] -> like q."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = k.shape[1] != q.shape[1]
        if isinstance(state, BlockMask):
            out = _flex_attention(q, k, v, block_mask=state, enable_gqa=gqa)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=state, enable_gqa=gqa)
        return out.transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _flex_attention(*args, **kwargs) -> Tensor:
    """flex_attention, compiled by itself where no compiled block is around it: otherwise it would materialise the
    scores."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    return attend(*args, **kwargs)


def block_mask(
    document_ids: Tensor, spec: MaskSpec, block_size: int = BLOCK_SIZE, chunks: Chunks | None = None
) -> BlockMask:
    """The BlockMask of ``spec``, equal to what ``create_block_mask`` finds, in O((seq / block_size)^2).

    Its queries are those of ``chunks``, or of the whole row. Raises ValueError when ``seq`` or an end of a chunk is not
    a multiple of ``block_size``.
    """
    seq = document_ids.shape[1]
    if seq % block_size:
        raise ValueError(f"flex_block_causal: seq_len {seq} is not a multiple of the block size {block_size}")
    if chunks is None:
        first = first_keys(document_ids, spec)  # [batch, queries], rising along a chunk

        def mask_mod(b, h, q_index, kv_index):
            return (kv_index <= q_index) & (kv_index >= first[b, q_index])

    else:
        if any(end % block_size for chunk in chunks for end in chunk):
            raise ValueError(f"flex_block_causal: chunks {chunks} do not consist of blocks of {block_size} tokens")
        first, last = query_ranges(document_ids, spec, chunks)

        def mask_mod(b, h, q_index, kv_index):
            return (kv_index <= last[q_index]) & (kv_index >= first[b, q_index])

    key_start = torch.arange(0, seq, block_size, device=document_ids.device)
    key_end = key_start + block_size - 1
    # A query block lies in one chunk. Of its first query: place in the row, [q_blocks, 1]
    place = key_start[:, None] if chunks is None else last[::block_size, None]
    lowest = first[:, ::block_size, None]  # ... and first key: [batch, q_blocks, 1]
    highest = first[:, block_size - 1 :: block_size, None]  # first key of its last query

    attended = (key_end >= lowest) & (key_start <= place)  # some pair: [batch, q_blocks, kv_blocks]
    full = (key_start >= highest) & (key_end <= place)  # every pair: no key after the first query

    return BlockMask.from_kv_blocks(
        *_ordered(attended & ~full),
        *_ordered(full),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(first.shape[1], seq),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [batch, q_blocks, kv_blocks] -> counts [batch, 1, q_blocks] and key-block indices, the attended first, in
    the order that BlockMask stores (int32)."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    indices = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[:, None].contiguous(), indices[:, None].contiguous()
