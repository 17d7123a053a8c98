"""Every setting of a run: one dataclass a section, one docstring a field.

The docstring under a field is its ``--help`` text. The names are torchtitan's classic ones; a key that is accepted has
an effect. Files and command-line overrides are merged by :mod:`torchtitan_lite.config.load`; rules that span several
fields live in :mod:`torchtitan_lite.config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_lite.config.schema.data import Data, MixtureSource
from torchtitan_lite.config.schema.model import Model, ModelArgsOverrides
from torchtitan_lite.config.schema.parallelism import Parallelism
from torchtitan_lite.config.schema.run import Checkpoint, Comm, Job, Metrics, Profiling
from torchtitan_lite.config.schema.samples import Samples
from torchtitan_lite.config.schema.training import (
    ActivationCheckpoint,
    Compile,
    Lora,
    LRScheduler,
    Optimizer,
    OptimizerGroup,
    Training,
)
from torchtitan_lite.config.schema.validation import Validation

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Compile",
    "Config",
    "Data",
    "Job",
    "LRScheduler",
    "Lora",
    "Metrics",
    "MixtureSource",
    "Model",
    "ModelArgsOverrides",
    "Optimizer",
    "OptimizerGroup",
    "Parallelism",
    "Profiling",
    "Samples",
    "Training",
    "Validation",
]


@dataclass
class Config:
    """A TOML-driven trainer for Llama 3. Values come from the command line, then the TOML file, then the defaults."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    validation: Validation = field(default_factory=Validation)
    samples: Samples = field(default_factory=Samples)
    lora: Lora = field(default_factory=Lora)
    comm: Comm = field(default_factory=Comm)
