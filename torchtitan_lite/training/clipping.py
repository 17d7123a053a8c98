"""Clipping of gradients by their norm over all meshes and pipeline stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, pp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale gradients in place so that their global 2-norm is at most ``max_norm`` (0: leave them).

    Gradients may be plain tensors, which count as they are, and DTensors over any meshes, whose every element counts
    once. ``pp_group``: ranks that hold the other pipeline stages, and so other parameters.

    Returns the norm before clipping, fp32, the same on every rank.
    """
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    # A stage without gradients waits for the others all the same.
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else "cpu")
    for part in _squares(grads):
        square += part.to(square.device)
    if pp_group is not None:
        dist.all_reduce(square, group=pp_group)
    norm = square.sqrt().float()
    if max_norm > 0:
        # torch's clip_grads_with_norm_, on local tensors: a foreach over DTensors wants them on one mesh.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for grad in map(_local, grads):
            by_device[grad.device].append(grad)
        for device, local in by_device.items():
            torch._foreach_mul_(local, scale.to(device))
    return norm


def _squares(grads: list[Tensor]) -> list[Tensor]:
    """Sums of the squares of gradients, one a kind of sharding, over all its shards.

    They are taken in fp64: on CPU torch's fp32 norm of 8 million elements is off by 2e-4, and differently so for every
    way to shard them.
    """
    groups: dict[tuple, list[Tensor]] = defaultdict(list)  # by device, and by the mesh dimensions sharded over
    for grad in grads:
        sharded = ()
        if isinstance(grad, DTensor):
            if any(p.is_partial() for p in grad.placements):
                grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
            # FSDP's shards of a tensor that is sharded already, _StridedShard, do not answer to is_shard.
            sharded = tuple((grad.device_mesh, dim) for dim, p in enumerate(grad.placements) if not p.is_replicate())
        local = _local(grad)
        groups[local.device, sharded].append(local)
    squares = []
    for (_, sharded), local in groups.items():
        square = torch.stack(torch._foreach_norm(local, 2, dtype=torch.float64)).square().sum()
        for mesh, dim in sharded:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return squares


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
