"""How model and batch are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP): each is sharded over data_parallel_shard_degree ranks and reads rows of its
    own; gradients are summed over all."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP2). -1: all that the other degrees
    leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a block's gathered parameters are freed after its forward and gathered again for its backward. default:
    yes, but not under pipeline parallelism, which would gather them for each microbatch."""

    fsdp_gradient_reduction: Literal["microbatch", "step"] = "microbatch"
    """When gradients are reduced under accumulation. microbatch: after each backward, so that only shards are kept
    (copies of HSDP are summed once a step all the same); step: after the last, which saves communication and keeps
    whole gradients meanwhile. Pipeline schedules always reduce once a step."""

    tensor_parallel_degree: int = 1
    """Ranks that split each layer's heads and hidden units, the vocabulary, and, between layers, the sequence."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with matrix products (CUDA, with compile.enable)."""

    pipeline_parallel_degree: int = 1
    """Ranks that split the layers."""

    pipeline_parallel_schedule: Literal[
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    """Order of the microbatches' forwards and backwards, as torch.distributed.pipelining names them. 1F1B and GPipe
    have one stage a rank, the others two or more."""

    pipeline_parallel_microbatch_size: int = 1
    """Rows of one microbatch of the pipeline."""

    pipeline_parallel_layers_per_stage: int | None = None
    """Layers of a stage, the embedding and the output counted by the two settings below. Unset: one stage a rank, two
    for schedules that loop."""

    pipeline_parallel_first_stage_less_layers: int = 1
    """How many layers the embedding counts as when layers are dealt out to stages."""

    pipeline_parallel_last_stage_less_layers: int = 1
    """How many layers the output projection and the loss count as when layers are dealt out to stages."""

    context_parallel_degree: int = 1
    """Ranks that split the tokens of each row."""
