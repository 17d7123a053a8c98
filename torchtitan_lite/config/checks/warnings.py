"""What will run, but perhaps not as meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.attention.backends import masks_documents
from torchtitan_lite.config.checks.optimizer import optimizer_warnings
from torchtitan_lite.config.checks.run import Run
from torchtitan_lite.config.checks.samples import samples_warnings
from torchtitan_lite.config.checks.validation import validation_warnings
from torchtitan_lite.config.schema import Lora, Parallelism
from torchtitan_lite.convert.dcp import StepFolder
from torchtitan_lite.convert.step_folder import is_complete
from torchtitan_lite.models.llama3.flavors import HF, join_flavor, split_flavor
from torchtitan_lite.models.llama3.hf_config import HFConfigError, args_from_hf, read_hf_config, unknown_fields


def warnings_about(run: Run) -> Iterator[str]:
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
    yield from optimizer_warnings(config.optimizer)
    yield from validation_warnings(config.validation)
    yield from samples_warnings(config.samples)
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
    if config.model.flavor.split("_")[0] == HF:
        unknown = unknown_fields(read_hf_config(config.model.hf_assets_path))
        if unknown:
            yield (
                f"model.hf_assets_path={config.model.hf_assets_path}: config.json has fields that are not known here, "
                f"and are passed over: {', '.join(unknown)}"
            )
    yield from _weights_of_another_model(run)
    lora, checkpoint = config.lora, config.checkpoint
    if lora.rank > 0 and not checkpoint.initial_load_in_hf and checkpoint.initial_load_path is None:
        yield (
            f"lora.rank={lora.rank}: the adapters are trained beside random weights; checkpoint.initial_load_in_hf or "
            "checkpoint.initial_load_path gives the model to finetune"
        )
    given, defaults = asdict(lora), asdict(Lora())
    if lora.rank == 0 and (unused := [name for name in given if given[name] != defaults[name]]):
        yield f"lora.{', '.join(unused)}: of no effect without lora.rank"


def _weights_of_another_model(run: Run) -> Iterator[str]:
    """What the shapes of weights do not tell, and has to be as it was when they were trained."""
    checkpoint = run.config.checkpoint
    path = checkpoint.initial_load_path
    if checkpoint.initial_load_in_hf:
        path = path or run.config.model.hf_assets_path
        if not (Path(path).expanduser() / "config.json").is_file():  # not needed beside a SIZE
            return
        try:
            trained = args_from_hf(read_hf_config(path))
        except HFConfigError as error:
            yield f"The weights in {path} are of a model that is not built here: {error}"
            return
    elif path is not None and is_complete(Path(path)):
        trained = StepFolder(path).args
    else:
        return
    names = ("n_heads", "n_kv_heads", "head_dim", "rope_theta", "rope_scaling", "norm_eps", "sliding_window")
    differing = [
        f"{name} {was} -> {now}"
        for name in names
        if (was := getattr(trained, name)) != (now := getattr(run.args, name))
    ]
    if differing:
        yield f"The model differs from that of the weights in {path}: {', '.join(differing)}"
