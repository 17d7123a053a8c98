"""Train a model: configuration -> Trainer -> train. Started by run_train.sh, or by torchrun directly."""

import socket
import sys
import traceback
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.convert.step_folder import CheckpointError
from torchtitan_lite.convert.weights import WeightsError
from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.resume import ResumeError
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.distributed.failures import FOLLOWED, FailureBoard, PeerFailure, leave
from torchtitan_lite.distributed.mesh import world_from_environment
from torchtitan_lite.distributed.shared_folder import check_equal_nodes
from torchtitan_lite.observability.logging import init_logger
from torchtitan_lite.observability.watchdog import StepWatchdog
from torchtitan_lite.training.trainer import Trainer

# What the user can mend; the message says it all.
_FOR_THE_USER = (
    ConfigError,
    SourceError,
    PackingError,
    ResumeError,
    CheckpointError,
    WeightsError,
    FloatingPointError,
    TimeoutError,
    PeerFailure,
)


def main() -> None:
    config = load_config()  # --help ends here
    init_logger()
    board = FailureBoard.of_run()
    watchdog = StepWatchdog(config.comm, world_from_environment(), board)
    try:
        with watchdog:
            check_equal_nodes()
            Trainer(config, watchdog).train()
    except (Exception, CheckpointException, KeyboardInterrupt) as error:  # the second is no Exception
        fail(error, watchdog.place, board)
    dist.destroy_process_group()


def fail(error: BaseException, place: str, board: FailureBoard | None) -> NoReturn:
    """Say what was wrong and end, together with the other ranks."""
    world = world_from_environment()
    if isinstance(error, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
    elif isinstance(error, _FOR_THE_USER):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)
    if world.size == 1:
        sys.exit(1)
    if board is not None and not isinstance(error, PeerFailure):
        board.post(f"Rank {world.rank} on {socket.gethostname()} failed in {place}: {type(error).__name__}: {error}")
    leave(FOLLOWED if isinstance(error, PeerFailure) else 1)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:  # of the command line; nothing has been started
        sys.exit(str(error))
