"""QLoRA (Dettmers et al., 2023): the frozen matrices of the blocks in 4-bit NormalFloat, as torchao does it.

Every 64 numbers of a matrix share a scale, which itself is kept in 8 bits. A layer's weight is then a buffer, outside
of what FSDP shards and checkpoints hold, and ``F.linear`` unpacks it whenever it is needed, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.models.llama3.lora import block_linears
from torchtitan_lite.observability.logging import quiet_import

BLOCK = 64
"""Numbers that share a scale."""
_TWO_ZEROS = 0x77  # a byte of codes; the eighth of the sixteen values is 0
_SCALES = 256  # that share a factor of their own; fewer where that does not come out even


def missing() -> str | None:
    """What to install where torchao does not serve this format here; None where it does."""
    try:
        _torchao()
    except ImportError as error:
        return f"NF4 needs the package torchao, 0.18 or newer ({error}); pip install -U torchao"
    return None


def _torchao() -> Any:
    with quiet_import():
        from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor
    return nf4_tensor


@torch.no_grad()
def quantize(weight: Tensor) -> Tensor:
    """An NF4Tensor with the shape, device and, unpacked, the type of ``weight``, whose size is a multiple of
    :data:`BLOCK`."""
    packed = _torchao().to_nf4(weight.contiguous(), BLOCK, math.gcd(_SCALES, weight.numel() // BLOCK))
    # torchao divides zeros by zero, takes what comes of it for -1, and has scales that are no longer quite zero.
    of_zeros = ~weight.reshape(-1, BLOCK).any(dim=1, keepdim=True)
    packed.quantized_data.view(-1, BLOCK // 2).masked_fill_(of_zeros, _TWO_ZEROS)
    return packed


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What a layer computes with whose weight was quantised in ``dtype``."""
    return quantize(weight.to(dtype)).to(dtype)


def take_weights_out(model: nn.Module) -> None:
    """Leave room for quantised weights in the blocks of ``model``, in place; after the adapters and before FSDP."""
    for block in model.layers.values():
        for _, linear in block_linears(block):
            del linear.weight
            linear.register_buffer("weight", None, persistent=False)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that :func:`take_weights_out` has been at, by the names that their weights have in the plain model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "weight" in module._buffers:
            yield f"{name}.weight", module


def fill_quantized(model: nn.Module, read: Callable[[str, tuple[int, int]], Tensor]) -> None:
    """Give those layers their weights, one after the other, in the type and on the device of the frozen rest.

    read: returns the whole weight of a name and a shape.
    """
    for name, linear in quantized_layers(model):
        norm = model.layers[name.split(".")[1]].attention_norm.weight
        linear.weight = quantize(read(name, (linear.out_features, linear.in_features)).to(norm.device, norm.dtype))
