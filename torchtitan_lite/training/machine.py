"""What a run asks of the machine: a folder to itself, and kernels that give the same again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from torchtitan_lite.config.load import ConfigError


@contextmanager
def sole_run_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which goes with the process however it ends. Raises ConfigError if another run has it."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise ConfigError([f"job.dump_folder={folder}: another run is writing there; give each run its own"]) from None


def set_determinism(deterministic: bool) -> None:
    """Restrict torch to kernels that give the same result each time, if asked to."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
