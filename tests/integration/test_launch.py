"""The launchers without any training: which Python they use, how they make one, and what they hand to torchrun."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli
import torch
import torch.distributed.run
from packaging.requirements import Requirement
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.distributed import multinode
from torchtitan_lite.distributed.failures import FOLLOWED
from torchtitan_lite.distributed.nodes import Nodes

REPO = Path(__file__).parents[2]


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, REPO / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NODES = ("NNODES", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_TIMEOUT")

launch = load_script("launch")
check_env = load_script("check_env")


# --- launch.py -------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """What launch() hands to torchrun: an empty list until it does."""
    for name in ("CONFIG_FILE", "NGPU", "LOG_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", *NODES):
        monkeypatch.setenv(name, "")  # restored afterwards, whether it was there or not
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    arguments = []
    monkeypatch.setattr(torch.distributed.run, "main", arguments.extend)
    monkeypatch.setattr(multinode, "torchrun", arguments.extend)
    monkeypatch.setattr(multinode, "leave", sys.exit)
    monkeypatch.setattr(multinode._Follower, "start", lambda self: None)
    return arguments


def test_defaults(launched):
    launch.launch(["--training.steps=3"])
    debug_model = REPO / "train_configs" / "debug_model.toml"
    assert launched[-3:] == [str(REPO / "train.py"), f"--job.config_file={debug_model}", "--training.steps=3"]
    assert "--nproc_per_node=1" in launched and "--standalone" in launched
    assert "OMP_NUM_THREADS" not in os.environ


def test_ngpu_shares_the_cores(launched, monkeypatch):
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # restored afterwards
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch.launch([])
    assert "--nproc_per_node=2" in launched
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("given", "gpus", "processes"), [(None, 0, 1), (None, 4, 4), ("2", 4, 2), ("4", 0, 4), ("", 3, 3)]
)
def test_process_count(monkeypatch, given, gpus, processes):
    monkeypatch.delenv("NGPU", raising=False)
    if given is not None:
        monkeypatch.setenv("NGPU", given)
    assert launch.process_count(gpus) == processes


@pytest.mark.parametrize(("given", "gpus"), [("0", 0), ("-1", 0), ("two", 2), ("3", 2)])
def test_impossible_process_counts(monkeypatch, given, gpus):
    monkeypatch.setenv("NGPU", given)
    with pytest.raises(ConfigError, match=f"NGPU={given}"):
        launch.process_count(gpus)


def test_config_file_is_sought_from_here_then_from_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONFIG_FILE", "./train_configs/llama3_8b.toml")
    assert launch.config_file() == REPO / "train_configs" / "llama3_8b.toml"
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "llama3_8b.toml").touch()
    assert launch.config_file().resolve() == tmp_path / "train_configs" / "llama3_8b.toml"
    monkeypatch.setenv("CONFIG_FILE", "nope.toml")
    with pytest.raises(ConfigError, match=r"CONFIG_FILE=nope\.toml"):
        launch.config_file()


@pytest.mark.parametrize("words", [["--job.config_file=x.toml"], ["--job.config-file", "x.toml"]])
def test_a_file_on_the_line_replaces_the_one_of_the_environment(monkeypatch, words):
    monkeypatch.setenv("CONFIG_FILE", "nope.toml")
    assert launch.with_config_file(words) == words


@pytest.mark.parametrize(
    "argv", [["--training.stepz=1"], ["--training.global_batch_size=13"], ["--model.hf_assets_path=/no/such"]]
)
def test_wrong_settings_start_nothing(launched, argv):
    with pytest.raises(ConfigError):
        launch.launch(argv)
    assert launched == []


@pytest.mark.parametrize(
    ("log_rank", "message"), [("first", "must be a rank"), ("2", "the ranks of this run are 0 to 1"), ("-1", "0 to 1")]
)
def test_wrong_log_rank_starts_nothing(launched, monkeypatch, log_rank, message):
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("LOG_RANK", log_rank)
    with pytest.raises(ConfigError, match=f"LOG_RANK=.*{message}") as caught:
        launch.launch(["--training.seq_len=1"])
    assert launched == []
    assert len(caught.value.problems) == (1 if log_rank == "first" else 2)


def test_a_log_of_the_last_rank(launched, monkeypatch):
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("LOG_RANK", "1")
    launch.launch([])
    assert launched


# --- launch.py on several nodes --------------------------------------------------------------------------------------


def set_nodes(monkeypatch, **variables):
    for name, value in {"NNODES": "2", "RDZV_ENDPOINT": "localhost:29400", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # restored afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def launch_on_several(argv):
    with pytest.raises(SystemExit) as caught:
        launch.launch(argv)
    assert caught.value.code == 0


def test_several_nodes(launched, monkeypatch):
    set_nodes(monkeypatch, NGPU="4", RDZV_ID="run", RDZV_TIMEOUT="30")
    # The check knows of all eight processes: another degree would be refused.
    launch_on_several(["--parallelism.data_parallel_shard_degree=8"])
    script = launched.index(str(REPO / "train.py"))
    assert set(launched[:script]) == {
        "--nnodes=2",
        "--nproc_per_node=4",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:29400",
        "--rdzv_id=run",
        "--rdzv_conf=join_timeout=30",
        "--local_addr=127.0.0.1",
    }
    assert launched[-1] == "--parallelism.data_parallel_shard_degree=8"
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    with pytest.raises(ConfigError, match="must make the 8 processes"):
        launch.launch(["--parallelism.data_parallel_shard_degree=4"])


@pytest.mark.parametrize(("address", "is_here", "serves"), [("10.0.0.5", True, 1), ("10.0.0.6", False, 0)])
def test_who_serves_is_said_between_machines(launched, monkeypatch, address, is_here, serves):
    set_nodes(monkeypatch, RDZV_ENDPOINT="[fd00::5]:29400")
    monkeypatch.setattr(multinode, "local_address", lambda nodes: (address, is_here))
    monkeypatch.setattr(multinode, "_wait_for_store", lambda nodes: launched.append("waited"))
    launch_on_several([])
    assert f"--rdzv_conf=join_timeout=600,is_host={serves}" in launched
    assert "--rdzv_endpoint=[fd00::5]:29400" in launched and f"--local_addr={address}" in launched
    assert ("waited" in launched) is not is_here


def test_everything_wrong_in_the_environment_is_told_together(launched, monkeypatch):
    set_nodes(monkeypatch, NNODES="1:2", RDZV_ENDPOINT="node1", NGPU="none", LOG_RANK="first")
    with pytest.raises(ConfigError) as caught:
        launch.launch([])
    assert [problem.partition("=")[0] for problem in caught.value.problems] == [
        "NGPU",
        "NNODES",
        "RDZV_ENDPOINT",
        "LOG_RANK",
    ]
    assert launched == []


def failures(**exit_codes: int) -> ChildFailedError:
    """Of ranks, {"r0": its exit code}."""
    return ChildFailedError(
        "train.py", {int(r[1:]): ProcessFailure(int(r[1:]), 1, code, "<N/A>") for r, code in exit_codes.items()}
    )


@pytest.mark.parametrize(
    ("error", "seen", "said", "posted"),
    [
        (failures(r3=1), None, "Rank 3 ended with exit code 1.", "Rank 3 ended"),
        (failures(r0=FOLLOWED, r1=-9, r2=FOLLOWED), None, "Rank 1 ended with exit code -9 (SIGKILL).", "Rank 1 ended"),
        (failures(r0=FOLLOWED), "Rank 9 failed.", "ends with the run. Rank 9 failed.", "Rank 9 failed."),
        (failures(r0=FOLLOWED), None, "ends with the run. Another node has ended", "Another node has ended"),
        (
            RendezvousTimeoutError(),
            None,
            "not all of the NNODES=2 nodes came to RDZV_ENDPOINT=localhost:29400",
            "NNODES",
        ),
        (RendezvousConnectionError(), None, "The launcher at RDZV_ENDPOINT=localhost:29400 has ended", None),
        (RendezvousConnectionError(), "Rank 9 failed.", "ends with the run. Rank 9 failed.", None),
    ],
)
def test_how_a_node_ends(launched, monkeypatch, capsys, error, seen, said, posted):
    def torchrun(arguments):
        raise error

    posts = []
    monkeypatch.setattr(multinode, "torchrun", torchrun)
    monkeypatch.setattr(multinode, "_LINGER_SECONDS", 0)
    monkeypatch.setattr(multinode.FailureBoard, "post", lambda self, message: posts.append(message))
    monkeypatch.setattr(multinode._Follower, "start", lambda self: setattr(self, "failure", seen))
    set_nodes(monkeypatch)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(SystemExit) as caught:
        launch.launch([])
    for each, handler in zip((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), handlers, strict=True):
        signal.signal(each, handler)
    assert caught.value.code == 1
    assert said in capsys.readouterr().err
    assert [posted in message for message in posts] == [True] * (posted is not None)


def test_a_meeting_place_where_nobody_listens():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        message = f"nobody listens at RDZV_ENDPOINT=127.0.0.1:{port} after RDZV_TIMEOUT=1 s"
        with pytest.raises(SystemExit, match=message):
            multinode._wait_for_store(Nodes(2, "127.0.0.1", port, "x", timeout=1))


# --- run_train.sh and setup_env.sh, with a make-believe Python -------------------------------------------------------

FAKE_PYTHON = r"""#!/usr/bin/env bash
echo "$(basename "$(dirname "$(dirname "$0")")") $*" >>"$FAKE_LOG"
in_venv=$([[ "$0" == */.venv/* ]] && echo yes || echo no)
case "$*" in
    -c*) exit "${FAKE_TOO_OLD:-0}" ;;
    *check_env.py*)
        if [[ $in_venv == no && -z "${FAKE_BASE_COMPLETE:-}" || -n "${FAKE_VENV_LACKS:-}" ]]; then
            echo "tomli, torch" >&2
            exit 1
        fi
        ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
    "-m pip "*) sleep "${FAKE_PIP_SECONDS:-0}" && exit "${FAKE_PIP_STATUS:-0}" ;;
    *launch.py*) printf '%s\n' "PYTHONPATH=$PYTHONPATH" "PWD=$PWD" "$@" ;;
esac
"""
TOOLS = "bash env basename dirname readlink cat cksum tr rm mkdir flock cp sleep touch"


@pytest.fixture
def machine(tmp_path):
    """A copy of the launchers on a machine whose only Python is make-believe; ``.start()`` runs run_train.sh."""
    repo, tools, base = tmp_path / "a repo", tmp_path / "tools", tmp_path / "base" / "bin"
    for folder in (repo / "scripts", tools, base):
        folder.mkdir(parents=True)
    for name in ("run_train.sh", "scripts/setup_env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, repo / name)
    for tool in TOOLS.split():
        if shutil.which(tool):
            (tools / tool).symlink_to(shutil.which(tool))
    for name in ("python3", "python"):
        (base / name).write_text(FAKE_PYTHON)
        (base / name).chmod(0o755)
    log = tmp_path / "log"
    environment = {"PATH": f"{base}:{tools}", "FAKE_LOG": str(log)}

    def popen(*argv: str, script: Path = repo / "run_train.sh", **extra: str) -> subprocess.Popen:
        return subprocess.Popen(
            [script, *argv],
            env={**environment, **extra},
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def start(*argv: str, **extra) -> SimpleNamespace:
        process = popen(*argv, **extra)
        out, err = process.communicate(timeout=300)
        return SimpleNamespace(status=process.returncode, out=out.splitlines(), err=err)

    def calls(part: str) -> list[str]:
        return [line for line in log.read_text().splitlines() if part in line]

    def setup_again(extra: str) -> SimpleNamespace:
        """The set-up that run_tests.sh ("dev") or run_train.sh ("") would do."""
        script = f'set -euo pipefail; repo="{repo}"; source "$repo/scripts/setup_env.sh"; use_environment {extra}'
        return subprocess.run(
            ["bash", "-c", script + '; echo "$PYTHON"'], env=environment, text=True, capture_output=True, timeout=300
        )

    return SimpleNamespace(
        repo=repo,
        venv=repo / ".venv",
        base=base,
        start=start,
        popen=popen,
        calls=calls,
        setup=setup_again,
        environment=environment,
    )


def test_a_complete_environment_is_used_as_it_is(machine, tmp_path):
    run = machine.start("--job.description=two words", "x", FAKE_BASE_COMPLETE="1", PYTHONPATH="mine")
    assert run.status == 0 and run.err == ""
    # From the caller's working directory, with the arguments untouched.
    assert run.out == [
        f"PYTHONPATH={machine.repo}:mine",
        f"PWD={tmp_path}",
        f"{machine.repo}/scripts/launch.py",
        "--job.description=two words",
        "x",
    ]
    assert not machine.venv.exists()


def test_through_a_link(machine, tmp_path):
    (tmp_path / "link").symlink_to(machine.repo / "run_train.sh")
    run = machine.start(script=tmp_path / "link", FAKE_BASE_COMPLETE="1")
    assert run.out[2] == f"{machine.repo}/scripts/launch.py"


def test_a_bare_machine_is_set_up_once(machine):
    first = machine.start()
    assert first.status == 0 and "Setting up" in first.err and "Set-up finished" in first.err
    assert len(machine.calls("-m pip install")) == 1
    assert f"-c {machine.repo}/constraints.txt -e {machine.repo}" in machine.calls("-m pip install")[0]
    second = machine.start()
    assert second.err == "" and second.out == first.out
    assert len(machine.calls("-m pip install")) == 1
    assert machine.calls("launch.py")[-1].startswith(".venv ")


def test_a_set_up_that_failed_is_done_anew(machine):
    failed = machine.start(FAKE_PIP_STATUS="1")
    assert failed.status == 1 and "Installing the packages failed" in failed.err and failed.out == []
    (machine.venv / "rubbish").touch()
    assert machine.start().status == 0
    assert not (machine.venv / "rubbish").exists()


def test_a_set_up_that_was_killed_is_done_anew(machine):
    process = machine.popen(FAKE_PIP_SECONDS="30")
    deadline = time.monotonic() + 20
    while not (machine.venv / "pyvenv.cfg").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (machine.venv / "rubbish").touch()
    assert machine.start().status == 0
    assert not (machine.venv / "rubbish").exists()


def test_new_requirements_are_installed_into_the_old_environment(machine):
    machine.start()
    (machine.venv / "kept").touch()
    with (machine.repo / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert "up to date" in machine.start().err
    assert len(machine.calls("-m pip install")) == 2 and (machine.venv / "kept").exists()


def test_packages_for_tests_are_added_and_serve_for_training_too(machine):
    machine.start()
    assert machine.setup("dev").stdout.strip() == f"{machine.venv}/bin/python"
    assert machine.calls("-m pip install")[-1].endswith(f"-e {machine.repo}[dev]")
    machine.start()
    machine.setup("dev")
    assert len(machine.calls("-m pip install")) == 2


@pytest.mark.skipif(shutil.which("flock") is None, reason="set-ups side by side are kept apart by flock")
def test_two_set_ups_at_once(machine):
    both = [machine.popen(FAKE_PIP_SECONDS="5") for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(machine.calls("-m pip install")) == 1
    assert sum("already under way" in err for _, err in outputs) == 1


def test_an_environment_of_the_users_own_in_venv_is_never_changed(machine):
    subprocess.run([machine.base / "python3", "-m", "venv", machine.venv], env=machine.environment, check=True)
    assert machine.start().status == 0
    lacking = machine.start(FAKE_VENV_LACKS="1")
    assert lacking.status == 1 and "tomli, torch" in lacking.err and "not made by this script" in lacking.err
    assert machine.calls("-m pip") == []


def test_an_active_environment_that_lacks_packages_is_named(machine):
    err = machine.start(VIRTUAL_ENV="/home/me/env").err
    assert "/home/me/env" in err and "it lacks tomli, torch" in err


def test_too_old_or_no_python(machine):
    run = machine.start(FAKE_TOO_OLD="1")
    assert run.status == 1 and run.err == "No Python 3.10 or newer on PATH.\n"
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("python", "message"), [("/no/python", "no such program"), ("python3", "PYTHON=python3 lacks: tomli, torch")]
)
def test_a_python_that_was_asked_for_but_does_not_do(machine, python, message):
    run = machine.start(PYTHON=python)
    assert run.status == 1 and message in run.err
    assert not machine.venv.exists()


# --- what an environment must have -----------------------------------------------------------------------------------


def project_requirements() -> dict[str, list[Requirement]]:
    project = tomli.loads((REPO / "pyproject.toml").read_text())["project"]
    lists = {"dependencies": project["dependencies"], "dev": project["optional-dependencies"]["dev"]}
    return {name: [Requirement(text) for text in texts] for name, texts in lists.items()}


@pytest.mark.parametrize("table", ["dependencies", "dev"])
def test_check_env_reads_all_requirements(table):
    expected = [(each.name, str(each.specifier)) for each in project_requirements()[table]]
    assert [(name, f">={least}") for name, least in check_env.requirements(table)] == expected


@pytest.mark.parametrize(
    ("installed", "least", "fits"),
    [("2.13.0+cpu", "2.11", True), ("2.11", "2.11", True), ("2.9.1", "2.11", False), ("3.0", "2.11", True)],
)
def test_check_env_compares_versions(monkeypatch, installed, least, fits):
    monkeypatch.setattr(check_env.metadata, "version", lambda name: installed)
    assert (check_env.lacking("torch", least) is None) is fits


def test_check_env_names_what_is_missing():
    assert check_env.lacking("no-such-package-here", "1.0") == "no-such-package-here"


def test_constraints_pin_every_requirement_but_numpy():
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = {pin.name: pin.specifier for pin in map(Requirement, filter(None, (line.split("#")[0] for line in lines)))}
    assert str(pins["torch"]) == "==2.13.0"
    wanted = {each.name: each for table in project_requirements().values() for each in table}
    assert set(pins) == set(wanted) - {"numpy"}
    for name, pin in pins.items():
        assert wanted[name].specifier.contains(str(pin).removeprefix("==")), name
