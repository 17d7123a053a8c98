"""Two launchers on this machine stand for two nodes: they train as one would, and neither outlives the other."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs import REPO, TINY, command, environment, kill_tree, metrics, write_documents

from torchtitan_lite.config.load import load_config

# One process waits for something that never comes, as for a GPU; the other is killed by the system.
SCRIPT = """
import os, signal, time
if os.environ["RANK"] == "1":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""
LAUNCHER = """
import sys
from torchtitan_lite.distributed import multinode
from torchtitan_lite.distributed.nodes import nodes_of_run
multinode._POLL_SECONDS = 0.5
multinode._GRACE_SECONDS = 1
multinode.run_with_others(nodes_of_run(), ["--nproc_per_node=1", sys.argv[1]])
"""


class Hosts:
    """Two of a command, told of each other."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = {"NNODES": "2", "RDZV_ENDPOINT": f"localhost:{port}", "PYTHONPATH": str(REPO)}
        # Until what does not heed SIGTERM is killed.
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
        self.logs = [folder / "host0.log", folder / "host1.log"]
        self.processes = []
        for log in self.logs:
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(words, env=environment(1, **variables), stdout=file, stderr=subprocess.STDOUT)
                )

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                kill_tree(process)

    def end(self, timeout: float = 600) -> list[int]:
        """Wait for both; their exit codes."""
        return [process.wait(timeout) for process in self.processes]

    def said(self) -> list[str]:
        return [log.read_text() for log in self.logs]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return (*TINY, f"--training.dataset_path={write_documents(tmp_path_factory.mktemp('data') / 'd.jsonl', 300)}")


def trained(argv: list[str]) -> None:
    from torchtitan_lite.training.trainer import Trainer

    Trainer(load_config(argv)).train()


def test_two_hosts_train_as_one(settings, tmp_path, rank_pool):
    settings = (*settings, "--training.steps=2", "--training.local_batch_size=2")
    with Hosts(tmp_path, command(*settings, f"--job.dump_folder={tmp_path / 'two'}")) as hosts:
        assert hosts.end() == [0, 0], hosts.said()
    # The log is on one of them, whichever was given rank 0.
    assert sorted("Done: 2 steps" in said for said in hosts.said()) == [False, True]
    file = REPO / "train_configs" / "debug_model.toml"
    rank_pool.run(2, trained, [f"--job.config_file={file}", *settings, f"--job.dump_folder={tmp_path / 'one'}"])
    for name in ("loss", "grad_norm", "tokens_seen"):
        expected = [m[name] for m in metrics(tmp_path / "one")]
        assert [m[name] for m in metrics(tmp_path / "two")] == pytest.approx(expected, rel=1e-6)


def test_a_rank_that_stands_still_ends_both_hosts(settings, tmp_path):
    settings = (*settings, "--training.steps=100000", "--comm.train_timeout_seconds=6")
    with Hosts(tmp_path, command(*settings, f"--job.dump_folder={tmp_path}")) as hosts:
        deadline = time.monotonic() + 600
        while not ((tmp_path / "metrics.jsonl").exists() and len(metrics(tmp_path)) > 2):
            assert time.monotonic() < deadline and None in [p.poll() for p in hosts.processes], hosts.said()
            time.sleep(0.1)
        (worker,) = (
            child
            for child in psutil.Process(hosts.processes[1].pid).children(recursive=True)
            if str(REPO / "train.py") in child.cmdline() and child.ppid() == hosts.processes[1].pid
        )
        rank = worker.environ()["RANK"]
        worker.send_signal(signal.SIGSTOP)
        codes = hosts.end()
    other, stopped = hosts.said()
    assert codes == [1, 1]
    message = f"Rank {1 - int(rank)}: a collective ran into its time limit in step "
    assert message in other and "of 6 s (comm.train_timeout_seconds=6)" in other
    assert f"ERROR: Rank {1 - int(rank)} has been in step " in other and "trainer.py" in other  # just before
    assert f"ends with the run. Rank {1 - int(rank)} on {socket.gethostname()} failed in step " in stopped


def test_a_process_that_is_killed_ends_both_hosts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Hosts(tmp_path, [sys.executable, "-c", LAUNCHER, str(script)]) as hosts:
        assert hosts.end() == [1, 1], hosts.said()
    ended = f"{socket.gethostname()}: Rank 1 ended with exit code -9 (SIGKILL)."
    waiting, killed = sorted(hosts.said(), key=lambda said: said.rstrip().endswith(ended))
    assert killed.splitlines()[-1] == ended
    assert f"ends with the run. {ended}" in waiting
