import numpy as np
import pytest
import torch

from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.distributed.mesh import (
    DataParallel,
    Degrees,
    Mesh,
    Place,
    World,
    data_parallel_place,
    init_distributed,
    resolve_degrees,
    world_from_environment,
)


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


def settings(**degrees: int) -> Parallelism:
    keys = {
        "pp": "pipeline_parallel_degree",
        "dp_replicate": "data_parallel_replicate_degree",
        "dp_shard": "data_parallel_shard_degree",
        "cp": "context_parallel_degree",
        "tp": "tensor_parallel_degree",
    }
    return Parallelism(**{keys[name]: degree for name, degree in degrees.items()})


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ({}, 1, Degrees()),
        ({}, 8, Degrees(dp_shard=8)),
        ({"tp": 2}, 8, Degrees(dp_shard=4, tp=2)),
        ({"dp_shard": 1, "dp_replicate": 8}, 8, Degrees(dp_replicate=8)),
        ({"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 4}, 64, Degrees(2, 2, 2, 2, 4)),
        ({"pp": 2, "cp": 2, "tp": 2}, 8, Degrees(pp=2, cp=2, tp=2)),
    ],
)
def test_degrees(given, world_size, expected):
    assert resolve_degrees(settings(**given), world_size) == expected
    assert expected.world_size == world_size


@pytest.mark.parametrize(
    ("given", "world_size", "words"),
    [
        (
            {"dp_shard": 3},
            4,
            [
                "pp 1 x dp_replicate 1 x dp_shard 3 x cp 1 x tp 1",
                "the 4 processes",
                "that makes 3, not 4",
                "to 4, or -1",
            ],
        ),
        (
            {"tp": 3, "pp": 2},
            8,
            ["pp 2 x dp_replicate 1 x dp_shard the rest x cp 1 x tp 3", "8 is no multiple of 6", "product divides 8"],
        ),
        ({"dp_shard": 4, "tp": 4}, 8, ["that makes 16, not 8", "data_parallel_shard_degree to 2, or -1"]),
        ({"dp_shard": 0}, 8, ["data_parallel_shard_degree=0: must be at least 1, or -1"]),
        ({"cp": -1}, 8, ["context_parallel_degree=-1: must be at least 1"]),
    ],
)
def test_degrees_that_do_not_fit(given, world_size, words):
    with pytest.raises(ValueError) as caught:
        resolve_degrees(settings(**given), world_size)
    assert all(word in str(caught.value) for word in words), str(caught.value)


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
    degrees = Degrees(**degrees)
    places = [data_parallel_place(rank, degrees) for rank in range(8)]
    assert places == [DataParallel(rank, degrees.dp) for rank in expected]
    # The same from an array laid out as torch lays out a mesh.
    mesh = np.arange(8).reshape([degrees.pp, degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp])
    for rank in range(8):
        coordinates = np.argwhere(mesh == rank)[0]
        assert degrees.place(rank) == Place(*coordinates)
        assert places[rank].rank == coordinates[1] * degrees.dp_shard + coordinates[2]


def meshes(degrees: Degrees) -> dict[str, list[int]]:
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = Mesh("cpu", degrees, world.rank)
    ranks = {name: getattr(mesh, name).mesh.tolist() for name in ("pp", "fsdp", "cp", "tp")}
    assert mesh.place == degrees.place(world.rank)
    return {**ranks, "names": list(mesh.fsdp.mesh_dim_names)}


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [  # of rank 3
        (Degrees(dp_shard=4), {"pp": [3], "fsdp": [0, 1, 2, 3], "cp": [3], "tp": [3], "names": ["fsdp"]}),
        (Degrees(dp_shard=2, cp=2), {"pp": [3], "fsdp": [0, 1, 2, 3], "cp": [2, 3], "tp": [3], "names": ["fsdp"]}),
        (Degrees(pp=2, tp=2), {"pp": [1, 3], "fsdp": [3], "cp": [3], "tp": [2, 3], "names": ["fsdp"]}),
        (Degrees(cp=2, tp=2), {"pp": [3], "fsdp": [1, 3], "cp": [1, 3], "tp": [2, 3], "names": ["fsdp"]}),
        (
            Degrees(dp_replicate=2, dp_shard=2),
            {"pp": [3], "fsdp": [[0, 1], [2, 3]], "cp": [3], "tp": [3], "names": ["dp_replicate", "fsdp"]},
        ),
    ],
)
def test_who_works_together(rank_pool, degrees, expected):
    assert rank_pool.run(4, meshes, degrees)[3] == expected
