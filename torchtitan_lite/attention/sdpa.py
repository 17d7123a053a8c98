"""``sdpa``: plain causal attention over the whole row. Documents packed into one row see each other."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from torchtitan_lite.attention.backends import attend_chunks
from torchtitan_lite.attention.masks import Chunks, MaskSpec


class SdpaAttention:
    """``F.scaled_dot_product_attention``, causal; whole rows need no mask state."""

    def prepare(
        self, document_ids: Tensor, spec: MaskSpec, chunks: Chunks | None = None
    ) -> tuple[CausalBias, ...] | None:
        """For each chunk [lo, hi) the causal rule that aligns its last query with key hi - 1."""
        if spec.document or spec.sliding_window is not None:
            raise ValueError(f"sdpa applies no mask but the causal one; it was asked for {spec}")
        # Made here: the constructor does not trace.
        return chunks and tuple(causal_lower_right(hi - lo, hi) for lo, hi in chunks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: tuple[CausalBias, ...] | None, spec: MaskSpec) -> Tensor:
        """q [batch, queries, heads, head_dim], k and v [batch, seq, kv_heads, head_dim] -> like q."""
        if state is None:
            return _attend(q, k, v, is_causal=True)
        # The bias knows how many keys end with the chunk.
        return attend_chunks(
            q, state, lambda q, bias: _attend(q, k[:, : bias.seq_len_kv], v[:, : bias.seq_len_kv], attn_mask=bias)
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, **mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1], **mask).transpose(1, 2)
