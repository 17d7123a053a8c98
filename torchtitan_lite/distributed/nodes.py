"""The nodes of a run, as the environment tells of them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass

import psutil

from torchtitan_lite.config.load import ConfigError

# RFC 5737: an address outside, and nobody's.
_OUTSIDE = "192.0.2.1"


@dataclass(frozen=True)
class Nodes:
    """Several nodes, and where they meet: at a TCP store that the launcher on ``host`` serves.

    Attributes:
        id: name of the run, for several may meet at one place.
        timeout: seconds to wait for the other nodes.
    """

    count: int
    host: str
    port: int
    id: str
    timeout: int

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def nodes_of_run() -> Nodes | None:
    """What NNODES, RDZV_ENDPOINT, RDZV_ID and RDZV_TIMEOUT say; None for a run on this node alone.

    Raises:
        ConfigError: with all that is wrong.
    """
    given, endpoint, timeout = (os.environ.get(name) for name in ("NNODES", "RDZV_ENDPOINT", "RDZV_TIMEOUT"))
    if (given or "1") == "1" and not (endpoint and not given):
        return None
    problems = []
    if not given:
        problems.append(
            f"RDZV_ENDPOINT={endpoint} without NNODES: each node would train by itself; set NNODES to the number of "
            "nodes, or to 1"
        )
    elif ":" in given:
        problems.append(
            f"NNODES={given}: a range cannot serve, for the number of processes decides how the work is split; give "
            "one number. A run can be resumed on another number of nodes"
        )
    elif not _is_count(given):
        problems.append(f"NNODES={given}: must be a whole number from 1 on")
    host, _, port = (endpoint or "").rpartition(":")
    if host.startswith("[") and host.endswith("]"):  # as IPv6 addresses are written
        host = host[1:-1]
    if not endpoint:
        problems.append(
            f"NNODES={given} without RDZV_ENDPOINT: the nodes need a place to meet; give HOST:PORT, the name or "
            "address of one of them and a free port there, such as node1:29400, the same on every node"
        )
    elif not (re.fullmatch(r"[\w.:-]+", host) and _is_count(port) and int(port) < 2**16):
        problems.append(f"RDZV_ENDPOINT={endpoint}: must be HOST:PORT, the port from 1 to 65535, such as node1:29400")
    if timeout and not _is_count(timeout):
        problems.append(f"RDZV_TIMEOUT={timeout}: must be a whole number of seconds from 1 on")
    if problems:
        raise ConfigError(problems)
    return Nodes(int(given), host, int(port), os.environ.get("RDZV_ID") or "torchtitan_lite", int(timeout or 600))


def local_address(nodes: Nodes) -> tuple[str, bool]:
    """An address of this node that the others can reach, and whether the meeting place is this node.

    It is the one that the route to the meeting place leaves from. This node's own name is not asked: not every node can
    resolve its own, and to some it means 127.0.1.1.

    Raises:
        ConfigError: this node cannot resolve the name of the meeting place, or has no route to it.
    """
    try:
        place = socket.getaddrinfo(nodes.host, nodes.port, type=socket.SOCK_DGRAM)[0][4]
        address = _route_to(*place[:2])
    except OSError as error:
        raise ConfigError(
            [
                f"RDZV_ENDPOINT={nodes.endpoint}: {socket.gethostname()} cannot resolve {nodes.host} or has no route "
                f"to it ({error.strerror}); give an address that every node can reach"
            ]
        ) from None
    is_here = address == place[0]
    if is_here and ipaddress.ip_address(address).is_loopback and nodes.host not in ("localhost", address):
        try:  # the name means the loopback device here, and something else to the others
            address = _route_to(_OUTSIDE, nodes.port)
        except OSError:
            address = nodes.host
    return address, is_here


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


def _route_to(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # of a datagram socket: sends nothing
        return probe.getsockname()[0]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0
