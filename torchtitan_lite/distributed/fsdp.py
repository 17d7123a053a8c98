"""FSDP2 as the one mechanism for sharding and for mixed precision, on one rank and on many."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    *,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Shard every block of ``model.layers``, the embedding, and then the rest, in place; parts may be missing.

    On one rank, weights that are not trained and have ``param_dtype`` are left alone: FSDP would keep a second copy of
    them, gathered from what is whole already.

    Gradients are summed over ranks, not averaged: the loss is already divided by the target tokens of all of them.

    Args:
        mesh: ("fsdp",), or ("dp_replicate", "fsdp") for HSDP.
        reshard_after_forward: free a block's gathered parameters between its forward and its backward.
        cpu_offload: keep shards and gradients in CPU memory.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        # The rotary cosines and sines enter the blocks in fp32 and must stay so.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    # On one rank there is nothing to free by resharding.
    reshard = reshard_after_forward and mesh.size(mesh.ndim - 1) > 1
    as_they_are = set()
    if mesh.size() == 1 and not cpu_offload:
        as_they_are = {p for p in model.parameters() if not p.requires_grad and p.dtype == param_dtype}
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=as_they_are)
    for block in model.layers.values():
        shard(block, reshard_after_forward=reshard)
    if model.tok_embeddings is not None and model.output is not None:
        # So that it is gathered, and its gradient reduced, apart from the output's. A tied one must stay with the root,
        # whose forward uses it as the output's weight.
        shard(model.tok_embeddings, reshard_after_forward=reshard)
    shard(model, reshard_after_forward=False)
    # Neither setting reaches submodules by itself; on the root alone gradients would come out 1 / ranks too small.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def expect_backward(model: FSDPModule, *, last: bool, reduce_each: bool, reshard_each: bool) -> None:
    """Say before a microbatch's forward what the end of its backward is to communicate.

    Args:
        last: it is the last microbatch of the step: gradients must be complete after it.
        reduce_each: reduce-scatter gradients after every microbatch, so that only shards are kept. The sum over HSDP's
            copies costs no memory to put off and is taken after the last in any case.
        reshard_each: free gathered parameters after every backward. False saves gathering them again.
    """
    model.set_requires_gradient_sync(last or reduce_each)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or reshard_each)
