"""The optimizer and the clipping of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
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

    Returns the norm before clipping, fp32, over the shards of all ranks.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = _total_norm([p.grad for p in parameters])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


@torch.no_grad()
def _total_norm(grads: list[Tensor]) -> Tensor:
    """Squares are summed in fp64: on CPU torch's fp32 norm of 8 million elements is off by 2e-4, and differently so
    for every way to shard them."""
    groups: dict[tuple, list[Tensor]] = defaultdict(list)  # by the mesh dimensions that gradients are sharded over
    for grad in grads:
        if isinstance(grad, DTensor):
            sharded = tuple((grad.device_mesh, dim) for dim, p in enumerate(grad.placements) if p.is_shard())
            groups[sharded].append(grad.to_local())
        else:
            groups[()].append(grad)
    squares = []
    for sharded, local in groups.items():
        square = torch.stack(torch._foreach_norm(local, 2, dtype=torch.float64)).square().sum()
        for mesh, dim in sharded:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt().float()
