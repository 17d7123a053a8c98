"""Which floating-point type a run computes in."""

from __future__ import annotations

import torch


def resolve_param_dtype(name: str, device_type: str) -> torch.dtype:
    """The compute type that training.mixed_precision_param stands for on a device.

    ``auto`` is bfloat16, except on a CPU whose matrix kernels have no bf16 path: there bf16 products fall back to
    scalar code, measured 80 times slower than fp32.
    """
    if name == "auto":
        # Builds of torch without oneDNN (macOS) do not have the operator that is asked here.
        has_bf16 = device_type != "cpu" or (
            torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        return torch.bfloat16 if has_bf16 else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
