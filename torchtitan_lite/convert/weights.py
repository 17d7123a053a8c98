"""What every format of weights comes down to: this project's names, and tensors that are read when asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.model import Transformer

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types that weights are exported in."""


_LISTED = 10  # of each kind of problem


class WeightsError(ValueError):
    """Weights are missing, damaged, or not those of the model; says which and what there is."""


class Stored(NamedTuple):
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredWeights(ABC):
    """The weights of one model on disk.

    Attributes:
        place: where they lie, for messages.
        args: of the model.
        tensors: every tensor, by its parameter's name in this project, in the model's order.
    """

    place: Path
    args: ModelArgs
    tensors: Mapping[str, Stored]

    @abstractmethod
    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors, in the types they are stored in."""

    def groups(self, dtype: torch.dtype | None, most_bytes: int) -> Iterator[list[str]]:
        """All names in order, cut into runs of at most ``most_bytes`` (or a single tensor) in ``dtype``."""
        group: list[str] = []
        total = 0
        for name, stored in self.tensors.items():
            size = torch.Size(stored.shape).numel() * (dtype or stored.dtype).itemsize
            if group and total + size > most_bytes:
                yield group
                group, total = [], 0
            group.append(name)
            total += size
        if group:
            yield group


def parameter_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Every parameter of a model, by name, in order."""
    with torch.device("meta"):
        model = Transformer(args)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """A tensor as it is exported. Raises WeightsError where ``dtype`` cannot hold its values."""
    exported = tensor.to(DTYPES[dtype]).contiguous()
    if not torch.isfinite(exported).all() and torch.isfinite(tensor).all():
        raise WeightsError(f"{name} has values beyond {dtype}'s range; export it as bfloat16 or float32")
    return exported


def require_same(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], place: Path, hint: str = ""
) -> None:
    """Raise WeightsError unless the tensors at ``place`` are those that a model has, listing what is missing, unknown
    or of another shape, under the names that are used there."""
    missing = [f"{name}: missing" for name in expected if name not in found]
    unknown = [f"{name}: not a tensor of this model" for name in found if name not in expected]
    misshapen = [
        f"{name}: {list(found[name])} there, {list(shape)} in this model"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    lines = []
    for kind, problems in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen)):
        lines += problems[:_LISTED]
        if len(problems) > _LISTED:
            lines.append(f"and {len(problems) - _LISTED} more {kind}")
    if lines:
        raise WeightsError(f"{place} does not hold the weights of this model{hint}:\n  " + "\n  ".join(lines))


def require_floating(tensors: Mapping[str, torch.dtype], place: Path) -> None:
    """Raise WeightsError where tensors are not of a type that training starts from: they are quantised."""
    allowed = (torch.float64, *DTYPES.values())
    wrong = {str(dtype).removeprefix("torch.") for dtype in tensors.values() if dtype not in allowed}
    if wrong:
        names = [name for name, dtype in tensors.items() if dtype not in allowed]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise WeightsError(
            f"{place}: tensors of type {', '.join(sorted(wrong))} ({names[0]}{more}); quantised weights are not read, "
            "give those in float32, bfloat16 or float16"
        )
