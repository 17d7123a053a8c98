"""GPUs and their links, in published figures, and how fast the ranks of a process group exchange over them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from torchtitan_lite.distributed.mesh import Degrees


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in the machine its vendor sells it in.

    Attributes:
        device_name: as torch reports it, by which its peak is known.
        memory_gb: as sold, in 10^9 bytes. The device has somewhat more.
        node_gbs: GB/s that a GPU sends to the others of its node.
        network_gbs: GB/s that a GPU's share of the network sends to other nodes.
        per_node: GPUs of a node.
    """

    device_name: str
    memory_gb: float
    node_gbs: float
    network_gbs: float
    per_node: int = 8


# NVIDIA's data sheets. NVLink is given there for both directions together: half of it counts here. The network is that
# of the DGX machine: A100 8 x 200 Gbit/s, H100, H200 and B200 8 x 400 Gbit/s, GB200 NVL72 400 Gbit/s a GPU. L40S: PCIe
# 4.0 x16, and 200 Gbit/s for two GPUs.
GPUS = {
    "A100-40GB": Gpu("NVIDIA A100-SXM4-40GB", 40, 300, 25),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 80, 300, 25),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 80, 450, 50),
    "H200": Gpu("NVIDIA H200", 141, 450, 50),
    "B200": Gpu("NVIDIA B200", 180, 900, 50),
    "GB200": Gpu("NVIDIA GB200", 186, 900, 50, per_node=72),
    "L40S": Gpu("NVIDIA L40S", 48, 32, 12.5),
}


def bandwidth(gpu: Gpu, degrees: Degrees, dimension: str, per_node: int) -> float:
    """Bytes a second that each rank of a group along a dimension of the mesh sends while all of them do.

    In a node that is its link to the others. A group over several nodes goes at the pace of the network, of which it
    has the shares of all its ranks in a node.

    dimension: a field of :class:`Degrees`, or "fsdp" for dp_shard x cp.
    """
    size, stride = group_shape(degrees, dimension)
    in_node = sum(1 for i in range(size) if i * stride < per_node)
    gbs = gpu.node_gbs if in_node == size else min(gpu.node_gbs, gpu.network_gbs * in_node)
    return gbs * 1e9


def group_shape(degrees: Degrees, dimension: str) -> tuple[int, int]:
    """Ranks of a group along a dimension, and the distance of neighbours in global ranks."""
    sizes = asdict(degrees)  # outermost first
    names = list(sizes)
    inner = names[names.index("cp" if dimension == "fsdp" else dimension) + 1 :]
    size = degrees.dp_shard * degrees.cp if dimension == "fsdp" else sizes[dimension]
    return size, math.prod(sizes[name] for name in inner)
