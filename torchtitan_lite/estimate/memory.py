"""The fullest moment of a rank's step: what its stages have in memory, added up in the order of its schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from torchtitan_lite.estimate.ledger import GRADIENTS, OPTIMIZER, PARAMETERS, PIPELINE
from torchtitan_lite.estimate.parts import Bytes, Microbatch
from torchtitan_lite.estimate.plan import Plan
from torchtitan_lite.estimate.rank import RankCosts
from torchtitan_lite.estimate.schedule import BACKWARD_INPUT, FORWARD, Action

_KEPT_ON_HOST = (PARAMETERS, GRADIENTS, OPTIMIZER)
"""With training.enable_cpu_offload."""


def fullest_moment(plan: Plan, costs: RankCosts, setting: str, order: list[Action]) -> Bytes:
    """Bytes by kind on one rank, at the moment of a step when most are in use.

    setting: of activation checkpointing, one that ``costs`` has. order: what this rank does.
    """
    passes = dict(zip(costs.stages, costs.microbatches[setting], strict=True))
    if plan.schedule is not None:
        # Measured, the last one's backward reduces gradients layer by layer. A schedule does so when all is over, with
        # nothing of any microbatch beside it.
        passes = {stage: each[:-1] or each for stage, each in passes.items()}
    kept = Counter({PARAMETERS: costs.state.parameters, OPTIMIZER: costs.state.optimizer})
    if plan.schedule is not None:
        kept[PIPELINE] = pipeline_buffers(plan, costs.stages)
    moments = [kept + moment for moment in _moments(passes, order)]
    moments.append(costs.state.optimizer_step)
    if plan.config.training.enable_cpu_offload:
        moments = [Counter({k: v for k, v in moment.items() if k not in _KEPT_ON_HOST}) for moment in moments]
    return _fullest(moments)


def _moments(passes: dict[int, list[Microbatch]], order: list[Action]) -> Iterator[Bytes]:
    """One for each thing the rank does, without what it always keeps. Of a stage that does nothing at the time, it has
    what lies between microbatches."""
    forward = {stage: _fullest(m.forward for m in each) for stage, each in passes.items()}
    backward = {stage: _fullest(m.backward for m in each) for stage, each in passes.items()}
    resting = {stage: _fullest(m.after for m in each) for stage, each in passes.items()}
    in_flight: Counter[int] = Counter()
    for action in order:
        if action.kind != FORWARD:
            in_flight[action.stage] -= 1  # its own is part of what was measured
        moment = Counter(forward[action.stage] if action.kind == FORWARD else backward[action.stage])
        for stage, each in passes.items():
            if stage != action.stage:
                moment.update(resting[stage])
            moment.update({kind: size * in_flight[stage] for kind, size in each[0].saved.items()})
        yield moment
        if action.kind in (FORWARD, BACKWARD_INPUT):  # what the weights' gradients need is kept for them
            in_flight[action.stage] += 1


def _fullest(moments: Iterable[Bytes]) -> Bytes:
    return max(moments, key=Counter.total)


def pipeline_buffers(plan: Plan, stages: Iterable[int]) -> int:
    """Bytes that torch's stages allocate, for good, to receive hidden states and their gradients: one for each
    microbatch of a step."""
    last = len(plan.stages) - 1
    received = sum((stage != 0) + (stage != last) for stage in stages)
    return received * plan.microbatches * math.prod(plan.hidden) * plan.param_dtype.itemsize
