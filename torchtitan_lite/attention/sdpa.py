"""``sdpa``: plain causal attention over the whole row. Documents packed into one row see each other."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.attention.masks import MaskSpec


class SdpaAttention:
    """``F.scaled_dot_product_attention(is_causal=True)``; it needs no mask state."""

    def prepare(self, document_ids: Tensor, spec: MaskSpec) -> None:
        if spec.document or spec.sliding_window is not None:
            raise ValueError(f"sdpa applies no mask but the causal one; it was asked for {spec}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: None, spec: MaskSpec) -> Tensor:
        """q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim] -> like q."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return out.transpose(1, 2)
