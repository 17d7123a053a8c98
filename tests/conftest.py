"""Fixtures of more than one folder. This file also puts ``tests/`` on the path, for the helpers beside it."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from toy_run import write_documents

from torchtitan_lite.distributed.mesh import World, init_distributed
from torchtitan_lite.observability.logging import logger


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: begun last, a file of them would keep one worker busy when the others are done."""
    slow = ["integration", "training", "distributed", "estimate"]

    def order(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return slow.index(folder) if folder in slow else len(slow)

    items.sort(key=order)


@pytest.fixture(scope="session")
def rank_pool():
    """Runs functions on gloo ranks. One for all tests: what its ranks import is imported once."""
    return RankPool()


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A json file of short documents, and beside it the cache of their tokens."""
    return write_documents(tmp_path_factory.mktemp("documents") / "documents.jsonl")


@pytest.fixture
def cpu_only(monkeypatch):
    """The same run on every machine; leaves neither a process group nor determinism nor compiled code behind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


@pytest.fixture
def one_rank(cpu_only):
    """A process group of this process alone."""
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    init_distributed(world, timeout_seconds=60)
    return world


@pytest.fixture
def warned(monkeypatch, caplog) -> Callable[[], list[str]]:
    """Call it for the warnings that the package has logged in this test."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.WARNING, logger=logger.name)
    return lambda: [r.getMessage() for r in caplog.records if r.name == logger.name and r.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def quiet_logger():
    """What a test does to the package's logger is undone, or its lines would turn up in the output of later tests."""
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before
