"""Process group and device mesh of a run."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config.schema import Parallelism


@dataclass(frozen=True)
class World:
    """Where this process stands. ``device`` is its own GPU, or the CPU."""

    rank: int
    local_rank: int
    size: int
    device: torch.device


@dataclass(frozen=True)
class Degrees:
    """How many ways each dimension of the mesh splits the work, outermost first: ranks that differ in tp alone are
    neighbours."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(asdict(self).values())

    @property
    def dp(self) -> int:
        """Ways in which the rows of a batch are split."""
        return self.dp_replicate * self.dp_shard

    def place(self, rank: int) -> Place:
        """Where a global rank stands in the mesh."""
        coordinates = []
        for degree in reversed(list(asdict(self).values())):
            rank, coordinate = divmod(rank, degree)
            coordinates.append(coordinate)
        return Place(*reversed(coordinates))


class Place(NamedTuple):
    """Coordinates of one rank in the mesh, each from 0."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    def data_parallel_rank(self, degrees: Degrees) -> int:
        """Which share of the rows it works on, of ``degrees.dp``."""
        return self.dp_replicate * degrees.dp_shard + self.dp_shard

    @property
    def counts_rows(self) -> bool:
        """Whether this is the one rank, of those that work on the same rows, that counts and saves for all of them."""
        return self.pp == self.cp == self.tp == 0


class DataParallel(NamedTuple):
    """Which rows a process reads: those of place ``rank`` among ``degree``."""

    rank: int
    degree: int


# The settings that the degrees come from, in the order of the mesh.
DEGREE_KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


def resolve_degrees(parallelism: Parallelism, world_size: int) -> Degrees:
    """The degrees of a run of ``world_size`` processes; -1 as the shard degree stands for what the others leave.

    Raises:
        ValueError: they do not multiply to ``world_size``; the message shows the arithmetic.
    """
    given = {name: getattr(parallelism, key) for name, key in DEGREE_KEYS.items()}
    for name, degree in given.items():
        if degree < 1 and (name, degree) != ("dp_shard", -1):
            also = ", or -1 for all ranks that the others leave" if name == "dp_shard" else ""
            raise ValueError(f"parallelism.{DEGREE_KEYS[name]}={degree}: must be at least 1{also}")
    others = math.prod(degree for name, degree in given.items() if name != "dp_shard")
    if given["dp_shard"] == -1 and world_size % others == 0:
        given["dp_shard"] = world_size // others
    degrees = Degrees(**given)
    if degrees.world_size != world_size:
        product = " x ".join(f"{name} {'the rest' if degree == -1 else degree}" for name, degree in given.items())
        shard = f"parallelism.{DEGREE_KEYS['dp_shard']}"
        if given["dp_shard"] == -1:
            sum_up = f"{world_size} is no multiple of {others}, the product of the other degrees"
        else:
            sum_up = f"that makes {degrees.world_size}, not {world_size}"
        if world_size % others:
            remedy = f"choose degrees whose product divides {world_size}, or start a multiple of {others} processes"
        else:
            remedy = f"set {shard} to {world_size // others}, or -1"
        raise ValueError(
            f"parallelism: {product} must make the {world_size} processes of the run (NGPU, times the nodes): "
            f"{sum_up}; {remedy}"
        )
    return degrees


def data_parallel_place(rank: int, degrees: Degrees) -> DataParallel:
    """The data-parallel place of a global rank.

    Ranks that differ only in their place along pp, cp or tp work on the same rows.
    """
    return DataParallel(degrees.place(rank).data_parallel_rank(degrees), degrees.dp)


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


class Mesh:
    """The device mesh of the run, by what works along it. The default process group must have started.

    Context-parallel ranks hold different tokens of the same rows and the same weights, so for parameters they are more
    data-parallel ranks: FSDP shards over dp_shard x cp.

    Attributes:
        degrees, place: the sizes, and this rank's coordinates.
        fsdp: what FSDP2 gets: ("fsdp",), or ("dp_replicate", "fsdp") for HSDP.
        pp, cp, tp: 1-D meshes.
    """

    def __init__(self, device_type: str, degrees: Degrees, rank: int) -> None:
        self.degrees = degrees
        self.place = degrees.place(rank)
        sharded = degrees.dp_shard * degrees.cp
        # fsdp and tp must be dimensions of one mesh: their sharded parameters are DTensors over both.
        root = init_device_mesh(
            device_type,
            (degrees.pp, degrees.dp_replicate, sharded, degrees.tp),
            mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
        )
        self.fsdp: DeviceMesh = root["fsdp"] if degrees.dp_replicate == 1 else root["dp_replicate", "fsdp"]
        self.pp: DeviceMesh = root["pp"]
        self.tp: DeviceMesh = root["tp"]
        self.cp: DeviceMesh = init_device_mesh(
            device_type,
            (degrees.pp * degrees.dp, degrees.cp, degrees.tp),
            mesh_dim_names=("outer", "cp", "tp"),
        )["cp"]
