"""Time limits of collectives, changed while the run is under way."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout, _world


def set_collective_timeouts(seconds: int, keep: Collection[ProcessGroup] = ()) -> None:
    """Give the collectives of every process group, those of meshes included, this time limit from now on.

    All ranks call it together. It waits for work under way on the GPUs of all ranks, so that nothing that began under
    the old limit is met by the new one. Of gloo, sends and receives keep the limit that their group was made with:
    torch hands them none.

    Args:
        keep: groups that stay as they are, such as one that waits for disks.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(()))  # gloo's, as a tensor on the CPU: the default group has it beside NCCL
    for group in list(_world.pg_map):
        if group not in keep:
            _set_pg_timeout(timedelta(seconds=seconds), group)
