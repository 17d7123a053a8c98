"""FSDP2 as the one mechanism for sharding and for mixed precision, on one rank and on many."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(model: nn.Module, mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Shard every block of ``model.layers``, the embedding, and then the rest, in place.

    Gradients are summed over ranks, not averaged: the loss is already divided by the target tokens of all of them.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        # The rotary cosines and sines enter the blocks in fp32 and must stay so.
        cast_forward_inputs=False,
    )
    # On one rank there is nothing to free by resharding.
    reshard = mesh.size() > 1
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if model.output is not None:
        # So that it is gathered, and its gradient reduced, apart from the output's. A tied one must stay with the root,
        # whose forward uses it as the output's weight.
        fully_shard(model.tok_embeddings, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # Neither setting reaches submodules by itself; on the root alone gradients would come out 1 / ranks too small.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
