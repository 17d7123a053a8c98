"""``sdpa_block_causal``: variable-length attention over the documents of the batch, flattened into one sequence.

Three engines compute the same thing. ``flash`` (CUDA, 16 bit): ``torch.nn.attention.varlen``, plain tensors and an
offset table. ``nested`` (CUDA): SDPA over a jagged NestedTensor, which also takes fp32. ``cpu``: the project's
operator over torch's CPU flash kernel.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from torchtitan_lite.attention.backends import attend_chunks, resolve_engine
from torchtitan_lite.attention.masks import Chunks, MaskSpec, chunk_offsets, cumulative_lengths
from torchtitan_lite.attention.varlen_cpu import varlen_attention

# torch 2.11 takes grouped heads as they are; later ones want to be told.
_FLASH_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class VarlenState(NamedTuple):
    """Where the documents lie among the queries and among the keys: int32 [static number of documents + 1] each. The
    last query of a document is aligned with its last key."""

    cu_q: Tensor
    cu_k: Tensor


class VarlenAttention:
    """Attention that computes nothing between documents.

    max_documents_per_row: the packer's cap, which fixes the size of the offset table (the flash backward's memory
    grows with it). None: as many as tokens, always enough.
    engine: auto, flash, nested or cpu.
    """

    def __init__(self, max_documents_per_row: int | None = None, engine: str = "auto") -> None:
        self.max_documents_per_row = max_documents_per_row
        self.engine = engine

    def prepare(
        self, document_ids: Tensor, spec: MaskSpec, chunks: Chunks | None = None
    ) -> VarlenState | tuple[VarlenState, ...]:
        """document_ids [batch, seq] -> offsets, of each chunk if given, on the same device, without a host sync."""
        cap = self.max_documents_per_row
        if chunks is None:
            cu_seqlens = cumulative_lengths(document_ids, spec, cap)
            return VarlenState(cu_seqlens, cu_seqlens)
        return tuple(VarlenState(*chunk_offsets(document_ids, spec, cap, chunk)) for chunk in chunks)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, state: VarlenState | tuple[VarlenState, ...], spec: MaskSpec
    ) -> Tensor:
        """q [batch, queries, heads, head_dim], k and v [batch, seq, kv_heads, head_dim] -> like q."""
        if isinstance(state, VarlenState):
            return self._attend(q, k, v, state, spec)
        return attend_chunks(q, state, lambda q, state: self._attend(q, k, v, state, spec))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: VarlenState, spec: MaskSpec) -> Tensor:
        engine = resolve_engine(self.engine, q.device.type, q.dtype)
        flat = (x.flatten(0, 1) for x in (q, k, v))  # [batch * seq, heads, head_dim]
        if engine == "cpu":
            out, _ = varlen_attention(*flat, *state, spec.sliding_window)
        elif engine == "flash":
            out = _flash(*flat, state, q.shape[1], k.shape[1], spec)
        else:
            if q.shape != k.shape[:2] + q.shape[2:]:
                raise ValueError(
                    f"engine nested: {q.shape[1]} queries over rows of {k.shape[1]} keys; it needs as many"
                )
            out = _nested(*flat, state.cu_q, q.shape[1])
        return out.unflatten(0, q.shape[:2])


def _flash(q: Tensor, k: Tensor, v: Tensor, state: VarlenState, max_q: int, max_k: int, spec: MaskSpec) -> Tensor:
    # (left, right) count the tokens beside the query: a window of W is W - 1 to the left. The type matters: a tuple
    # equal to (-1, 0) is what switches the kernel's causal path on.
    window = (-1, 0) if spec.sliding_window is None else (spec.sliding_window - 1, 0)
    return varlen_attn(q, k, v, *state, max_q, max_k, window_size=window, **_FLASH_GQA)


def _nested(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    groups = q.shape[1] // k.shape[1]  # jagged SDPA has no grouped heads: repeat them
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    # The places left over hold documents of length zero, which the fused kernels skip. Torch refuses those kernels when
    # it hears of an empty document, and has no other causal one: it is told that the shortest has one token.
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, cu_seqlens, min_seqlen=1, max_seqlen=max_seqlen).transpose(1, 2)
        for x in (q, k, v)
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).values()
