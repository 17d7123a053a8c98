"""Activation checkpointing of transformer blocks: none, whole blocks, every n-th block, or selectively by operation."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_lite.config.schema import ActivationCheckpoint

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def _saved_ops() -> set:
    """Dear to compute and cheap to keep: attention under every back-end, and sums over ranks."""
    import torchtitan_lite.attention.varlen  # noqa: F401  (registers torchtitan_lite and torch_attn operators)

    return {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._flash_attention_forward.default,
        torch.ops.aten._efficient_attention_forward.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.torchtitan_lite.varlen_attention.default,
        torch.ops.higher_order.flex_attention,
        # Of tensor parallelism: small (a rank's own tokens), and recomputing it would communicate once more.
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }


def _selective_contexts():
    """Save attention and every second matrix product; recompute the rest (normalisation, SwiGLU, RoPE, the others)."""
    saved = _saved_ops()
    matmuls = defaultdict(int)  # forward and recomputation count apart

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        if op in _MATMULS:
            matmuls[ctx.is_recompute] += 1
            # The even ones: nothing in the block needs the product of its last and seventh.
            save = matmuls[ctx.is_recompute] % 2 == 0
        else:
            save = op in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _unpacked_again_contexts():
    """Leave it to the compiler which sums, matrix products and attention it saves; recompute the rest."""
    choice = _saved_ops() | _MATMULS | {torch.ops.aten.add.Tensor, torch.ops.aten.native_dropout.default}

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_SAVE if op in choice else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def unpack_again(model: nn.Module) -> None:
    """Have blocks that are going to be compiled unpack their quantised weights again in the backward pass, in place.

    Left to itself the compiler sees one unpacking in both passes, and keeps what comes of it in between: in the end the
    whole model, unpacked.
    """
    for block in model.layers.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=_unpacked_again_contexts)


def apply_activation_checkpoint(model: nn.Module, config: ActivationCheckpoint) -> None:
    """Checkpoint the blocks of ``model.layers``, in place.

    Only ``forward`` is replaced: a wrapping module would show in parameter names, on which initial weights and
    checkpoints depend.
    """
    if config.mode == "none":
        return
    every = 1
    options = {}
    if config.mode == "selective" and config.selective_ac_option == "op":
        options = {"context_fn": _selective_contexts}
    elif config.mode == "selective":
        every = int(config.selective_ac_option)
    for name, block in model.layers.items():
        if int(name) % every == 0:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
