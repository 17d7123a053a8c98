"""Which algorithm, learning rate and weight decay each parameter has, told from its name and shape alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_lite.config.schema import Optimizer


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that are updated alike.

    Attributes:
        algorithm: a value of ``optimizer.name``; that, or under Muon perhaps AdamW.
        lr_factor: times the learning rate of the step.
        names: of the parameters, in the whole model.
    """

    algorithm: str
    lr_factor: float
    weight_decay: float
    names: tuple[str, ...]


def group_parameters(shapes: Mapping[str, Sequence[int]], config: Optimizer) -> list[ParamGroup]:
    """Every parameter's group, none of them empty, in the order of ``shapes``, which are by name in the whole model.

    The first table of ``optimizer.groups`` whose pattern is found in a name sets its factor, and its weight decay if it
    gives one. Else ``no_decay`` decides between none and ``optimizer.weight_decay``.
    """
    members: dict[tuple[str, float, float], list[str]] = {}
    for name, shape in shapes.items():
        table = next((table for table in config.groups if re.search(table.pattern, name)), None)
        decay = None if table is None else table.weight_decay
        if decay is None:
            decay = 0.0 if any(re.search(pattern, name) for pattern in config.no_decay) else config.weight_decay
        factor = 1.0 if table is None else table.lr_factor
        members.setdefault((_algorithm(name, shape, config.name), factor, decay), []).append(name)
    return [ParamGroup(*rule, tuple(names)) for rule, names in members.items()]


def _algorithm(name: str, shape: Sequence[int], chosen: str) -> str:
    """Muon is for matrices between hidden states. Embedding and output are matrices too, but each row is a token's."""
    hidden_matrix = name.startswith("layers.") and len(shape) == 2
    return "AdamW" if chosen == "Muon" and not hidden_matrix else chosen
