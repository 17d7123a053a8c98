"""scripts/multinode.slurm on a cluster of make-believe: srun runs a command for each node here, scontrol notes what it
is asked, nvidia-smi shows as many GPUs as the node is said to have, and run_train.sh only tells what it was given."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

REPO = Path(__file__).parents[2]

SRUN = r"""#!/usr/bin/env bash
echo "srun $*" >>"$FAKE_LOG"
while [[ "$1" == --* ]]; do shift; done
started=()
for node in ${SLURM_JOB_NODELIST//,/ }; do
    SLURMD_NODENAME="$node" "$@" &
    started+=($!)
done
trap 'kill -KILL "${started[@]}"; exit 137' TERM
worst=0
for one in "${started[@]}"; do
    wait "$one"; code=$?
    while kill -0 "$one" 2>/dev/null; do wait "$one"; code=$?; done
    ((code > worst)) && worst=$code
done
exit $worst
"""
SCONTROL = r"""#!/usr/bin/env bash
echo "scontrol $*" >>"$FAKE_LOG"
if [[ "$1 $2" == "show hostnames" ]]; then tr , '\n' <<<"$3"; fi
"""
NVIDIA_SMI = r"""#!/usr/bin/env bash
gpus="FAKE_GPUS_${SLURMD_NODENAME:-n1}"
for ((i = 0; i < ${!gpus:-$FAKE_GPUS}; i++)); do echo "GPU $i: a GPU"; done
"""
RUN_TRAIN = r"""#!/usr/bin/env bash
echo "$SLURMD_NODENAME: $NNODES x $NGPU at $RDZV_ENDPOINT as $RDZV_ID, $SRUN_CPUS_PER_TASK CPUs, $PYTHON, $*"
for ((i = 0; i < ${FAKE_RUN_TENTHS:-0}; i++)); do sleep 0.1; done
exit "${FAKE_RUN_STATUS:-0}"
"""


@pytest.fixture
def cluster(tmp_path):
    """``.start(*arguments, **variables)`` starts the job, as a copy elsewhere, as Slurm does it; ``.run`` runs it."""
    repo, tools, spool = tmp_path / "a repo", tmp_path / "tools", tmp_path / "spool"
    for folder in (repo, tools, spool):
        folder.mkdir()
    for name in ("torchtitan_lite", "scripts", "train_configs", "pyproject.toml"):
        (repo / name).symlink_to(REPO / name)
    programs = {"srun": SRUN, "scontrol": SCONTROL, "nvidia-smi": NVIDIA_SMI}
    for path, text in [(repo / "run_train.sh", RUN_TRAIN), *((tools / n, t) for n, t in programs.items())]:
        path.write_text(text)
        path.chmod(0o755)
    shutil.copy(REPO / "scripts" / "multinode.slurm", spool / "slurm_script")
    log = tmp_path / "log"
    log.touch()
    kept = {k: v for k, v in os.environ.items() if k not in ("NGPU", "NNODES", "RDZV_ENDPOINT", "CONFIG_FILE", "REPO")}
    environment = {
        **kept,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "FAKE_LOG": str(log),
        "FAKE_GPUS": "8",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "n1,n2,n3",
        "SLURM_SUBMIT_DIR": str(repo),
        "SLURM_CPUS_ON_NODE": "96",
    }

    def start(*arguments: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", spool / "slurm_script", *arguments],
            env={**environment, **variables},
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(*arguments: str, **variables: str) -> SimpleNamespace:
        process = start(*arguments, **variables)
        out, _ = process.communicate(timeout=120)
        return SimpleNamespace(status=process.returncode, out=out)

    return SimpleNamespace(repo=repo, start=start, run=run, log=lambda: log.read_text().splitlines())


def until(process: subprocess.Popen, *texts: str) -> None:
    """Read what the process prints until it has printed all of the texts."""
    printed = ""
    for line in process.stdout:
        printed += line
        if all(text in printed for text in texts):
            return
    raise AssertionError(printed)


RUNNING = [f"n{node}: 3 x 8" for node in (1, 2, 3)]


def test_one_launcher_a_node(cluster):
    run = cluster.run("--training.steps=3", "--job.description=two words", NCCL_SOCKET_IFNAME="ib0")
    assert run.status == 0, run.out
    for node in ("n1", "n2", "n3"):
        assert f"{node}: 8 GPUs\n" in run.out
        what = (
            f"3 x 8 at n1:22345 as 12345, 96 CPUs, {sys.executable}, --training.steps=3 --job.description=two words\n"
        )
        assert f"{node}: {what}" in run.out
    assert "NCCL_SOCKET_IFNAME=ib0\n" in run.out
    assert "without --checkpoint.enable" in run.out
    check, train = (line for line in cluster.log() if line.startswith("srun"))
    assert check.startswith("srun --nodes=3 --ntasks=3 --ntasks-per-node=1 bash -c")
    assert train.startswith("srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --kill-on-bad-exit=1")
    # Relative to the repository, and without what the check wrote.
    assert list((cluster.repo / "outputs").iterdir()) == []
    assert not any("requeue" in line for line in cluster.log())


def test_the_environment_overrides(cluster):
    run = cluster.run(NGPU="4", RDZV_ENDPOINT="n2:1", SLURM_CPUS_PER_TASK="12", SLURM_RESTART_COUNT="2")
    assert "n3: 3 x 4 at n2:1 as 12345, 12 CPUs" in run.out and "start 3" in run.out


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"FAKE_GPUS_n2": "7"}, "n2 shows 7 GPUs, and the first node 8"),
        ({"FAKE_GPUS": "0"}, "n1 shows no GPU"),
        ({"SLURM_SUBMIT_DIR": "/"}, "/ has no run_train.sh"),
        ({"SLURM_JOB_ID": ""}, "sbatch scripts/multinode.slurm"),
        ({"CONFIG_FILE": "none.toml"}, "CONFIG_FILE=none.toml: no such file"),
        ({"PYTHON": "/no/python"}, "PYTHON=/no/python: no such program"),
    ],
)
def test_what_stops_it(cluster, variables, said):
    run = cluster.run(**variables)
    assert run.status == 1 and said in run.out
    assert not any("kill-on-bad-exit" in line for line in cluster.log())


def test_a_folder_that_a_node_does_not_see(cluster, tmp_path):
    dump = tmp_path / "dump"
    # Gone again before the nodes look.
    (tmp_path / "tools" / "srun").write_text(SRUN.replace("started=()", f"started=(); rm -rf '{dump}'"))
    run = cluster.run(f"--job.dump_folder={dump}")
    assert run.status == 1
    assert f"n3 does not see what the first node wrote to job.dump_folder, {dump}/.shared-12345" in run.out


def test_a_run_that_fails_is_not_queued_again(cluster):
    run = cluster.run("--checkpoint.enable", FAKE_RUN_STATUS="1")
    assert run.status == 1 and "The run ended with exit code 1." in run.out
    assert not any("requeue" in line for line in cluster.log())


def test_near_its_time_limit_it_is_queued_again(cluster):
    job = cluster.start("--checkpoint.enable", FAKE_RUN_TENTHS="600")
    until(job, *RUNNING)
    job.send_signal(signal.SIGUSR1)
    rest, _ = job.communicate(timeout=60)
    assert "The time limit is near" in rest
    assert cluster.log()[-1] == "scontrol requeue 12345"


def test_without_checkpoints_it_uses_its_time_to_the_end(cluster):
    job = cluster.start(FAKE_RUN_TENTHS="15")
    until(job, *RUNNING)
    job.send_signal(signal.SIGUSR1)
    rest, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and "The time limit is near" not in rest
    assert not any("requeue" in line for line in cluster.log())


def test_when_slurm_ends_it_slurm_decides(cluster):
    """A preemption and scancel look alike from here: queueing again would bring cancelled jobs back."""
    job = cluster.start("--checkpoint.enable", FAKE_RUN_TENTHS="600")
    until(job, *RUNNING)
    job.send_signal(signal.SIGTERM)
    until(job, "waiting for what Slurm does")
    assert job.poll() is None
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    assert not any("requeue" in line for line in cluster.log())
