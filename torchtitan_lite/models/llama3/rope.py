"""Rotary position embedding (Su et al., 2021), half-split as Hugging Face has it, with the scaling of
longer contexts.

Everything up to the cosines is fp32 and nothing is stored: frequencies are computed anew in each forward, so no cast of
the model, no meta device and no checkpoint can spoil them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchtitan_lite.models.llama3.args import RopeScaling


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """fp32 [head_dim / 2]: angle per position of each channel pair.

    Linear scaling (Chen et al., 2023) divides all by ``factor``. Llama 3.1's goes by wavelength: those beyond
    ``original_max_seq_len / low_freq_factor`` are stretched by ``factor``, those under ``original_max_seq_len /
    high_freq_factor`` kept, with a linear blend in between.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponent
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelength = 2 * math.pi / frequencies
    keep = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions int [batch, seq] -> cosines and sines, fp32 [batch, seq, 1, head_dim] (broadcast over heads)."""
    # An element-wise product: a matrix product might run in TF32 and blur large positions.
    angles = positions.to(torch.float32)[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, seq, heads, head_dim]: channel i pairs with i + head_dim / 2. Computed in fp32, returned in x's
    type."""
    x32 = x.float()
    first, second = x32.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x32 * cos + rotated * sin).to(x.dtype)
