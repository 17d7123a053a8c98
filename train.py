"""Train a model: configuration -> Trainer -> train. Started by run_train.sh, or by torchrun directly."""

import sys

import torch.distributed as dist

from torchtitan_lite.config.load import ConfigError, load_config
from torchtitan_lite.data.loader import ResumeError
from torchtitan_lite.data.sources import SourceError
from torchtitan_lite.observability.logging import init_logger
from torchtitan_lite.training.checkpoint import CheckpointError
from torchtitan_lite.training.trainer import Trainer


def main() -> None:
    try:
        config = load_config()
        init_logger()
        Trainer(config).train()
    except (ConfigError, SourceError, ResumeError, CheckpointError, FloatingPointError) as error:
        sys.exit(str(error))  # the user's to mend: the message says it all
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
