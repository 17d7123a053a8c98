"""A run on paper: memory, communication and time of a configuration on a number of GPUs, on a machine without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.estimate.hardware import Gpu
from torchtitan_lite.estimate.ledger import Traffic
from torchtitan_lite.estimate.memory import fullest_moment
from torchtitan_lite.estimate.parts import Bytes
from torchtitan_lite.estimate.plan import Plan
from torchtitan_lite.estimate.rank import RankCosts, fake_ranks, measure_ranks
from torchtitan_lite.estimate.schedule import Action, schedule_order
from torchtitan_lite.estimate.timing import StepTime, StepTimes, model_flops, step_traffic


@dataclass(frozen=True)
class RankEstimate:
    """One rank. The dictionaries' keys are settings of activation checkpointing."""

    costs: RankCosts
    fullest: dict[str, Bytes]
    saved: dict[str, int]  # bytes kept for the backward of a microbatch, in all its stages
    in_flight: int  # most microbatches whose forward waits for its backward, over its stages
    sent: Counter[Traffic]


@dataclass(frozen=True)
class Estimate:
    """Of a whole run."""

    plan: Plan
    gpu: Gpu
    per_node: int
    ranks: list[RankEstimate]
    model_flops: int
    time: StepTime | None  # None where single ranks were looked at, which do not tell
    peak: float
    peak_words: str

    @property
    def budget(self) -> int:
        """Bytes of GPU memory to fill: as sold, in 10^9; the rest that there is goes to CUDA, NCCL and gaps."""
        return int(self.gpu.memory_gb * 1e9)


def estimate(
    plan: Plan,
    gpu: Gpu,
    *,
    per_node: int | None = None,
    rank: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Estimate:
    """The ranks that differ most, or only ``rank``. Needs that no process group has been started.

    Raises ValueError for a rank that there is not, or a GPU of unknown speed.
    """
    if rank is not None and not 0 <= rank < plan.world_size:
        raise ValueError(f"--rank={rank}: there are ranks 0 to {plan.world_size - 1}")
    per_node = per_node or gpu.per_node
    with fake_ranks(plan.degrees.pp, 0):
        orders = schedule_order(plan.schedule, plan.degrees.pp, len(plan.stages), plan.microbatches)
    times = StepTimes(plan, gpu, per_node, orders)
    settings = plan.checkpoint_settings()
    chosen = typical_ranks(plan) if rank is None else [rank]
    measured = measure_ranks(plan, chosen, settings, progress)
    return Estimate(
        plan=plan,
        gpu=gpu,
        per_node=per_node,
        ranks=[_rank_estimate(plan, costs, orders[plan.degrees.place(costs.rank).pp]) for costs in measured],
        model_flops=model_flops(plan),
        time=times.step(measured, plan.own_setting) if rank is None or plan.schedule is None else None,
        peak=times.peak,
        peak_words=times.peak_words,
    )


def typical_ranks(plan: Plan) -> list[int]:
    """The first rank of the first, the second and the last place in the pipeline: the second has the most of those
    between, in layers and in microbatches at a time."""
    inner = plan.world_size // plan.degrees.pp
    return sorted({0, min(1, plan.degrees.pp - 1) * inner, (plan.degrees.pp - 1) * inner})


def _rank_estimate(plan: Plan, costs: RankCosts, order: list[Action]) -> RankEstimate:
    return RankEstimate(
        costs=costs,
        fullest={setting: fullest_moment(plan, costs, setting, order) for setting in costs.microbatches},
        saved={setting: sum(m[0].saved.total() for m in each) for setting, each in costs.microbatches.items()},
        in_flight=_most_in_flight(order),
        sent=step_traffic(plan, costs, plan.own_setting),
    )


def _most_in_flight(order: list[Action]) -> int:
    alive = most = 0
    for action in order:
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, alive)
    return most
