"""A model on one device, from weights in any format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torchtitan_lite.convert.weights import StoredWeights
from torchtitan_lite.models.llama3.model import Transformer


def load_model(
    weights: StoredWeights,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int], Any] = lambda parameters: None,
) -> Transformer:
    """The model of ``weights``, with no more of them in memory at a time than one tensor beside it."""
    with torch.device("meta"):
        model = Transformer(replace(weights.args, varlen_engine="auto")).to(dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read([name])[name])
            progress(parameter.numel())
    return model.eval()
