"""From the arguments of a model to what this rank holds of it, on the meta device: every parallelism, in its order.

The model's own code knows of none of this. Each step rewrites the modules that the step before it left.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import nn

from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.context_parallel import apply_context_parallel
from torchtitan_lite.distributed.fsdp import shard_model
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.pipeline import Pipeline, cut_stage
from torchtitan_lite.distributed.pipeline_plan import plan_stages, stages_of_rank
from torchtitan_lite.distributed.precision import resolve_param_dtype
from torchtitan_lite.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.lora import apply_lora, lora_spec
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.models.llama3.nf4 import quantized_layers, take_weights_out
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint, unpack_again
from torchtitan_lite.training.compile import compile_blocks
from torchtitan_lite.training.loss import LinearCrossEntropy


def build_parts(config: Config, args: ModelArgs, mesh: Mesh) -> dict[int, Transformer]:
    """What this rank holds, by the number of the pipeline stage (the whole model is stage 0): sharded, on the meta
    device.

    No rank ever holds more than its shard of anything: call ``to_empty`` on each part, then fill it.
    """
    device_type = mesh.fsdp.device_type
    param_dtype = resolve_param_dtype(config.training.mixed_precision_param, device_type)
    lora = lora_spec(**asdict(config.lora))
    parallelism, stages = config.parallelism, [range(args.n_layers)]
    if mesh.degrees.pp > 1:
        stages = plan_stages(args.n_layers, parallelism)
    own = stages_of_rank(parallelism.pipeline_parallel_schedule, mesh.place.pp, mesh.degrees.pp, len(stages))
    parts = {}
    for stage in own if mesh.degrees.pp > 1 else (0,):
        with torch.device("meta"):
            part = Transformer(args)
        if lora is not None:  # weights that are not trained need no fp32 master copy
            part.to(param_dtype)
        cut_stage(part, stages[stage], first=stage == 0, last=stage == len(stages) - 1)
        if mesh.degrees.tp > 1:
            apply_tensor_parallel(part, mesh.tp, async_tp=config.parallelism.enable_async_tensor_parallel)
        if lora is not None:
            apply_lora(part, lora)
            if config.lora.quantize_base == "nf4":
                take_weights_out(part)
        if mesh.degrees.cp > 1:
            apply_context_parallel(part, mesh.cp)
        _checkpoint_and_compile(part, config)
        shard_model(
            part,
            mesh.fsdp,
            param_dtype,
            resolve_param_dtype(config.training.mixed_precision_reduce, device_type),
            reshard_after_forward=reshards(config),
            cpu_offload=config.training.enable_cpu_offload,
        )
        parts[stage] = part
    return parts


def _checkpoint_and_compile(part: Transformer, config: Config) -> None:
    """What selective checkpointing keeps of a block is decided operation by operation, inside the compiled graph. A
    block that is recomputed whole is so from outside: then the graph is the same for blocks that are and blocks that
    are not, and torch 2.13, which cannot keep a DTensor's mesh for the backward of such a graph, need not.
    """
    recompute = config.activation_checkpoint
    inside = recompute.mode == "selective" and recompute.selective_ac_option == "op"
    if inside:
        apply_activation_checkpoint(part, recompute)
    if config.compile.enable and "model" in config.compile.components:
        if any(quantized_layers(part)) and not inside:
            unpack_again(part)
        compile_blocks(part, config.compile.backend)
    if not inside:
        apply_activation_checkpoint(part, recompute)


def build_pipeline(
    config: Config,
    args: ModelArgs,
    mesh: Mesh,
    parts: dict[int, Transformer],
    loss_fn: LinearCrossEntropy,
    device: torch.device,
) -> Pipeline | None:
    """What runs the stages of this rank, on ``device`` by now; None for a model in one piece."""
    if mesh.degrees.pp == 1:
        return None
    parallelism = config.parallelism
    rows, ranks_of_row = parallelism.pipeline_parallel_microbatch_size, mesh.degrees.cp * mesh.degrees.tp
    return Pipeline(
        parts,
        num_stages=len(plan_stages(args.n_layers, parallelism)),
        group=mesh.pp.get_group(),
        schedule=parallelism.pipeline_parallel_schedule,
        microbatch_size=rows,
        hidden_shape=(rows, config.training.seq_len // ranks_of_row, args.dim),
        hidden_dtype=resolve_param_dtype(config.training.mixed_precision_param, device.type),
        device=device,
        loss_fn=loss_fn,
    )


def reshards(config: Config) -> bool:
    """Whether gathered parameters are freed between a block's forward and its backward."""
    policy = config.parallelism.fsdp_reshard_after_forward
    return policy == "always" or (policy == "default" and config.parallelism.pipeline_parallel_degree == 1)


def as_one(parts: dict[int, Transformer]) -> nn.Module:
    """One module with the parameters of all parts under their names in the whole model: what is initialised, optimised
    and saved. It has no forward, unless there is but one part."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    one = nn.Module()
    one.layers = nn.ModuleDict({name: layer for part in parts.values() for name, layer in part.layers.items()})
    for name in ("tok_embeddings", "norm", "output"):
        for part in parts.values():
            if getattr(part, name) is not None:
                one.add_module(name, getattr(part, name))
    return one
