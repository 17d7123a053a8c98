"""What a run with adapters keeps beside them: which they are, and which weights they were trained beside."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.config.schema import Config
from torchtitan_lite.convert.step_folder import CheckpointError
from torchtitan_lite.convert.weights import parameter_shapes
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.lora import LoraSpec, adapter_shapes
from torchtitan_lite.observability.logging import logger


def adapter_params(args: ModelArgs, spec: LoraSpec | None) -> int:
    """Parameters of a model's adapters, 0 without any."""
    if spec is None:
        return 0
    return sum(prod(shape) for shape in adapter_shapes(parameter_shapes(args), spec).values())


def base_of(config: Config, dtype: torch.dtype) -> dict[str, Any] | None:
    """Where the weights beside the adapters come from, and how they are kept; None where they are those of the seed.

    dtype: that the model computes in.
    """
    checkpoint = config.checkpoint
    path = checkpoint.initial_load_path
    if checkpoint.initial_load_in_hf and path is None:
        path = config.model.hf_assets_path
    if path is None:
        return None
    base = {"path": str(Path(path).expanduser().absolute()), "in_hf": checkpoint.initial_load_in_hf}
    if config.lora.quantize_base == "nf4":
        base["nf4"] = str(dtype).removeprefix("torch.")
    return base


def require_same_adapters(own: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint's adapters mean something else than this run's.

    Args:
        own: ``lora`` and ``base`` of this run; empty without adapters.
        state: the checkpoint's train_state.
    """
    was, now = state.get("lora"), own.get("lora")
    if was != now:
        differing = [name for name in now or was if (was or {}).get(name) != (now or {}).get(name)]
        values = ", ".join(f"{name} {(was or {}).get(name)} -> {(now or {}).get(name)}" for name in differing)
        raise CheckpointError(
            f"The checkpoint's adapters are not those of the lora section ({values}); set it as it was, or begin anew "
            "with another job.dump_folder"
        )
    if was is None or state.get("base") == own["base"]:
        return
    if own["base"] is None:
        raise CheckpointError(
            f"The checkpoint's adapters were trained beside the weights of {state['base']['path']}, and not beside "
            "random ones; set checkpoint.initial_load_in_hf or checkpoint.initial_load_path as it was"
        )
    logger.warning(f"The adapters were trained beside other weights: {state.get('base')} -> {own['base']}")
