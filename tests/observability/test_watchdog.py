"""The watchdog alone, with limits of fractions of a second. test_two_hosts.py has it in whole runs."""

import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lite.config.schema import Comm
from torchtitan_lite.distributed.failures import PeerFailure
from torchtitan_lite.distributed.mesh import World, init_distributed, world_from_environment
from torchtitan_lite.distributed.timeouts import set_collective_timeouts
from torchtitan_lite.observability.logging import logger
from torchtitan_lite.observability.watchdog import StepWatchdog

WORLD = World(rank=3, local_rank=1, size=8, device=torch.device("cpu"))
# Wide apart, for a machine may be busy with other tests.
COMM = Comm(init_timeout_seconds=1.5, train_timeout_seconds=0.5, data_timeout_seconds=100)


@pytest.fixture
def reports(monkeypatch, caplog):
    """Call it for the errors that the package has logged."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.ERROR, logger=logger.name)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def stuck_for(seconds):
    time.sleep(seconds)


def test_a_rank_that_stands_still_says_where_once(reports):
    with StepWatchdog(COMM, WORLD) as watchdog:
        watchdog.phase("building")
        stuck_for(0.8)
        assert reports() == []
        stuck_for(2)
    (report,) = reports()
    first, *lines = report.splitlines()
    assert first.startswith("Rank 3 has been in building for 1 s")
    assert "(comm.init_timeout_seconds=1.5)" in first
    assert lines[-2].endswith("stuck_for: time.sleep(seconds)")
    assert "test_watchdog.py" in lines[-3] and "stuck_for(2)" in lines[-3]
    assert "the one they wait for" in lines[-1]


def test_the_first_step_has_a_limit_of_its_own(reports):
    with StepWatchdog(COMM, WORLD) as watchdog:
        for step in (11, 12):  # of a run that was resumed
            watchdog.step(step)
            stuck_for(0.8)
        watchdog.phase("saving after step 12")
        stuck_for(0.8)
        watchdog.phase("reading", "data_timeout_seconds")
        stuck_for(0.8)
    twelve, saving = reports()
    assert "in step 12 for" in twelve and "comm.train_timeout_seconds=0.5" in twelve
    assert "in saving after step 12 for" in saving


def test_a_rank_that_moves_says_nothing(reports):
    with StepWatchdog(COMM, WORLD) as watchdog:
        for step in range(1, 20):
            watchdog.step(step)
            stuck_for(0.05)
    stuck_for(1)  # nor when all is over
    assert reports() == []


def test_nothing_is_expected_before_the_first_phase(reports):
    with StepWatchdog(COMM, WORLD):
        stuck_for(2)
    assert reports() == []


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation"
NCCL = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 3001 ms"
GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:58506"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        dist.DistBackendError(NCCL),
        dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"),
        CheckpointException("save", {1: (RuntimeError(GLOO), None)}),
    ],
)
def test_time_outs_name_rank_step_and_setting(error):
    watchdog = StepWatchdog(Comm(train_timeout_seconds=7), WORLD)
    with pytest.raises(TimeoutError) as caught, watchdog:
        watchdog.step(1)
        watchdog.step(2)
        raise error
    message = str(caught.value)
    assert message.startswith("Rank 3: a collective ran into its time limit in step 2, of 7 s")
    assert "comm.train_timeout_seconds=7" in message
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GONE),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        CheckpointException("save", {1: (RuntimeError(GONE), None)}),
    ],
)
def test_a_peer_that_has_gone(error):
    watchdog = StepWatchdog(Comm(), WORLD)
    message = "Rank 3: another rank has ended, and this one with it, in building"
    with pytest.raises(PeerFailure, match=message), watchdog:
        watchdog.phase("building")
        raise error


@pytest.mark.parametrize("error", [ValueError(GLOO), RuntimeError("shapes differ"), KeyboardInterrupt(), SystemExit(2)])
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, StepWatchdog(Comm(), WORLD):
        raise error
    assert caught.value is error


def late_rank(limit: int) -> str | None:
    """Rank 0's complaint about rank 1, which comes two seconds after the limit; the group has been made with 60 s."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    half = dist.new_group([0, 1])
    slow = dist.new_group([0, 1])
    set_collective_timeouts(limit, keep=[slow])
    watchdog = StepWatchdog(Comm(train_timeout_seconds=limit), world)
    if world.rank == 1:
        time.sleep(limit + 2)
        dist.all_reduce(torch.ones(1), group=slow)
        return None
    try:
        with watchdog:
            watchdog.step(1)
            watchdog.step(2)
            began = time.monotonic()
            dist.all_reduce(torch.ones(1), group=half)
    except TimeoutError as error:
        assert time.monotonic() - began < limit + 1.5
        total = torch.ones(1)
        dist.all_reduce(total, group=slow)  # beyond the new limit, within its own
        return f"{error} {total.item()}"


def test_new_limits_hold_for_every_group_but_those_kept(rank_pool):
    complaint, nothing = rank_pool.run(2, late_rank, 1)
    assert complaint.startswith("Rank 0: a collective ran into its time limit in step 2, of 1 s")
    assert "Timed out waiting 1000ms" in complaint and complaint.endswith(" 2.0")
    assert nothing is None
