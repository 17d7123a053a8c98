"""What the rules look at."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.mesh import Degrees
from torchtitan_lite.models.llama3.args import ModelArgs


@dataclass(frozen=True)
class Run:
    """What the rules look at. ``args`` is None where the model's shape is itself at fault, ``degrees`` where they do
    not fit the number of processes."""

    config: Config
    world_size: int
    device_type: str
    args: ModelArgs | None
    degrees: Degrees | None
