"""How fast the ranks of a group exchange, on nodes of eight GPUs with links of 450 GB/s and a network of 50 each."""

import pytest

from torchtitan_lite.distributed.mesh import Degrees
from torchtitan_lite.estimate.hardware import GPUS, bandwidth, group_shape

DEGREES = Degrees(pp=4, dp_replicate=2, dp_shard=4, cp=2, tp=4)


@pytest.mark.parametrize(
    ("dimension", "shape", "gbs"),
    [
        ("tp", (4, 1), 450),  # ranks 0 to 3
        ("cp", (2, 4), 450),  # 0 and 4
        ("fsdp", (8, 4), 2 * 50),  # 0, 4, ..., 28: two in a node
        ("dp_replicate", (2, 32), 50),
        ("pp", (4, 64), 50),
    ],
)
def test_a_mesh_of_256(dimension, shape, gbs):
    assert group_shape(DEGREES, dimension) == shape
    assert bandwidth(GPUS["H100"], DEGREES, dimension, per_node=8) == gbs * 1e9


def test_the_groups_are_those_of_the_mesh():
    """Ranks that differ in one coordinate alone, by Degrees.place."""
    for dimension, coordinates in {"tp": {"tp"}, "fsdp": {"dp_shard", "cp"}, "dp_replicate": {"dp_replicate"}}.items():
        size, stride = group_shape(DEGREES, dimension)
        places = [DEGREES.place(i * stride) for i in range(size)]
        assert len(set(places)) == size
        for name in DEGREES.place(0)._fields:
            assert name in coordinates or {getattr(place, name) for place in places} == {0}


def test_whole_nodes_use_all_of_their_network_but_no_more_than_their_links():
    assert bandwidth(GPUS["H100"], Degrees(dp_shard=64), "fsdp", per_node=8) == 8 * 50e9
    assert bandwidth(GPUS["L40S"], Degrees(dp_shard=64), "fsdp", per_node=8) == 32e9
