"""Time limits of process groups, those of a mesh among them."""

from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.distributed.timeouts import set_collective_timeouts


def limits() -> list[dict[str, timedelta]]:
    """Of every group of this rank, at first and after each change."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = Mesh("cpu", Degrees(dp_shard=2, tp=2), world.rank)
    disks = dist.new_group(timeout=timedelta(seconds=100))
    groups = {"all": dist.group.WORLD, "fsdp": mesh.fsdp.get_group(), "tp": mesh.tp.get_group(), "disks": disks}

    def now() -> dict[str, timedelta]:
        cpu = torch.device("cpu")
        return {name: group._get_backend(cpu).options._timeout.total_seconds() for name, group in groups.items()}

    seen = [now()]
    set_collective_timeouts(60)
    seen.append(now())
    set_collective_timeouts(7, keep=[disks])
    return [*seen, now()]


def test_every_group_gets_the_limit(rank_pool):
    for at_first, later, last in rank_pool.run(4, limits):
        assert at_first["all"] == 60 and at_first["tp"] == 1800  # if torch had it otherwise, the call were not needed
        assert set(later.values()) == {60}
        assert last == {"all": 7, "fsdp": 7, "tp": 7, "disks": 60}
