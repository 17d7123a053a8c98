"""Train a model: configuration -> Trainer -> train. Started by run_train.sh, or by torchrun directly."""

import sys

import torch.distributed as dist

from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.data.packing.plan import PackingError
from torchtitan_lite.data.resume import ResumeError
from torchtitan_lite.data.sources.document import SourceError
from torchtitan_lite.observability.logging import init_logger
from torchtitan_lite.training.checkpoint import CheckpointError
from torchtitan_lite.training.trainer import Trainer

# What the user can mend; the message says it all.
_FOR_THE_USER = (
    ConfigError,
    SourceError,
    PackingError,
    ResumeError,
    CheckpointError,
    FloatingPointError,
    TimeoutError,
)


def main() -> None:
    try:
        config = load_config()
        init_logger()
        Trainer(config).train()
    except _FOR_THE_USER as error:
        sys.exit(str(error))
    except RuntimeError as error:
        if "Connection closed by peer" not in str(error):
            raise
        sys.exit("Another rank has ended, and this one with it; what that one said tells why.")
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
