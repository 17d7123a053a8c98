"""What a node finds out about itself and the others: its address, the shared folder, who has failed."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.distributed import nodes as nodes_module
from torchtitan_lite.distributed import shared_folder
from torchtitan_lite.distributed.failures import FailureBoard
from torchtitan_lite.distributed.mesh import init_distributed, world_from_environment
from torchtitan_lite.distributed.nodes import Nodes, interface_of, local_address, nodes_of_run
from torchtitan_lite.distributed.shared_folder import check_equal_nodes, check_shared_folder

VARIABLES = ("NNODES", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_TIMEOUT")


def set_environment(monkeypatch, **variables):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", [{}, {"NNODES": ""}, {"NNODES": "1", "RDZV_ENDPOINT": "node1:29400"}])
def test_one_node(monkeypatch, variables):
    set_environment(monkeypatch, **variables)
    assert nodes_of_run() is None


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [("node1:29400", "node1", 29400), ("10.0.0.5:1", "10.0.0.5", 1), ("[fd00::2]:65535", "fd00::2", 65535)],
)
def test_several_nodes(monkeypatch, endpoint, host, port):
    set_environment(monkeypatch, NNODES="16", RDZV_ENDPOINT=endpoint)
    assert nodes_of_run() == Nodes(16, host, port, "torchtitan_lite", 600)
    assert nodes_of_run().endpoint == endpoint
    monkeypatch.setenv("RDZV_ID", "mine")
    monkeypatch.setenv("RDZV_TIMEOUT", "60")
    assert nodes_of_run() == Nodes(16, host, port, "mine", 60)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"NNODES": "0", "RDZV_ENDPOINT": "a:1"}, "NNODES=0"),
        ({"NNODES": "-2", "RDZV_ENDPOINT": "a:1"}, "NNODES=-2"),
        ({"NNODES": "two", "RDZV_ENDPOINT": "a:1"}, "NNODES=two"),
        ({"NNODES": "1:4", "RDZV_ENDPOINT": "a:1"}, "NNODES=1:4: a range"),
        ({"NNODES": "2"}, "NNODES=2 without RDZV_ENDPOINT"),
        ({"RDZV_ENDPOINT": "a:1"}, "RDZV_ENDPOINT=a:1 without NNODES"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "node1"}, "RDZV_ENDPOINT=node1: must be HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "node1:"}, "HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": ":29400"}, "HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "node1:65536"}, "HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "no de:29400"}, "HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "a:1", "RDZV_TIMEOUT": "soon"}, "RDZV_TIMEOUT=soon"),
    ],
)
def test_wrong_values(monkeypatch, variables, named):
    set_environment(monkeypatch, **variables)
    with pytest.raises(ConfigError) as caught:
        nodes_of_run()
    (problem,) = caught.value.problems
    assert named in problem


def test_all_wrong_values_at_once(monkeypatch):
    set_environment(monkeypatch, NNODES="1:4", RDZV_ENDPOINT="node1", RDZV_TIMEOUT="0")
    with pytest.raises(ConfigError) as caught:
        nodes_of_run()
    assert [problem.partition("=")[0] for problem in caught.value.problems] == [
        "NNODES",
        "RDZV_ENDPOINT",
        "RDZV_TIMEOUT",
    ]


# --- its address -----------------------------------------------------------------------------------------------------


def meeting_at(host):
    return Nodes(2, host, 29400, "x", 1)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_nodes_that_are_processes_of_one_machine(host):
    assert local_address(meeting_at(host)) == ("127.0.0.1", True)


# A node with the address 10.0.0.5, whose own name stands for 127.0.1.1, as Debian sets it up.
ROUTES = {"127.0.1.1": "127.0.1.1", "10.0.0.5": "10.0.0.5", "10.0.0.9": "10.0.0.5", "192.0.2.1": "10.0.0.5"}
NAMES = {"me": "127.0.1.1", "other": "10.0.0.9", "10.0.0.5": "10.0.0.5"}


@pytest.mark.parametrize(
    ("host", "expected"),
    [("other", ("10.0.0.5", False)), ("10.0.0.5", ("10.0.0.5", True)), ("me", ("10.0.0.5", True))],
)
def test_the_address_is_one_that_others_can_reach(monkeypatch, host, expected):
    monkeypatch.setattr(nodes_module, "_route_to", lambda host, port: ROUTES[host])
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, type: [(0, 0, 0, "", (NAMES[host], port))])
    assert local_address(meeting_at(host)) == expected


def test_a_meeting_place_that_cannot_be_resolved(monkeypatch):
    def fail(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match=r"RDZV_ENDPOINT=nowhere:29400: .*Name or service not known"):
        local_address(meeting_at("nowhere"))


def test_interface_of_an_address():
    name = interface_of("127.0.0.1")
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]
    assert interface_of("203.0.113.7") is None


# --- who has failed --------------------------------------------------------------------------------------------------


def test_the_board_keeps_the_first_failure():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    place = Nodes(2, "127.0.0.1", server.port, "run", 5)
    ours, theirs = FailureBoard(place), FailureBoard(place)
    assert ours.read() is None
    theirs.post("rank 5 failed")
    ours.post("rank 0 followed")
    assert ours.read() == theirs.read() == "rank 5 failed"
    assert FailureBoard(Nodes(2, "127.0.0.1", server.port, "another run", 5)).read() is None


def test_a_board_that_is_gone(monkeypatch):
    monkeypatch.setattr("torchtitan_lite.distributed.failures._TIMEOUT", timedelta(seconds=0.5))
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        board = FailureBoard(Nodes(2, "127.0.0.1", port, "run", 5))
        board.post("whatever")  # there is worse already
        with pytest.raises(ConnectionError, match=f"RDZV_ENDPOINT=127.0.0.1:{port} does not answer"):
            board.read()


def test_a_run_on_one_node_has_no_board(monkeypatch):
    set_environment(monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert FailureBoard.of_run() is None
    set_environment(monkeypatch, NNODES="2", RDZV_ENDPOINT="localhost:1")
    assert FailureBoard.of_run() is not None


# --- what nodes must share -------------------------------------------------------------------------------------------


def checked(folders: list[Path], local_world_size: int) -> str | None:
    """What a rank that sees its own of ``folders`` under the one name is told."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    patience, shared_folder._PATIENCE_SECONDS = shared_folder._PATIENCE_SECONDS, 0.5
    try:
        check_shared_folder(folders[world.rank], "job.dump_folder")
    except ConfigError as error:
        return str(error)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        shared_folder._PATIENCE_SECONDS = patience


def test_a_folder_that_is_not_shared(rank_pool, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for told in rank_pool.run(2, checked, [here, there], 1):
        assert "job.dump_folder" in told and f"{there} on {socket.gethostname()}" in told
        assert f"rank 0 wrote to {here}" in told
    # Shared; or no matter, for all are on one node.
    assert rank_pool.run(2, checked, [here, here], 1) == [None, None]
    assert rank_pool.run(2, checked, [here, there], 2) == [None, None]
    assert list(here.iterdir()) == list(there.iterdir()) == []


@pytest.mark.parametrize(("local", "nodes", "world"), [(8, 2, 16), (1, 1, 1), (4, 1, 4)])
def test_equal_nodes(monkeypatch, local, nodes, world):
    for name, value in [("LOCAL_WORLD_SIZE", local), ("GROUP_WORLD_SIZE", nodes), ("WORLD_SIZE", world)]:
        monkeypatch.setenv(name, str(value))
    check_equal_nodes()
    monkeypatch.setenv("WORLD_SIZE", str(world + 1))
    with pytest.raises(ConfigError, match=f"NGPU={local} on .*{nodes} nodes have {world + 1} processes"):
        check_equal_nodes()
