"""Whether the nodes of a run see the same files and have as many processes each."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.config.load import ConfigError

_PATIENCE_SECONDS = 10  # of a network file system that shows new files late


def check_shared_folder(folder: Path, setting: str) -> None:
    """See that ``folder``, which rank 0 has made, is the same one on all nodes. All ranks call it together.

    Rank 0 leaves a file there under a name that nobody has asked for before, so that no cache can answer.

    Raises:
        ConfigError: on every rank, with the nodes that do not see the file.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) == dist.get_world_size():
        return
    name = [f".shared-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(name)
    token = folder / name[0]
    if dist.get_rank() == 0:
        token.touch()
    dist.barrier()
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (_appears(token), socket.gethostname(), str(folder.absolute())))
    if dist.get_rank() == 0:
        token.unlink()
    blind = sorted({f"{path} on {host}" for appeared, host, path in seen if not appeared})
    if blind:
        raise ConfigError(
            [
                f"{setting}={folder}: not the same folder on all nodes, and checkpoints need one; what rank 0 wrote to "
                f"{seen[0][2]} on {seen[0][1]} does not show in {', '.join(blind)}. Give an absolute path on a file "
                "system that all nodes share"
            ]
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def check_equal_nodes() -> None:
    """See that every node runs as many processes as this one.

    Raises:
        ConfigError: they differ.
    """
    local, nodes, world = (int(os.environ.get(n, 1)) for n in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE"))
    if local * nodes != world:
        raise ConfigError(
            [
                f"NGPU={local} on {socket.gethostname()}, but the {nodes} nodes have {world} processes together: give "
                "every node the same NGPU"
            ]
        )
