"""Rules that span several settings, or reach outside the configuration: model, machine, files.

They run before anything heavy is started, and all that is wrong is reported together. A message says what was given,
the rule it breaks, and what would work.
"""

from __future__ import annotations

from dataclasses import asdict

from torchtitan_lite.config.checks.inside import AT_LEAST, INSIDE_RULES
from torchtitan_lite.config.checks.outside import OUTSIDE_RULES
from torchtitan_lite.config.checks.run import Run
from torchtitan_lite.config.checks.warnings import warnings_about
from torchtitan_lite.config.load import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.mesh import resolve_degrees
from torchtitan_lite.models.llama3.flavors import model_args

__all__ = ["AT_LEAST", "check_config"]


def check_config(config: Config, *, world_size: int, device_type: str, outside: bool = True) -> list[str]:
    """Hold ``config`` against every rule, for a run of ``world_size`` processes on ``device_type`` ("cpu" or "cuda").

    outside: whether what lies outside of the configuration is looked at too: tokenizer, data, folders, packages.
    Starts nothing.
    Returns warnings: what will run, but perhaps not as meant. Raises ConfigError with all problems.
    """
    problems = []
    args = None
    try:
        args = model_args(config.model.flavor, asdict(config.model.args), config.model.hf_assets_path)
    except ValueError as error:
        problems.append(f"model.flavor={config.model.flavor} with model.args: {error}")
    degrees = None
    try:
        degrees = resolve_degrees(config.parallelism, world_size)
    except ValueError as error:
        problems.append(str(error))
    run = Run(config, world_size, device_type, args, degrees)
    for rule in (*INSIDE_RULES, *(OUTSIDE_RULES if outside else ())):
        problems.extend(rule(run))
    if problems:
        raise ConfigError(problems)
    return list(warnings_about(run))
