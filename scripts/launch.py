"""What run_train.sh starts: checks the configuration, then hands the same command line to torchrun and train.py.

A wrong setting is answered here with its message alone, before there are processes to take down. Environment:

    CONFIG_FILE   the TOML file; relative to the working directory or else to the repository (default: the debug model)
    NGPU          processes, one a GPU (default: as many as there are visible GPUs; without any, 1 on the CPU)
    LOG_RANK      ranks whose log is shown (default: 0)

For several nodes it is started on each of them, with the same values (docs/multinode.md):

    NNODES        how many nodes there are (default: 1)
    RDZV_ENDPOINT HOST:PORT, the place where they meet: one of the nodes, and a free port there
    RDZV_ID       name of the run, different for each of those that meet at the same place (default: torchtitan_lite)
    RDZV_TIMEOUT  seconds to wait for the other nodes (default: 600)
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.distributed.nodes import nodes_of_run
from torchtitan_lite.observability.logging import init_logger, logged_ranks, logger

REPO = Path(__file__).resolve().parent.parent


def config_file() -> Path:
    """The file that CONFIG_FILE means. Raises ConfigError if there is none."""
    given = os.environ.get("CONFIG_FILE") or REPO / "train_configs" / "debug_model.toml"
    for candidate in (Path(given), REPO / given):
        if candidate.is_file():
            return candidate
    raise ConfigError([f"CONFIG_FILE={given}: no such file, neither from {Path.cwd()} nor from {REPO}"])


def with_config_file(argv: list[str]) -> list[str]:
    """``argv``, with the file of the environment in front unless it names one itself."""
    if any(argument.partition("=")[0] in ("--job.config_file", "--job.config-file") for argument in argv):
        return argv
    return [f"--job.config_file={config_file()}", *argv]


def process_count(visible_gpus: int) -> int:
    """What NGPU means on a machine with that many GPUs. Raises ConfigError for what cannot be."""
    given = os.environ.get("NGPU") or str(visible_gpus or 1)
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise ConfigError([f"NGPU={given}: must be a whole number from 1 on"])
    if 0 < visible_gpus < int(given):
        raise ConfigError([f"NGPU={given}: each process needs a GPU of its own, and {visible_gpus} are visible"])
    return int(given)


def launch(argv: list[str]) -> None:
    """Check, then train; returns, or exits with 0, when all processes have ended well. Raises ConfigError."""
    argv = with_config_file(argv)
    config = load_config(argv)  # --help ends here, before torch is imported

    import torch

    from torchtitan_lite.config.checks import check_config

    processes, nodes, _ = _all_of(lambda: process_count(torch.cuda.device_count()), nodes_of_run, _logged_ranks)
    world_size = processes * (nodes.count if nodes else 1)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    _all_of(
        lambda: check_config(config, world_size=world_size, device_type=device_type), lambda: _logged_ranks(world_size)
    )
    init_logger()  # the processes make loggers of their own
    logger.setLevel(logging.INFO)  # whatever their LOG_RANK
    if processes > 1:
        # Left alone, each process would start a thread per core.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    command = [f"--nproc_per_node={processes}", str(REPO / "train.py"), *argv]
    if nodes is None:
        run_here(command)
    else:
        from torchtitan_lite.distributed.multinode import run_with_others

        run_with_others(nodes, command)


def _logged_ranks(world_size: int | None = None) -> None:
    try:
        logged_ranks(world_size)
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def _all_of(*parts: Callable) -> list:
    """What each returns. Raises ConfigError with the problems of all of them."""
    results, problems = [], []
    for part in parts:
        try:
            results.append(part())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return results


def run_here(command: list[str]) -> None:
    """A run on this node alone."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from torchtitan_lite.distributed.multinode import first_failure

    try:
        # --standalone takes a free port, so that runs side by side do not meet; the address spares a look-up of the
        # host's name, which not every container can answer.
        torchrun(["--standalone", "--local_addr=127.0.0.1", *command])
    except ChildFailedError as error:  # the process has printed its own traceback
        sys.exit(first_failure(error))
    except SignalException as error:  # passed on to the processes, which have ended
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    try:
        launch(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
