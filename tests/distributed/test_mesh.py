import numpy as np
import pytest
import torch

from torchtitan_lite.distributed.mesh import DataParallel, World, data_parallel_place, world_from_environment


def test_a_process_without_a_launcher_stands_alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert world_from_environment() == World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


def test_a_launched_process_knows_its_place(monkeypatch):
    for name, value in {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert world_from_environment() == World(9, 1, 16, torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (dict(dp_shard=8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (dict(dp_shard=4, tp=2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (dict(dp_shard=2, cp=2, tp=2), [0, 0, 0, 0, 1, 1, 1, 1]),
        (dict(pp=2, dp_shard=4), [0, 1, 2, 3, 0, 1, 2, 3]),
        (dict(pp=2, dp_replicate=2, dp_shard=2), [0, 1, 2, 3, 0, 1, 2, 3]),
        (dict(pp=2, dp_shard=2, cp=2), [0, 0, 1, 1, 0, 0, 1, 1]),
        (dict(dp_replicate=2, dp_shard=2, tp=2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (dict(pp=2, cp=2, tp=2), [0] * 8),
    ],
)
def test_ranks_that_share_rows(degrees, expected):
    places = [data_parallel_place(rank, **degrees) for rank in range(8)]
    degree = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    assert places == [DataParallel(rank, degree) for rank in expected]
    # The same from the mesh as torch lays it out: a rank's coordinates along the two dimensions that split the data.
    sizes = [degrees.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    mesh = np.arange(8).reshape(sizes)
    for rank in range(8):
        _, replicate, shard, _, _ = np.argwhere(mesh == rank)[0]
        assert places[rank].rank == replicate * sizes[2] + shard
