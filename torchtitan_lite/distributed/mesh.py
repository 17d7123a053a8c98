"""Process group and device mesh of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class World:
    """Where this process stands. ``device`` is its own GPU, or the CPU."""

    rank: int
    local_rank: int
    size: int
    device: torch.device


class DataParallel(NamedTuple):
    """Which rows a process reads: those of place ``rank`` among ``degree``."""

    rank: int
    degree: int


def data_parallel_place(
    rank: int, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1
) -> DataParallel:
    """The data-parallel place of a global rank, in a mesh whose dimensions are laid out in the order of the arguments.

    Ranks that differ only in their place along pp, cp or tp work on the same rows.
    """
    inner = cp * tp
    return DataParallel(rank // inner % (dp_replicate * dp_shard), dp_replicate * dp_shard)


def world_from_environment() -> World:
    """What the launcher says of this process; one process alone where there is no launcher. Starts nothing."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(int(os.environ.get("RANK", 0)), local_rank, int(os.environ.get("WORLD_SIZE", 1)), device)


def init_distributed(world: World, timeout_seconds: int) -> None:
    """Start the default process group: NCCL for tensors on the GPU and gloo for those on the CPU."""
    backend = "gloo"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def build_mesh(world: World, shard_degree: int) -> DeviceMesh:
    """The mesh of the run; -1 as a degree stands for all the ranks that are left."""
    degree = world.size if shard_degree == -1 else shard_degree
    return init_device_mesh(world.device.type, (degree,), mesh_dim_names=("dp_shard",))
