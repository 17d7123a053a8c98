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
        trainer = Trainer(config)
    except (ConfigError, SourceError, ResumeError, CheckpointError) as error:  # the user's to mend, not ours to trace
        sys.exit(str(error))
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
