"""How a rank that fails takes the others with it at once, instead of leaving them in a collective until its time-out.

On one node torchrun sees to that. Between nodes nobody does: gloo's sockets break when a process ends, but a GPU that
waits in NCCL may notice nothing. So whoever fails says so on a board that all nodes read.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lite.distributed.nodes import Nodes, nodes_of_run

_TIMEOUT = timedelta(seconds=5)

# Exit code of a process that ended because another had: not the one to look at first.
FOLLOWED = 3

_TIMED_OUT = (
    "Timed out waiting",  # gloo
    "collective operation timeout",  # NCCL
    "wait timeout after",  # a store
    "Timed out after",
)
_PEER_GONE = (
    "Connection closed by peer",  # gloo
    "Connection reset by peer",
    "Broken pipe",
    "Connection was likely closed",  # a store
    "ncclRemoteError",
    "remote process exited",  # NCCL
)


class PeerFailure(RuntimeError):
    """Another rank has ended, and this one cannot go on."""


class FailureBoard:
    """One message for all nodes, kept in the store where they met: the first failure of the run.

    Args:
        nodes: where the store is.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._key = f"torchtitan_lite.failure.{nodes.id}"
        self._store: dist.TCPStore | None = None

    @classmethod
    def of_run(cls) -> FailureBoard | None:
        """The board of the run that the environment tells of; a run on one node needs none."""
        nodes = nodes_of_run() if "TORCHELASTIC_RUN_ID" in os.environ else None
        return None if nodes is None else cls(nodes)

    def post(self, message: str) -> None:
        """Say that this process has failed, unless another has said so before. Never raises: there is worse already."""
        with suppress(Exception):
            self._connected().compare_set(self._key, "", message)

    def read(self) -> str | None:
        """The message, if there is one.

        Raises:
            ConnectionError: the launcher that serves the store has ended, or cannot be reached.
        """
        try:
            store = self._connected()
            return store.get(self._key).decode() if store.check([self._key]) else None
        except Exception as error:
            self._store = None
            raise ConnectionError(f"The launcher at RDZV_ENDPOINT={self._nodes.endpoint} does not answer") from error

    def _connected(self) -> dist.TCPStore:
        # A connection of its own: one that is shared is locked by whoever waits in it, which may be for minutes.
        if self._store is None:
            self._store = dist.TCPStore(self._nodes.host, self._nodes.port, is_master=False, timeout=_TIMEOUT)
        return self._store


def leave(code: int) -> NoReturn:
    """End this process, one of several, now.

    Its sockets close with it, and that is what its peers notice: aborting a gloo group closes none. An orderly exit
    would first join threads, such as one that waits for those same peers to finish a checkpoint.
    """
    for child in multiprocessing.active_children():  # the loader's workers, which would look for their parent in 5 s
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_timeout(error: BaseException) -> bool:
    """Whether a collective, or a wait for another rank's key in a store, ran into its time limit."""
    return _says(error, _TIMED_OUT)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective, or a store, failed because the process at the other end has ended."""
    return _says(error, _PEER_GONE)


def _says(error: BaseException, parts: tuple[str, ...]) -> bool:
    # DCP gathers what went wrong on each rank. What torch raises here are RuntimeErrors, DistError's family among them.
    causes = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return any(isinstance(cause, RuntimeError) and any(part in str(cause) for part in parts) for cause in causes)
