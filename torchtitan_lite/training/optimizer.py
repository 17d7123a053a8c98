"""The optimizer and the clipping of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.schema import Optimizer


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Adam or AdamW over the trainable parameters, with fp32 master weights as FSDP2 keeps them."""
    optimizer_class = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
    return optimizer_class(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients in place so that their global 2-norm is at most ``max_norm`` (0: leave them).

    Returns the norm before clipping, fp32, over all shards.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
