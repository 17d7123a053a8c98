"""Rules on the optimizer and its groups of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from torchtitan_lite.config.checks.run import Run
from torchtitan_lite.config.schema import Optimizer
from torchtitan_lite.models.llama3.lora import ADAPTER_NAMES, lora_spec


def optimizer_rules(run: Run) -> Iterator[str]:
    optimizer = run.config.optimizer
    yield from _algorithm(run)
    names = [] if run.args is None else run.args.parameter_names
    adapters = _adapter_names(run, names)
    tables = {f"optimizer.groups: entry {i}: pattern": table.pattern for i, table in enumerate(optimizer.groups, 1)}
    yield from _patterns(tables, adapters or names)  # beside adapters nothing is trained
    spared = {f"optimizer.no_decay: entry {i}": pattern for i, pattern in enumerate(optimizer.no_decay, 1)}
    yield from _patterns(spared, names + adapters)
    for i, table in enumerate(optimizer.groups, 1):
        for name, value in (("lr_factor", table.lr_factor), ("weight_decay", table.weight_decay)):
            if value is not None and value < 0:
                yield f"optimizer.groups: entry {i}: {name}={value}: must be at least 0"


def _algorithm(run: Run) -> Iterator[str]:
    optimizer, training, checkpoint = run.config.optimizer, run.config.training, run.config.checkpoint
    given = f"optimizer.name={optimizer.name}"
    if training.enable_cpu_offload and optimizer.name == "Muon":
        yield (
            f"{given} with training.enable_cpu_offload: matrices would be orthogonalised on the CPU, which takes "
            "longer than the rest of the step; use AdamW, or leave enable_cpu_offload off"
        )
    if optimizer.name != "AdamW8bit":
        return
    if training.enable_cpu_offload:
        yield (
            f"{given} with training.enable_cpu_offload: 8 bits are there to save GPU memory, where then no optimizer "
            "state is; use AdamW, or leave enable_cpu_offload off"
        )
    if optimizer.implementation == "foreach":
        yield (
            f"{given} has no optimizer.implementation=foreach; fused is its compiled step, for-loop runs operator by "
            "operator"
        )
    if checkpoint.enable and checkpoint.async_mode != "disabled":
        yield (
            f"{given} with checkpoint.async_mode={checkpoint.async_mode}: torch cannot copy moments of 8 bits for a "
            "save in the background; set async_mode to disabled"
        )


def _adapter_names(run: Run, names: list[str]) -> list[str]:
    """Of the adapters beside the parameters ``names``; none without any, or where the lora section is wrong."""
    try:
        spec = lora_spec(**asdict(run.config.lora))
    except ValueError:
        return []
    targets = () if spec is None else tuple(f".{target}.weight" for target in spec.targets)
    layers = [name.removesuffix(".weight") for name in names if name.endswith(targets)]
    return [f"{layer}.{adapter}" for layer in layers for adapter in ADAPTER_NAMES]


def _patterns(patterns: Mapping[str, str], names: list[str]) -> Iterator[str]:
    """``patterns`` by the words for each; ``names`` of parameters, empty where the model has no shape."""
    for where, pattern in patterns.items():
        try:
            expression = re.compile(pattern)
        except re.error as error:
            yield f'{where}="{pattern}": not a regular expression: {error}'
            continue
        if not pattern:
            yield f'{where}="": an empty pattern is found everywhere; give one, or "." for all parameters'
        elif names and not any(expression.search(name) for name in names):
            last = max(int(name.split(".")[1]) for name in names if name.startswith("layers."))
            shown = [name for name in names if not name.startswith("layers.") or name.startswith(f"layers.{last}.")]
            yield (
                f'{where}="{pattern}": no parameter that is trained has it in its name; there are {", ".join(shown)} '
                "and other layers"
            )


def optimizer_warnings(optimizer: Optimizer) -> Iterator[str]:
    """What will have no effect."""
    default = Optimizer()
    names = ("muon_momentum", "muon_ns_steps", "muon_adjust_lr_fn")
    unused = [name for name in names if getattr(optimizer, name) != getattr(default, name)]
    if unused and optimizer.name != "Muon":
        yield f"optimizer.{', '.join(unused)}: of no effect without optimizer.name=Muon"
