"""LoRA (Hu et al., 2022): the matrices of a model stay as they are, and a product of two thin ones beside each learns.

An adapted linear layer computes ``W x + scale * B (A dropout(x))``. A and B are parameters of the layer itself,
``lora_a`` [rank, in] and ``lora_b`` [out, rank], so that the names of all others are those of the plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# By the names of this project; Hugging Face's for the same layers are taken as well.
TARGETS: dict[str, str] = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
ADAPTER_NAMES = ("lora_a", "lora_b")


@dataclass(frozen=True)
class LoraSpec:
    """Adapters of a model. Raises ValueError, naming the numbers, for what cannot be.

    targets: layers that get one, in the order of :data:`TARGETS`.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = tuple(TARGETS)
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}: must be at least 0")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha={self.alpha}: must be above 0, or the adapters never change anything")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout={self.dropout}: must be at least 0 and below 1")
        if not self.targets:
            raise ValueError("lora.target_modules: names no layer, so that nothing would be trained")

    @property
    def scale(self) -> float:
        """Factor of the adapters' output; rank-stabilised (Kalajdzievski, 2023), it falls with the root of the rank."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def as_json(self) -> dict[str, Any]:
        """All that the trained adapters mean something by; dropout is none of it."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets), "rslora": self.rslora}


def lora_spec(
    rank: int,
    alpha: float,
    dropout: float,
    target_modules: list[str],
    rslora: bool = False,
    quantize_base: str = "none",
) -> LoraSpec | None:
    """The adapters that the lora section of a configuration asks for; None for rank 0.

    target_modules: names of layers, this project's or Hugging Face's.
    quantize_base: says how what lies beside the adapters is kept, which is none of theirs.
    Raises ValueError for an unknown one, listing all.
    """
    if rank == 0:
        return None
    known = {alias: name for name, alias in TARGETS.items()} | {name: name for name in TARGETS}
    if unknown := [name for name in target_modules if name not in known]:
        both = ", ".join(f"{name} ({alias})" for name, alias in TARGETS.items())
        raise ValueError(f"lora.target_modules: {', '.join(unknown)}: no such layer; adapters go beside {both}")
    wanted = {known[name] for name in target_modules}
    return LoraSpec(rank, alpha, dropout, tuple(name for name in TARGETS if name in wanted), rslora)


def apply_lora(model: nn.Module, spec: LoraSpec) -> None:
    """Give the target layers of every block their adapters, and freeze all else, in place. Parts may be missing.

    Apply it after tensor parallelism, whose split of a layer its adapters follow, and before activation checkpointing,
    compilation and FSDP.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.layers.values():
        for name, linear in block_linears(block):
            if name.rpartition(".")[2] in spec.targets:
                _adapt(linear, spec)


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_NAMES


def adapter_shapes(shapes: dict[str, tuple[int, ...]], spec: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every adapter parameter, from those of the plain model."""
    found = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer.startswith("layers.") and layer.rpartition(".")[2] in spec.targets:
            found[f"{layer}.lora_a"] = (spec.rank, shape[1])
            found[f"{layer}.lora_b"] = (shape[0], spec.rank)
    return found


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight of a plain layer that computes what the adapted one does without dropout, fp32."""
    return weight.float() + scale * (b.float() @ a.float())


def block_linears(block: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers of a block that may be targets, by their names in it, in the order of :data:`TARGETS`."""
    for name in TARGETS:
        part = "attention" if hasattr(block.attention, name) else "feed_forward"
        yield f"{part}.{name}", getattr(getattr(block, part), name)


def _adapt(linear: nn.Linear, spec: LoraSpec) -> None:
    weight = linear.weight
    out_features, in_features = weight.shape
    a = torch.empty(spec.rank, in_features, device=weight.device, dtype=torch.float32)
    b = torch.empty(out_features, spec.rank, device=weight.device, dtype=torch.float32)
    if hasattr(weight, "placements"):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        # Split by outputs, B is; split by inputs, A is. The other one is small and whole on every rank.
        by_outputs = weight.placements == (Shard(0),)
        a = distribute_tensor(a, weight.device_mesh, [Replicate() if by_outputs else Shard(1)])
        b = distribute_tensor(b, weight.device_mesh, [Shard(0) if by_outputs else Replicate()])
    linear.lora_a, linear.lora_b = nn.Parameter(a), nn.Parameter(b)
    linear.scale, linear.dropout = spec.scale, spec.dropout
    linear.__class__ = _AdaptedLinear


class _AdaptedLinear(nn.Linear):
    # A class, and not a function put on each layer: the compiler takes layers with the same code to be alike.

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        a, b = self.lora_a, self.lora_b
        if not hasattr(x, "placements"):
            return out + self._delta(x, a, b)
        from torch.distributed.tensor import DTensor, Partial

        # On local tensors, so that what DTensor would make of a sum under way, gathering it between A and B, is not
        # left to it: split by inputs, the sum over ranks is taken once, with that of W x.
        partial_sum, mesh = [Partial()], x.device_mesh
        by_outputs = out.placements[0].is_shard()
        x, a, b = (
            tensor.to_local(grad_placements=partial_sum if whole else None)
            for tensor, whole in ((x, by_outputs), (a, by_outputs), (b, not by_outputs))
        )
        return out + DTensor.from_local(self._delta(x, a, b), mesh, out.placements, run_check=False)

    def _delta(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(F.dropout(x, self.dropout, self.training), a), b)
