"""Rules that span several settings, or reach outside the configuration: model, machine, files.

They run before anything heavy is started, and all that is wrong is reported together. A message says what was given,
the rule it breaks, and what would work.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_lite.attention.backends import BLOCK_SIZE, masks_documents, unsupported
from torchtitan_lite.config.help import value_of
from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.config.schema import Config, Parallelism
from torchtitan_lite.data.sources.resolve import check_sources
from torchtitan_lite.data.tokenizer import TokenizerError, load_tokenizer
from torchtitan_lite.distributed.context_parallel import context_parallel_problems
from torchtitan_lite.distributed.mesh import Degrees, resolve_degrees
from torchtitan_lite.distributed.pipeline_plan import pipeline_problems
from torchtitan_lite.distributed.precision import resolve_param_dtype
from torchtitan_lite.distributed.tensor_parallel import tensor_parallel_problems
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.flavors import join_flavor, model_args, split_flavor

# Least value of each number that has one.
AT_LEAST: dict[str, float] = {
    "profiling.profile_freq": 1,
    "metrics.log_freq": 1,
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "lr_scheduler.warmup_steps": 0,
    "training.local_batch_size": 1,
    "training.seq_len": 2,  # a row of one token has nothing to predict
    "training.max_norm": 0,
    "training.steps": 1,
    "training.gc_freq": 1,
    "training.seed": 0,
    "data.packing_window": 1,
    "data.max_documents_per_row": 0,
    "data.streaming_buffer": 1,
    "data.num_workers": 0,
    "data.prefetch_factor": 1,
    "data.num_proc": 1,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0,
    "checkpoint.load_step": -1,
    "comm.init_timeout_seconds": 1,
    "comm.train_timeout_seconds": 1,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    "comm.data_timeout_seconds": 1,
}
SHARES = ("lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor")


@dataclass(frozen=True)
class _Run:
    """What the rules look at. ``args`` is None where the model's shape is itself at fault, ``degrees`` where they do
    not fit the number of processes."""

    config: Config
    world_size: int
    device_type: str
    args: ModelArgs | None
    degrees: Degrees | None


def check_config(config: Config, *, world_size: int, device_type: str, outside: bool = True) -> list[str]:
    """Hold ``config`` against every rule, for a run of ``world_size`` processes on ``device_type`` ("cpu" or "cuda").

    outside: whether what lies outside of the configuration is looked at too: tokenizer, data, folders, packages.
    Starts nothing.
    Returns warnings: what will run, but perhaps not as meant. Raises ConfigError with all problems.
    """
    problems = []
    args = None
    try:
        args = model_args(config.model.flavor, asdict(config.model.args))
    except ValueError as error:
        problems.append(f"model.flavor={config.model.flavor} with model.args: {error}")
    degrees = None
    try:
        degrees = resolve_degrees(config.parallelism, world_size)
    except ValueError as error:
        problems.append(str(error))
    run = _Run(config, world_size, device_type, args, degrees)
    for rule in (*_RULES, *(_OUTSIDE_RULES if outside else ())):
        problems.extend(rule(run))
    if problems:
        raise ConfigError(problems)
    return list(_warnings(run))


def _ranges(run: _Run) -> Iterator[str]:
    for name, least in AT_LEAST.items():
        value = value_of(run.config, name)
        if value < least:
            yield f"{name}={value}: must be at least {least}"
    for name in SHARES:
        value = value_of(run.config, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name}={value}: a share, from 0 to 1"
    for name in ("optimizer.beta1", "optimizer.beta2"):
        value = value_of(run.config, name)
        if not 0 <= value < 1:
            yield f"{name}={value}: must be at least 0 and below 1"
    if run.config.optimizer.eps <= 0:
        yield (
            f"optimizer.eps={run.config.optimizer.eps}: must be above 0, for a weight without any gradient so far is "
            "updated by 0 / (0 + eps)"
        )


def _batch(run: _Run) -> Iterator[str]:
    if run.degrees is None:
        return
    training, ranks = run.config.training, run.degrees.dp
    rows = training.local_batch_size * ranks
    given = training.global_batch_size
    if given == -1 or rows < 1:
        return
    if given < 1 or given % rows:
        nearest = sorted({max(given // rows, 1) * rows, (max(given, 0) // rows + 1) * rows})
        yield (
            f"training.global_batch_size={given}: must be a multiple of training.local_batch_size x data-parallel "
            f"processes = {training.local_batch_size} x {ranks} = {rows}; "
            f"{' or '.join(map(str, nearest))} would do, or -1 for no gradient accumulation"
        )


def _parallelism(run: _Run) -> Iterator[str]:
    """What each dimension of the mesh asks of the model and of the others."""
    config, args, degrees = run.config, run.args, run.degrees
    if config.training.enable_cpu_offload and run.device_type == "cpu":
        yield "training.enable_cpu_offload: this run is on the CPU, and all of it in CPU memory anyway; leave it off"
    if args is None or degrees is None:
        return
    training, parallelism = config.training, config.parallelism
    compile_model = config.compile.enable and "model" in config.compile.components
    yield from context_parallel_problems(args, degrees.cp, training.seq_len)
    yield from tensor_parallel_problems(
        args,
        degrees.tp,
        training.seq_len // degrees.cp,
        device_type=run.device_type,
        compile_model=compile_model,
        async_tp=parallelism.enable_async_tensor_parallel,
    )
    if parallelism.enable_async_tensor_parallel and compile_model and config.compile.backend != "inductor":
        yield (
            f"parallelism.enable_async_tensor_parallel with compile.backend={config.compile.backend}: inductor alone "
            "makes the overlap; set it, or leave enable_async_tensor_parallel off"
        )
    rows = training.global_batch_size // degrees.dp if training.global_batch_size > 0 else training.local_batch_size
    yield from pipeline_problems(
        args,
        parallelism,
        rows_per_step=rows,
        compile_model=compile_model,
        ac_mode=config.activation_checkpoint.mode,
        selective_ac_option=config.activation_checkpoint.selective_ac_option,
    )


def _sequence(run: _Run) -> Iterator[str]:
    if run.args is None:
        return
    seq_len = run.config.training.seq_len
    if seq_len > run.args.max_seq_len:
        yield (
            f"training.seq_len={seq_len} is more than the {run.args.max_seq_len} positions of "
            f"model.flavor={run.config.model.flavor}; lower it, or raise model.args.max_seq_len"
        )
    if run.args.attention == "flex_block_causal" and seq_len > 0 and seq_len % BLOCK_SIZE:
        below = seq_len // BLOCK_SIZE * BLOCK_SIZE
        yield (
            f"training.seq_len={seq_len}: flex_block_causal works on blocks of {BLOCK_SIZE} tokens and needs a "
            f"multiple of them; {f'{below} or ' if below else ''}{below + BLOCK_SIZE} would do"
        )


def _attention(run: _Run) -> Iterator[str]:
    if run.args is None:
        return
    dtype = resolve_param_dtype(run.config.training.mixed_precision_param, run.device_type)
    for spec in dict.fromkeys(run.args.mask_specs):
        yield from unsupported(
            run.args.attention,
            device_type=run.device_type,
            dtype=dtype,
            spec=spec,
            engine=run.config.model.varlen_engine,
            context_parallel_degree=1 if run.degrees is None else run.degrees.cp,
        )


def _activation_checkpoint(run: _Run) -> Iterator[str]:
    option = run.config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isascii() and option.isdigit() and int(option) > 0):
        yield (
            f'activation_checkpoint.selective_ac_option="{option}": give "op", or a whole number n from 1 on to '
            "recompute each n-th block"
        )


def _compile(run: _Run) -> Iterator[str]:
    if not run.config.compile.enable:
        return
    import torch._dynamo  # takes seconds, so only where it is used anyway

    backends = torch._dynamo.list_backends(exclude_tags=())
    if run.config.compile.backend not in backends:
        yield f"compile.backend={run.config.compile.backend}: torch knows {', '.join(backends)}"


def _tokenizer(run: _Run) -> Iterator[str]:
    path = run.config.model.hf_assets_path
    try:
        size = load_tokenizer(path).vocab_size
    except TokenizerError as error:
        yield str(error)
        return
    if run.args is not None and size > run.args.vocab_size:
        yield (
            f"model.hf_assets_path={path}: the tokenizer has ids up to {size - 1}, but the model embeds only "
            f"{run.args.vocab_size} tokens; set model.args.vocab_size to {size} or more"
        )


def _data(run: _Run) -> Iterator[str]:
    yield from check_sources(run.config)


def _saving_and_loading(run: _Run) -> Iterator[str]:
    checkpoint = run.config.checkpoint
    if checkpoint.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k=1: while the next checkpoint is written the only complete one must stay; "
            "keep at least 2, or 0 for all"
        )
    for name, unset in (("initial_load_path", None), ("load_step", -1)):
        value = getattr(checkpoint, name)
        if value != unset and not checkpoint.enable:
            yield f"checkpoint.{name}={value}: nothing is loaded without checkpoint.enable; set it too"


def _initial_checkpoint(run: _Run) -> Iterator[str]:
    checkpoint = run.config.checkpoint
    if checkpoint.initial_load_path is not None:
        folder = Path(checkpoint.initial_load_path)
        # DCP writes .metadata last, after every rank's share is on disk.
        if not folder.is_dir():
            yield f"checkpoint.initial_load_path={folder}: no such folder; give the step-N folder of a run"
        elif not (folder / ".metadata").is_file():
            yield (
                f"checkpoint.initial_load_path={folder}: not a complete checkpoint (it has no .metadata); "
                "give the step-N folder itself"
            )


def _output_folders(run: _Run) -> Iterator[str]:
    job, checkpoint = run.config.job, run.config.checkpoint
    folders = {f"job.dump_folder={job.dump_folder}": Path(job.dump_folder)}
    if checkpoint.enable:
        folders[f"checkpoint.folder={checkpoint.folder}"] = Path(job.dump_folder, checkpoint.folder)
    for setting, folder in folders.items():
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            yield f"{setting}: {existing} is a file; give a folder, which need not exist yet"
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield f"{setting}: no permission to write in {existing}"


def _metrics(run: _Run) -> Iterator[str]:
    if run.config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield "metrics.enable_wandb: the package wandb is not installed; pip install wandb, or leave it off"


_RULES: tuple[Callable[[_Run], Iterator[str]], ...] = (
    _ranges,
    _batch,
    _parallelism,
    _sequence,
    _attention,
    _activation_checkpoint,
    _compile,
    _saving_and_loading,
)
_OUTSIDE_RULES: tuple[Callable[[_Run], Iterator[str]], ...] = (
    _tokenizer,
    _data,
    _initial_checkpoint,
    _output_folders,
    _metrics,
)


def _warnings(run: _Run) -> Iterator[str]:
    config, attention = run.config, run.args.attention
    if not masks_documents(attention):
        size = split_flavor(config.model.flavor)[0]
        yield (
            f"model.flavor={config.model.flavor}: plain sdpa attends across all documents packed into a row; "
            f"{join_flavor(size, 'sdpa_block_causal')} and {join_flavor(size, 'flex_block_causal')} keep them apart"
        )
    if run.degrees.pp == 1:
        given, defaults = asdict(config.parallelism), asdict(Parallelism())
        unused = [name for name in given if name.startswith("pipeline_") and given[name] != defaults[name]]
        if unused:
            yield f"parallelism.{', '.join(unused)}: of no effect without parallelism.pipeline_parallel_degree"
    warmup, steps = config.lr_scheduler.warmup_steps, config.training.steps
    if warmup > steps:  # quick trials with few steps are common, and well-defined
        yield (
            f"lr_scheduler.warmup_steps={warmup} is more than training.steps={steps}: the run ends before the learning "
            "rate reaches its peak"
        )
    selective = config.activation_checkpoint.mode == "selective"
    model_compiled = config.compile.enable and "model" in config.compile.components
    if (
        attention == "flex_block_causal"
        and run.device_type == "cuda"
        and selective
        and config.activation_checkpoint.selective_ac_option == "op"
        and not model_compiled
    ):
        yield (
            "activation_checkpoint.selective_ac_option=op around flex_block_causal without compile.enable: selective "
            "checkpointing keeps FlexAttention from compiling its kernel, and attention becomes slow; compile the "
            "model, or choose activation_checkpoint.mode none or full"
        )
