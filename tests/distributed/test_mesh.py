import torch

from torchtitan_lite.distributed.mesh import World, world_from_environment


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
