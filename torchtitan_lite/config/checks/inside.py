"""Rules on the settings themselves, the model they make and the machine they are for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

from torchtitan_lite.attention.backends import BLOCK_SIZE, unsupported
from torchtitan_lite.config.checks.optimizer import optimizer_rules
from torchtitan_lite.config.checks.run import Run
from torchtitan_lite.config.checks.samples import samples_rules
from torchtitan_lite.config.checks.validation import validation_rules
from torchtitan_lite.config.help import value_of
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.convert.weights import parameter_shapes
from torchtitan_lite.distributed.context_parallel import context_parallel_problems
from torchtitan_lite.distributed.pipeline_plan import pipeline_problems
from torchtitan_lite.distributed.precision import resolve_param_dtype
from torchtitan_lite.distributed.tensor_parallel import tensor_parallel_problems
from torchtitan_lite.models.llama3.hf_config import HFConfigError, hf_config
from torchtitan_lite.models.llama3.lora import lora_spec
from torchtitan_lite.models.llama3.nf4 import BLOCK

# Least value of each number that has one.
AT_LEAST: dict[str, float] = {
    "profiling.profile_freq": 1,
    "metrics.log_freq": 1,
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "optimizer.muon_ns_steps": 1,
    "lr_scheduler.warmup_steps": 0,
    "training.local_batch_size": 1,
    "training.seq_len": 2,  # a row of one token has nothing to predict
    "training.max_norm": 0,
    "training.steps": 1,
    "training.gc_freq": 1,
    "training.seed": 0,
    "lora.rank": 0,
    "validation.freq": 1,
    "samples.freq": 1,
    "samples.max_new_tokens": 1,
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


def _ranges(run: Run) -> Iterator[str]:
    for name, least in AT_LEAST.items():
        value = value_of(run.config, name)
        if value < least:
            yield f"{name}={value}: must be at least {least}"
    for name in SHARES:
        value = value_of(run.config, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name}={value}: a share, from 0 to 1"
    for name in ("optimizer.beta1", "optimizer.beta2", "optimizer.muon_momentum"):
        value = value_of(run.config, name)
        if not 0 <= value < 1:
            yield f"{name}={value}: must be at least 0 and below 1"
    if run.config.optimizer.eps <= 0:
        yield (
            f"optimizer.eps={run.config.optimizer.eps}: must be above 0, for a weight without any gradient so far is "
            "updated by 0 / (0 + eps)"
        )


def _batch(run: Run) -> Iterator[str]:
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


def _parallelism(run: Run) -> Iterator[str]:
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


def _sequence(run: Run) -> Iterator[str]:
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


def _attention(run: Run) -> Iterator[str]:
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


def _activation_checkpoint(run: Run) -> Iterator[str]:
    option = run.config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isascii() and option.isdigit() and int(option) > 0):
        yield (
            f'activation_checkpoint.selective_ac_option="{option}": give "op", or a whole number n from 1 on to '
            "recompute each n-th block"
        )


def _compile(run: Run) -> Iterator[str]:
    if not run.config.compile.enable:
        return
    import torch._dynamo  # takes seconds, so only where it is used anyway

    backends = torch._dynamo.list_backends(exclude_tags=())
    if run.config.compile.backend not in backends:
        yield f"compile.backend={run.config.compile.backend}: torch knows {', '.join(backends)}"


def _lora(run: Run) -> Iterator[str]:
    try:
        spec = lora_spec(**asdict(run.config.lora))
    except ValueError as error:
        yield str(error)
        return
    if spec is None or run.config.lora.quantize_base == "none":
        return
    if run.degrees is not None and run.degrees.tp > 1:
        yield (
            "lora.quantize_base=nf4 with parallelism.tensor_parallel_degree: the blocks of a quantised matrix are not "
            "split over ranks; use pipeline or data parallelism, or leave one of the two out"
        )
    if run.config.training.enable_cpu_offload:
        yield (
            "lora.quantize_base=nf4 with training.enable_cpu_offload: quantised weights stay where the model computes; "
            "leave one of the two out"
        )
    for name, shape in {} if run.args is None else parameter_shapes(run.args).items():
        if name.startswith("layers.0.") and len(shape) == 2 and math.prod(shape) % BLOCK:
            yield (
                f"lora.quantize_base=nf4: {name} has {shape[0]} x {shape[1]} numbers, not a multiple of the {BLOCK} "
                "that share a scale"
            )


def _saving_and_loading(run: Run) -> Iterator[str]:
    checkpoint = run.config.checkpoint
    if checkpoint.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k=1: while the next checkpoint is written the only complete one must stay; "
            "keep at least 2, or 0 for all"
        )
    for name, unset in (("initial_load_path", None), ("initial_load_in_hf", False), ("load_step", -1)):
        value = getattr(checkpoint, name)
        if value != unset and not checkpoint.enable:
            yield f"checkpoint.{name}={value}: nothing is loaded without checkpoint.enable; set it too"
    for name in ("last_save_in_hf", "last_save_model_only"):
        if getattr(checkpoint, name) and not checkpoint.enable:
            yield f"checkpoint.{name}: nothing is saved without checkpoint.enable; set it too"
    starts_from_given = checkpoint.initial_load_in_hf or checkpoint.initial_load_path is not None
    if run.config.lora.rank > 0 and checkpoint.last_save_in_hf and not starts_from_given:
        yield (
            "checkpoint.last_save_in_hf with lora.rank: adapters cannot be merged into random weights; set "
            "checkpoint.initial_load_in_hf or checkpoint.initial_load_path"
        )
    if checkpoint.export_dtype != Checkpoint().export_dtype and not checkpoint.last_save_in_hf:
        yield f"checkpoint.export_dtype={checkpoint.export_dtype}: of no effect without checkpoint.last_save_in_hf"
    if checkpoint.last_save_in_hf and run.args is not None:
        try:
            hf_config(run.args, checkpoint.export_dtype)
        except HFConfigError as error:
            yield f"checkpoint.last_save_in_hf: {error}; leave it off, or change the model"


def _validation(run: Run) -> Iterator[str]:
    yield from validation_rules(run, (_sequence, _parallelism))


INSIDE_RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    _ranges,
    optimizer_rules,
    _batch,
    _parallelism,
    _sequence,
    _attention,
    _activation_checkpoint,
    _compile,
    _lora,
    _saving_and_loading,
    _validation,
    samples_rules,
)
