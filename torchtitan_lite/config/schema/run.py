"""What a run leaves behind and watches: folders, metrics, profiles, checkpoints, time limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class Job:
    config_file: str | None = None
    """TOML file to read before the command line is applied."""

    dump_folder: str = "./outputs"
    """Folder for all that the run leaves behind: resolved config, metrics, TensorBoard files, checkpoints."""

    description: str = "torchtitan_lite run"
    """A line about the run, printed at its start and kept in the resolved config."""


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Write a torch.profiler trace (Chrome format) every profile_freq steps."""

    save_traces_folder: str = "profile_traces"
    """Folder for the traces, inside job.dump_folder."""

    profile_freq: int = 10
    """Steps between two traces. Each trace covers the last step of its interval, after three warm-up steps."""


@dataclass
class Metrics:
    log_freq: int = 10
    """Steps between two log lines (and metrics.jsonl and TensorBoard entries). The first and the last step are always
    logged."""

    enable_tensorboard: bool = False
    """Write TensorBoard events."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard events, inside job.dump_folder."""

    enable_wandb: bool = False
    """Send metrics to Weights & Biases (needs the wandb extra; WANDB_PROJECT and WANDB_RUN_NAME name the run)."""


@dataclass
class Checkpoint:
    enable: bool = False
    """Save checkpoints and resume from the newest complete one."""

    folder: str = "checkpoint"
    """Folder for checkpoints, inside job.dump_folder; each lies in step-N."""

    interval: int = 500
    """Steps between two checkpoints. The last step is always saved."""

    async_mode: Literal["disabled", "async"] = "disabled"
    """async: write in the background while training goes on."""

    keep_latest_k: int = 10
    """How many checkpoints to keep, at least 2 (one may be being written). 0: all."""

    load_step: int = -1
    """Step to resume from. -1: the newest complete one."""

    initial_load_path: str | None = None
    """A checkpoint (a step-N folder of another run) whose weights start this run when its own folder is empty; with
    initial_load_in_hf a Hugging Face folder."""

    initial_load_in_hf: bool = False
    """The weights that start this run are the safetensors of a Hugging Face folder: initial_load_path, or where that is
    unset model.hf_assets_path."""

    last_save_model_only: bool = False
    """The last checkpoint holds the weights alone: a third of the size, but the run cannot be extended from it."""

    last_save_in_hf: bool = False
    """After the last step also write the weights as a Hugging Face folder with config and tokenizer, hf/step-N in
    job.dump_folder."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of every tensor in that folder."""


@dataclass
class Comm:
    init_timeout_seconds: int = 600
    """Time limit of a collective up to the end of the first step, which compiles and warms up."""

    train_timeout_seconds: int = 600
    """Time limit of a collective from the second step on."""

    data_timeout_seconds: int = 14_400
    """How long a process waits for the one that reads and tokenises the data for all."""
