"""The optimizer: as many of torch's as the parameters of a rank need, stepping as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite.config.schema import Optimizer
from torchtitan_lite.observability.logging import logger
from torchtitan_lite.training.adamw8bit import build_adamw8bit
from torchtitan_lite.training.muon import ShardedMuon
from torchtitan_lite.training.param_groups import ParamGroup, group_parameters


class Optimizers:
    """One torch optimizer for each algorithm; none on a rank without trainable parameters.

    Attributes:
        optimizers: torch's.
        groups: what each of :attr:`param_groups` is, in the same order.
    """

    def __init__(self, parts: Sequence[tuple[torch.optim.Optimizer, Sequence[ParamGroup]]]) -> None:
        self.optimizers = tuple(optimizer for optimizer, _ in parts)
        # Beside torch's own, which are saved and loaded: factors are the configuration's alone.
        self.groups = [group for _, groups in parts for group in groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> defaultdict[nn.Parameter, dict[str, Any]]:
        """By parameter; like torch's, empty for one that has not been updated yet."""
        states = (entry for optimizer in self.optimizers for entry in optimizer.state.items())
        return defaultdict(dict, states)

    def set_lr(self, lr: float) -> None:
        """Give every group its share of the learning rate of a step."""
        for values, group in zip(self.param_groups, self.groups, strict=True):
            if isinstance(values["lr"], torch.Tensor):
                values["lr"].fill_(lr * group.lr_factor)
            else:
                values["lr"] = lr * group.lr_factor

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def build_optimizer(model: nn.Module, config: Optimizer) -> Optimizers:
    """What updates the trainable parameters of ``model``, which have their names in the whole model, in groups as the
    configuration has them. Master weights are fp32, as FSDP2 keeps them."""
    return optimizers_for(dict(model.named_parameters()), config)


def optimizers_for(parameters: Mapping[str, nn.Parameter], config: Optimizer) -> Optimizers:
    """As :func:`build_optimizer`, from the parameters by their names in the whole model."""
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    by_algorithm: dict[str, list[ParamGroup]] = {}
    for group in group_parameters({name: p.shape for name, p in trainable.items()}, config):
        by_algorithm.setdefault(group.algorithm, []).append(group)
    return Optimizers(
        [(_build(algorithm, groups, trainable, config), groups) for algorithm, groups in by_algorithm.items()]
    )


def _build(
    algorithm: str, groups: list[ParamGroup], parameters: Mapping[str, nn.Parameter], config: Optimizer
) -> torch.optim.Optimizer:
    param_groups = [
        {
            "params": [parameters[name] for name in group.names],
            "lr": config.lr * group.lr_factor,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]
    if algorithm == "Muon":
        return ShardedMuon(
            param_groups,
            momentum=config.muon_momentum,
            ns_steps=config.muon_ns_steps,
            adjust_lr_fn=config.muon_adjust_lr_fn,
        )
    settings = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if algorithm == "AdamW8bit":
        return build_adamw8bit(param_groups, compiled=config.implementation == "fused", **settings)
    return {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[algorithm](
        param_groups,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
        **settings,
    )


def log_groups(optimizers: Optimizers, pp_group: dist.ProcessGroup) -> None:
    """A line for each group of the whole model, whatever stages hold it. All ranks of the pipeline call this."""
    own = {}
    for group, values in zip(optimizers.groups, optimizers.param_groups, strict=True):
        count = len(values["params"]), sum(parameter.numel() for parameter in values["params"])
        own[group.algorithm, group.lr_factor, group.weight_decay] = count
    stages: list[Any] = [None] * pp_group.size()
    dist.all_gather_object(stages, own, group=pp_group)
    for rule in dict.fromkeys(rule for stage in stages for rule in stage):
        tensors, parameters = map(sum, zip(*(stage[rule] for stage in stages if rule in stage), strict=True))
        algorithm, factor, decay = rule
        lr = "" if factor == 1 else f"lr x {factor:g}, "
        logger.info(f"{algorithm} on {tensors} tensors, {parameters:,} parameters: {lr}weight decay {decay:g}")
