"""Layouts of a run as settings, and what they must agree on."""

import hashlib

import torch

from torchtitan_lite.distributed.mesh import DEGREE_KEYS, Degrees


def digest(tensor: torch.Tensor) -> str:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.sha256(full.detach().contiguous().numpy().tobytes()).hexdigest()


def layout_settings(degrees: Degrees, schedule: str = "1F1B") -> dict[str, object]:
    settings = {f"parallelism.{DEGREE_KEYS[name]}": degree for name, degree in vars(degrees).items()}
    return {**settings, "parallelism.pipeline_parallel_schedule": schedule}
