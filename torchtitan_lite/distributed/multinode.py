"""The launcher's part in a run on several nodes: torchrun, and an end with a message when another node fails."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.run import main as torchrun

from torchtitan_lite.distributed.failures import FOLLOWED, FailureBoard, leave
from torchtitan_lite.distributed.nodes import Nodes, interface_of, local_address
from torchtitan_lite.observability.logging import logger

_POLL_SECONDS = 2
# For processes to notice by themselves that others have ended.
_GRACE_SECONDS = 10
# For others to read the board, which ends with the launcher that serves it. More than two of their polls.
_LINGER_SECONDS = 5


def run_with_others(nodes: Nodes, command: list[str]) -> NoReturn:
    """Run ``command`` on this node while the others of ``nodes`` do the same, and exit: with 0 when all processes have
    ended well, otherwise saying why, on whichever node the failure was.

    Args:
        command: torchrun's arguments for this node: processes, the script, and the script's own.

    Raises:
        ConfigError: the meeting place cannot be resolved or reached.
    """
    address, is_here = local_address(nodes)
    # gloo would look up this node's own name, and might find 127.0.1.1 or nothing.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    # So would torchrun, to find out whether it is to serve the store. Where nodes are processes of one machine, that
    # depends on who comes first, and it works by itself.
    serves = "" if ipaddress.ip_address(address).is_loopback else f",is_host={int(is_here and _is_free(nodes.port))}"

    name = socket.gethostname()
    logger.info(f"{name} ({address}) meets the other {nodes.count - 1} of {nodes.count} nodes at {nodes.endpoint}")
    if not is_here:
        _wait_for_store(nodes)
    board = FailureBoard(nodes)
    follower = _Follower(board)

    def end(message: str, code: int = 1, post: bool = True) -> NoReturn:
        follower.over.set()
        for signalled in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signalled, signal.SIG_DFL)  # torchrun would raise here, too
        print(message, file=sys.stderr)
        if post:
            board.post(message)
        if is_here:
            time.sleep(_LINGER_SECONDS)
        leave(code)

    def end_with_the_run(otherwise: str, post: bool = True) -> NoReturn:
        end(f"{name} ends with the run. {follower.failure or otherwise}", post=post)

    follower.start()
    try:
        torchrun(
            [
                f"--nnodes={nodes.count}",
                "--rdzv_backend=c10d",
                f"--rdzv_endpoint={nodes.endpoint}",
                f"--rdzv_id={nodes.id}",
                f"--rdzv_conf=join_timeout={nodes.timeout}{serves}",
                f"--local_addr={address}",
                *command,
            ]
        )
    except ChildFailedError as error:
        if all(failure.exitcode == FOLLOWED for failure in error.failures.values()):
            end_with_the_run("Another node has ended, and its output tells why.")
        end(f"{name}: {first_failure(error)}")
    except SignalException as error:
        if follower.has_signalled:
            end_with_the_run("Another node has ended.")
        end(f"{name} was told to end by {signal.Signals(error.sigval).name}.", 128 + error.sigval)
    except RendezvousTimeoutError:
        end(
            f"{name}: within RDZV_TIMEOUT={nodes.timeout} s not all of the NNODES={nodes.count} nodes came to "
            f"RDZV_ENDPOINT={nodes.endpoint} under RDZV_ID={nodes.id}. Start the others, with the same values."
        )
    except RendezvousConnectionError:
        end_with_the_run(
            f"The launcher at RDZV_ENDPOINT={nodes.endpoint} has ended, or cannot be reached; its output tells why.",
            post=False,
        )
    # Not by returning: the follower may be connecting, and Python could not end around it.
    leave(0)


def first_failure(error: ChildFailedError) -> str:
    """Which process ended first, and how. One that only followed another is named if there is no other."""
    rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode == FOLLOWED, item[1].timestamp))
    by_signal = f" ({signal.Signals(-failure.exitcode).name})" if failure.exitcode < 0 else ""
    return f"Rank {rank} ended with exit code {failure.exitcode}{by_signal}."


class _Follower(threading.Thread):
    """Ends this node's part when another node has failed and the processes here do not notice by themselves, as those
    may not that wait for a GPU which waits for another."""

    def __init__(self, board: FailureBoard) -> None:
        super().__init__(name="follower", daemon=True)
        self._board = board
        self.failure: str | None = None
        self.has_signalled = False
        self.over = threading.Event()  # this node ends anyway

    def run(self) -> None:
        while self.failure is None:
            if self.over.wait(_POLL_SECONDS):
                return
            with suppress(ConnectionError):  # not there yet; when it is no more, torchrun itself ends
                self.failure = self._board.read()
        if self.over.wait(_GRACE_SECONDS):
            return
        self.has_signalled = True
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun passes it on, and half a minute later kills what is left


def _wait_for_store(nodes: Nodes) -> None:
    """Wait until the launcher at the meeting place listens; torchrun itself would give up after a minute."""
    began = reported = time.monotonic()
    while True:
        try:
            socket.create_connection((nodes.host, nodes.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() - began >= nodes.timeout:
                sys.exit(
                    f"{socket.gethostname()}: nobody listens at RDZV_ENDPOINT={nodes.endpoint} after "
                    f"RDZV_TIMEOUT={nodes.timeout} s ({error}). Start the run on that node too, and see that its "
                    f"firewall lets port {nodes.port} through."
                )
        if time.monotonic() - reported >= 60:
            reported = time.monotonic()
            logger.warning(f"Nobody listens at RDZV_ENDPOINT={nodes.endpoint} yet")
        time.sleep(1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
