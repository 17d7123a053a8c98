"""torch.compile, block by block: one small graph that all layers with the same mask share."""

from __future__ import annotations

import torch
from torch import nn


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Compile the forward of each block of ``model.layers``, in place, as one full graph: a graph break or too many
    recompilations raise instead of falling back silently. Module and parameter names do not change, and hooks (FSDP's
    gathering of parameters) stay outside the graph. Apply it after activation checkpointing.
    """
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
