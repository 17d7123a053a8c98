"""In what order the ranks of a pipeline work, and how long they wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
_TORCHS_NAMES = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": BACKWARD_INPUT,
    "BACKWARD_WEIGHT": BACKWARD_WEIGHT,
}


class Action(NamedTuple):
    """One thing that a rank does: a pass of a microbatch through a stage."""

    kind: str
    stage: int
    microbatch: int


def schedule_order(schedule: str | None, ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    """What each rank does, in its order. None: no pipeline, one rank.

    The default process group must be one of ``ranks`` ranks, a fake one will do.
    """
    if schedule is None:
        return [[Action(kind, 0, i) for i in range(microbatches) for kind in (FORWARD, BACKWARD)]]
    if schedule in ("1F1B", "GPipe"):
        return [_one_stage(schedule, rank, ranks, microbatches) for rank in range(ranks)]
    # torch works the other ones out for all ranks when a schedule is made.
    made = get_schedule_class(schedule)(
        [
            PipelineStage(nn.Identity(), stage, stages, torch.device("cpu"))
            for stage in _own_stages(schedule, ranks, stages)
        ],
        microbatches,
        loss_fn=lambda *_: None,
        scale_grads=False,
    )
    return [list(_flat(made.pipeline_order[rank])) for rank in range(ranks)]


def _own_stages(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    from torchtitan_lite.distributed.pipeline_plan import stages_of_rank

    return tuple(stages_of_rank(schedule, torch.distributed.get_rank(), ranks, stages))


def _one_stage(schedule: str, rank: int, ranks: int, microbatches: int) -> list[Action]:
    ahead = microbatches if schedule == "GPipe" else min(ranks - rank, microbatches)
    order = [Action(FORWARD, rank, i) for i in range(ahead)]
    for i in range(microbatches):
        order.append(Action(BACKWARD, rank, i))
        if ahead + i < microbatches:
            order.append(Action(FORWARD, rank, ahead + i))
    return order


def _flat(actions: list[Any]) -> Iterator[Action]:
    """torch's actions as ours; those that overlap one after the other."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action.computation_type.name in _TORCHS_NAMES:
            yield Action(_TORCHS_NAMES[action.computation_type.name], action.stage_index, action.microbatch_index)


class Timing(NamedTuple):
    """Seconds of a step, and the share of them for which the rank that works longest waits for others."""

    seconds: float
    bubble: float


def simulate(orders: list[list[Action]], stages: int, seconds: Callable[[Action], float]) -> Timing:
    """Run the ranks' orders against each other: nothing starts before what it needs from another stage is there, and
    sending takes no time.

    Raises ValueError if they would wait for each other for ever.
    """
    finished: dict[tuple[str, int, int], float] = {}
    clock, place = [0.0] * len(orders), [0] * len(orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action = order[place[rank]]
                needed = _needed(action, stages)
                if needed is not None and needed not in finished:
                    break
                begin = max(clock[rank], finished.get(needed, 0.0))
                clock[rank] = begin + seconds(action)
                direction = FORWARD if action.kind == FORWARD else BACKWARD
                if action.kind != BACKWARD_WEIGHT:
                    finished[direction, action.stage, action.microbatch] = clock[rank]
                place[rank] += 1
                progress = True
    if stuck := [rank for rank, order in enumerate(orders) if place[rank] < len(order)]:
        raise ValueError(f"ranks {stuck} of the pipeline would wait for each other for ever")
    busy = max(sum(map(seconds, order)) for order in orders)
    return Timing(max(clock), 1 - busy / max(clock))


def _needed(action: Action, stages: int) -> tuple[str, int, int] | None:
    """What must be finished first, by rank or other: a forward that of the stage before, a backward that of the stage
    behind."""
    if action.kind == FORWARD:
        return None if action.stage == 0 else (FORWARD, action.stage - 1, action.microbatch)
    if action.kind == BACKWARD_WEIGHT or action.stage == stages - 1:
        return FORWARD, action.stage, action.microbatch
    return BACKWARD, action.stage + 1, action.microbatch
