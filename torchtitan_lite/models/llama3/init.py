"""Initial weights that depend on the seed and the parameter's name alone, however the model is sharded.

Every parameter is drawn in blocks of rows, each from a CPU generator seeded by (seed, name, block). A rank draws only
the blocks that meet its shard, so that neither time nor memory grows with the whole model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.nf4 import fill_quantized
from torchtitan_lite.models.llama3.shards import local_part

# About how many elements are drawn from one seed. Part of what the weights of a seed are: do not change.
_BLOCK_ELEMENTS = 1 << 20


def init_std(args: ModelArgs, name: str) -> float | None:
    """Standard deviation of a parameter's initial values; None for norms, which start at one.

    Projections that write to the residual stream are scaled down with their depth. The output projection gives logits
    of standard deviation 1/2, so that training starts near ln(vocab) at every width.
    """
    if "norm" in name:
        return None
    if name == "tok_embeddings.weight" and not args.tie_embeddings:
        return 1.0
    if name in ("tok_embeddings.weight", "output.weight"):
        return 0.5 * args.dim**-0.5
    if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
        layer = int(name.split(".")[1])
        return 0.02 / (2 * (layer + 1)) ** 0.5
    return 0.02


@torch.no_grad()
def init_weights(model: nn.Module, args: ModelArgs, seed: int, *, only: Callable[[str], bool] | None = None) -> None:
    """Fill every parameter of ``model`` (plain or sharded, on any device) in place.

    only: says by a parameter's name whether it is to be filled; None: all are, and quantised layers.
    """
    if only is None:
        fill_quantized(model, lambda name, shape: _draw(f"{seed}/{name}", shape, shape, (0, 0), init_std(args, name)))
    for name, parameter in model.named_parameters():
        if only is not None and not only(name):
            continue
        if name.endswith(".lora_b"):  # so that an adapted model starts as the one it adapts
            parameter.zero_()
            continue
        std = init_std(args, name) if not name.endswith(".lora_a") else (3 * parameter.shape[1]) ** -0.5
        if std is None:
            parameter.fill_(1.0)
            continue
        local, offset = local_part(name, parameter)
        if local.numel():
            local.copy_(_draw(f"{seed}/{name}", parameter.shape, tuple(local.shape), offset, std))


def _draw(key: str, full: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...], std: float) -> Tensor:
    """The part of a parameter at ``offset`` with ``shape``: fp32, normal, cut off at three standard deviations.

    Whole rows are drawn, so of a matrix that tensor parallelism splits by columns (wo, w2) a rank draws tp times what
    it keeps. For 405B on 128 GPUs (pp 16, tp 8) those are 9.1e9 numbers a rank, two minutes; FSDP divides them.
    """
    block_rows = max(1, _BLOCK_ELEMENTS // math.prod(full[1:]))
    columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True))
    first, last = offset[0], offset[0] + shape[0]
    out = torch.empty(shape)
    for block in range(first // block_rows, (last - 1) // block_rows + 1):
        start = block * block_rows
        end = min(start + block_rows, full[0])
        digest = hashlib.sha256(f"{key}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        rows = torch.empty((end - start, *full[1:])).normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)
        low, high = max(first, start), min(last, end)
        out[low - first : high - first] = rows[(slice(low - start, high - start), *columns)]
    return out
