"""Which part of a parameter a rank holds."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(name: str, parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The elements of a parameter (plain or sharded) that this rank holds, and where they begin in the whole.

    Raises:
        ValueError: torch cannot say where they begin, naming ``name``.
    """
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    local = parameter.to_local()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if shape != local.shape:  # torch errs where a shard is one of unequal shards of a shard
        raise ValueError(
            f"{name} {tuple(parameter.shape)}: this rank's shard is {tuple(local.shape)}, but torch places one of "
            f"{shape} here; choose a tensor-parallel degree that divides its rows"
        )
    return local, tuple(offset)
