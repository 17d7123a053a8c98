"""Variable-length causal attention on CPU: torch's CPU flash kernel, run document by document.

A dense mask makes the kernel compute every pair of a row and throw most away; here a row of short documents costs what
its documents cost. The operator compiles without a graph break: ``cu_seqlens`` has a static shape and its values are
looked at inside only. Backward recomputes nothing: the log-sum-exp of each query is saved, as in FlashAttention
(Dao et al., 2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Fewest queries of one tile of a sliding window: below it the calls cost more than the pairs they save.
_MIN_TILE = 64


class _Tile(NamedTuple):
    """One call of the kernel. Of its queries and keys all pairs are attended, or the causal ones, or those of ``mask``
    (additive)."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


def _tiles(cu_q: Tensor, cu_k: Tensor, window: int | None, dtype: torch.dtype) -> Iterator[_Tile]:
    """The kernel calls that cover all attended pairs.

    A query lies in one tile together with all the keys it attends, or in two: the causal tile, and right after it that
    of the keys before the first query, all of which all queries attend. Documents without queries yield nothing (the
    kernel would die).
    """
    masks: dict[tuple[int, int], Tensor] = {}
    for (q_start, q_end), (k_start, k_end) in zip(
        *(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True
    ):
        if q_start == q_end:
            continue
        aligned = k_end - (q_end - q_start)  # the key of the first query itself
        if window is None or k_end - k_start <= window:
            yield _Tile(slice(q_start, q_end), slice(aligned, k_end), causal=True)
            if k_start < aligned:
                yield _Tile(slice(q_start, q_end), slice(k_start, aligned))
            continue
        step = max(window, _MIN_TILE)
        for start in range(q_start, q_end, step):
            end = min(start + step, q_end)
            first, last = start - q_start + aligned, end - q_start + aligned
            keys = slice(max(k_start, first - window + 1), last)
            shape = (end - start, last - keys.start)
            if shape not in masks:
                masks[shape] = _band_mask(*shape, window, dtype)
            yield _Tile(slice(start, end), keys, mask=masks[shape])


def _band_mask(queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """[queries, keys] additive mask of a causal window; the last query is aligned with the last key."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_((distance < 0) | (distance >= window), -torch.inf)


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, ...] -> [1, heads, tokens, ...], the kernel's layout, as a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    """The inverse of :func:`_heads_first`."""
    return x.squeeze(0).transpose(0, 1)


@torch.library.custom_op("torchtitan_lite::varlen_attention", mutates_args=(), device_types="cpu")
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document of a flattened batch.

    q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim] (kv_heads divides heads). ``cu_q`` and ``cu_k``,
    int32 [documents + 1] rising from 0 to ``queries`` and ``keys``, say where the documents lie. One may have fewer
    queries than keys: its last query is aligned with its last key. ``window`` is the number of tokens attended, itself
    included, or None. Returns the output, like q, and the log-sum-exp of every query's scores, fp32 [queries, heads].
    """
    q, k, v = (x.contiguous() for x in (q, k, v))  # the kernel takes a row of head_dim to be adjacent, unchecked
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    for queries, keys, causal, mask in _tiles(cu_q, cu_k, window, q.dtype):
        tile_out, tile_lse = _flash(
            _heads_first(q[queries]), _heads_first(k[keys]), _heads_first(v[keys]), 0.0, causal, attn_mask=mask
        )
        tile_out, tile_lse = _tokens_first(tile_out), _tokens_first(tile_lse)
        if not causal and mask is None:
            tile_out, tile_lse = _merged(out[queries], lse[queries], tile_out, tile_lse)
        out[queries] = tile_out
        lse[queries] = tile_lse
    return out, lse


def _merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each, and the log-sum-exp of all scores."""
    total = torch.logaddexp(lse, other_lse)
    return out * (lse - total).exp()[..., None] + other_out * (other_lse - total).exp()[..., None], total


@torch.library.custom_op("torchtitan_lite::varlen_attention_backward", mutates_args=(), device_types="cpu")
def _varlen_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in (q, k, v))
    # Zeros, because the gradients of overlapping tiles add up and no tile holds the keys that no query attends. The
    # output and log-sum-exp are the query's over all its keys, whatever the tile: that makes its share of them right.
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for queries, keys, causal, mask in _tiles(cu_q, cu_k, window, q.dtype):
        grads = _flash_backward(
            _heads_first(grad_out[queries]),
            _heads_first(q[queries]),
            _heads_first(k[keys]),
            _heads_first(v[keys]),
            _heads_first(out[queries]),
            _heads_first(lse[queries]),
            0.0,
            causal,
            attn_mask=mask,
        )
        dq[queries] += _tokens_first(grads[0])
        dk[keys] += _tokens_first(grads[1])
        dv[keys] += _tokens_first(grads[2])
    return dq, dk, dv


@varlen_attention.register_fake
def _(q, k, v, cu_q, cu_k, window):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


@_varlen_attention_backward.register_fake
def _(grad_out, q, k, v, out, lse, cu_q, cu_k, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])  # refuse a gradient that backward would ignore


def _backward(ctx, grad_out, grad_lse):
    q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
    grads = _varlen_attention_backward(grad_out, q, k, v, out, lse, cu_q, cu_k, ctx.window)
    return *grads, None, None, None


varlen_attention.register_autograd(_backward, setup_context=_setup_context)
# Under autocast the rotary embedding leaves q and k in fp32 beside a bf16 v; the kernel wants one type.
varlen_attention.register_autocast("cpu", torch.bfloat16)
