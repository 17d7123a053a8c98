"""Variable-length causal attention on CPU: torch's CPU flash kernel, run document by document.

A dense mask makes the kernel compute every pair of a row and throw most away; here a row of short documents costs what
its documents cost. The operator compiles without a graph break: ``cu_seqlens`` has a static shape and its values are
looked at inside only. Backward recomputes nothing: the log-sum-exp of each query is saved, as in FlashAttention
(Dao et al., 2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Fewest queries of one tile of a sliding window: below it the calls cost more than the pairs they save.
_MIN_TILE = 64


def _tiles(cu_seqlens: Tensor, window: int | None, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """The kernel calls that cover all attended pairs: (queries, keys, additive mask or None for plain causal).

    Every query lies in exactly one tile together with all the keys it attends, so a tile's log-sum-exp is the query's
    own and key gradients of overlapping tiles add up. Zero-length documents yield nothing (the kernel would die).
    """
    masks: dict[tuple[int, int], Tensor] = {}
    offsets = cu_seqlens.tolist()
    for start, end in itertools.pairwise(offsets):
        if end == start:
            continue
        if window is None or end - start <= window:
            yield slice(start, end), slice(start, end), None
            continue
        step = max(window, _MIN_TILE)
        for q_start in range(start, end, step):
            q_end = min(q_start + step, end)
            k_start = max(start, q_start - window + 1)
            shape = (q_end - q_start, q_end - k_start)
            if shape not in masks:
                masks[shape] = _band_mask(*shape, window, dtype)
            yield slice(q_start, q_end), slice(k_start, q_end), masks[shape]


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
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document of a flattened batch.

    q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] (kv_heads divides heads), ``cu_seqlens`` int32
    [documents + 1] rising from 0 to ``tokens``, ``window`` the number of tokens attended, itself included, or None.
    Returns the output, like q, and the log-sum-exp of every query's scores, fp32 [tokens, heads].
    """
    q, k, v = (x.contiguous() for x in (q, k, v))  # the kernel takes a row of head_dim to be adjacent, unchecked
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    for queries, keys, mask in _tiles(cu_seqlens, window, q.dtype):
        tile_out, tile_lse = _flash(
            _heads_first(q[queries]), _heads_first(k[keys]), _heads_first(v[keys]), 0.0, mask is None, attn_mask=mask
        )
        out[queries] = _tokens_first(tile_out)
        lse[queries] = _tokens_first(tile_lse)
    return out, lse


@torch.library.custom_op("torchtitan_lite::varlen_attention_backward", mutates_args=(), device_types="cpu")
def _varlen_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in (q, k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))  # zeros: overlapping tiles add to dk and dv
    for queries, keys, mask in _tiles(cu_seqlens, window, q.dtype):
        grads = _flash_backward(
            _heads_first(grad_out[queries]),
            _heads_first(q[queries]),
            _heads_first(k[keys]),
            _heads_first(v[keys]),
            _heads_first(out[queries]),
            _heads_first(lse[queries]),
            0.0,
            mask is None,
            attn_mask=mask,
        )
        dq[queries] = _tokens_first(grads[0])
        dk[keys] += _tokens_first(grads[1])
        dv[keys] += _tokens_first(grads[2])
    return dq, dk, dv


@varlen_attention.register_fake
def _(q, k, v, cu_seqlens, window):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


@_varlen_attention_backward.register_fake
def _(grad_out, q, k, v, out, lse, cu_seqlens, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])  # refuse a gradient that backward would ignore


def _backward(ctx, grad_out, grad_lse):
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    grads = _varlen_attention_backward(grad_out, q, k, v, out, lse, cu_seqlens, ctx.window)
    return *grads, None, None


varlen_attention.register_autograd(_backward, setup_context=_setup_context)
# Under autocast the rotary embedding leaves q and k in fp32 beside a bf16 v; the kernel wants one type.
varlen_attention.register_autocast("cpu", torch.bfloat16)
