"""The least time a step could take: products at the GPU's peak and bytes at the pace of its links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from torchtitan_lite.estimate.hardware import Gpu, bandwidth
from torchtitan_lite.estimate.ledger import ATTENTION_CALLS, MATMUL_FLOPS, Traffic
from torchtitan_lite.estimate.parts import Done, Microbatch
from torchtitan_lite.estimate.plan import Plan
from torchtitan_lite.estimate.rank import RankCosts
from torchtitan_lite.estimate.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, simulate
from torchtitan_lite.models.llama3.lora import lora_spec
from torchtitan_lite.observability.flops import attended_pairs, published_peak, step_flops
from torchtitan_lite.training.adapters import adapter_params

# Between products that need what it brings, so that nothing can go on meanwhile; but for tensor parallelism that is
# compiled to be asynchronous.
_IN_THE_WAY = ("tp", "cp")


def model_flops(plan: Plan) -> int:
    """Of a step of the whole run, by the convention of observability/flops.py: no recomputation."""
    args = plan.args
    pairs = sum(attended_pairs(plan.document_ids[:1], spec) for spec in args.mask_specs)
    rows = plan.tokens_per_step // plan.config.training.seq_len
    adapters = adapter_params(args, lora_spec(**asdict(plan.config.lora)))
    return step_flops(
        matmul_params=args.matmul_params + adapters,
        frozen_params=args.matmul_params if adapters else 0,
        attention_width=args.n_heads * args.head_dim,
        tokens=plan.tokens_per_step,
        pairs=pairs * rows,
    )


def step_traffic(plan: Plan, costs: RankCosts, setting: str) -> Counter[Traffic]:
    """Bytes that a rank sends in a step, by collective and dimension of the mesh."""
    sent: Counter[Traffic] = Counter()
    for microbatches in costs.microbatches[setting]:
        for microbatch, times in over_step(microbatches, plan.microbatches):
            for done in (microbatch.forward_done, microbatch.backward_done):
                sent.update({key: times * n for key, n in done.items() if isinstance(key, Traffic)})
    hidden = torch.Size(plan.hidden).numel() * plan.param_dtype.itemsize
    last = len(plan.stages) - 1
    # Neighbours that one rank holds, at the turn of a V, hand over without sending.
    exits = sum(
        (stage != last and stage + 1 not in costs.stages) + (stage != 0 and stage - 1 not in costs.stages)
        for stage in costs.stages
    )
    sent[Traffic("send", "pp")] = exits * plan.microbatches * hidden
    return Counter({key: n for key, n in sent.items() if n})


def over_step(microbatches: list[Microbatch], count: int) -> Iterable[tuple[Microbatch, int]]:
    """The measured microbatches of a step (the first, one between, the last), and how often each occurs."""
    if len(microbatches) < 3:
        return [(microbatch, 1) for microbatch in microbatches]
    first, between, last = microbatches
    return [(first, 1), (between, count - 2), (last, 1)]


@dataclass(frozen=True)
class StepTime:
    """Seconds, and where they go.

    Attributes:
        seconds: of the step.
        compute, in_the_way, bubble: of the rank that works longest: its products; tp and cp between them; waiting for
            other stages.
        behind: communication of FSDP and HSDP, of which ``exposed`` is not hidden by the others.
        hardware_flops: of all ranks, with recomputation.
    """

    seconds: float
    compute: float
    in_the_way: float
    bubble: float
    behind: float
    exposed: float
    hardware_flops: float


class StepTimes:
    """How long steps take on a kind of GPU. Raises ValueError if nothing is published of its speed."""

    def __init__(self, plan: Plan, gpu: Gpu, per_node: int, orders: list[list[Action]]) -> None:
        self.plan, self.orders = plan, orders
        peak = published_peak(gpu.device_name, plan.param_dtype)
        if peak is None:
            raise ValueError(f"no peak is published for {gpu.device_name} in {plan.param_dtype}")
        self.peak, self.peak_words = peak
        self.bandwidths = {
            dimension: bandwidth(gpu, plan.degrees, dimension, per_node)
            for dimension in ("pp", "dp_replicate", "fsdp", "cp", "tp")
        }

    def step(self, ranks: list[RankCosts], setting: str) -> StepTime:
        """ranks: with first and last stage, and one between if there is any."""
        measured = {
            stage: microbatches[-2] if len(microbatches) > 1 else microbatches[0]
            for costs in ranks
            for stage, microbatches in zip(costs.stages, costs.microbatches[setting], strict=True)
        }
        work = {stage: self._work(stage, measured) for stage in range(len(self.plan.stages))}

        def seconds(action: Action) -> float:
            forward, backward = (flops / self.peak + waiting for flops, waiting in work[action.stage])
            # A split backward spends half its products on each part.
            return {
                FORWARD: forward,
                BACKWARD: backward,
                BACKWARD_INPUT: backward / 2,
                BACKWARD_WEIGHT: backward / 2,
            }[action.kind]

        timing = simulate(self.orders, len(self.plan.stages), seconds)
        busiest = max(self.orders, key=lambda order: sum(map(seconds, order)))
        busy = sum(map(seconds, busiest))
        stages = [a.stage for a in busiest if a.kind == FORWARD]
        compute = sum(flops for stage in stages for flops, _ in work[stage]) / self.peak
        behind, reduce = max((self._behind(costs, setting) for costs in ranks), default=(0.0, 0.0))
        # Pipelines reduce gradients when all is done; otherwise each layer's go while the next is at work.
        exposed = reduce if self.plan.schedule is not None else max(0.0, behind - timing.seconds)
        flops = sum(flops for stage in work.values() for flops, _ in stage) * self.plan.microbatches
        return StepTime(
            seconds=timing.seconds + exposed,
            compute=compute,
            in_the_way=max(0.0, busy - compute),
            bubble=max(0.0, timing.seconds - busy),
            behind=behind,
            exposed=exposed,
            hardware_flops=flops * self.plan.world_size / self.plan.degrees.pp,
        )

    def _work(self, stage: int, measured: dict[int, Microbatch]) -> list[tuple[float, float]]:
        """FLOPs and seconds of waiting for tp and cp, of one microbatch's forward and of its backward."""
        layers, scale = self.plan.stages[stage], 1.0
        if stage not in measured:  # it has neither embedding nor output, as have others that were measured
            inner = [s for s in measured if 0 < s < len(self.plan.stages) - 1]
            scale = len(layers) / len(self.plan.stages[inner[0]])
            stage = inner[0]
        microbatch = measured[stage]
        width = self.plan.args.n_heads * self.plan.args.head_dim // self.plan.degrees.tp
        attention = 4 * width * self.plan.pairs(layers)
        once = microbatch.forward_done[ATTENTION_CALLS]
        again = microbatch.backward_done[ATTENTION_CALLS] / once
        return [
            (scale * microbatch.forward_done[MATMUL_FLOPS] + attention, scale * self._waiting(microbatch.forward_done)),
            (
                scale * microbatch.backward_done[MATMUL_FLOPS] + (2 + again) * attention,
                scale * self._waiting(microbatch.backward_done),
            ),
        ]

    def _waiting(self, done: Done) -> float:
        hidden = ("tp",) if self.plan.config.parallelism.enable_async_tensor_parallel else ()
        return sum(
            n / self.bandwidths[key.group]
            for key, n in done.items()
            if isinstance(key, Traffic) and key.group in _IN_THE_WAY and key.group not in hidden
        )

    def _behind(self, costs: RankCosts, setting: str) -> tuple[float, float]:
        """Seconds of a step's FSDP and HSDP communication, and those of them that reduce gradients."""
        seconds = {
            key: n / self.bandwidths[key.group]
            for key, n in step_traffic(self.plan, costs, setting).items()
            if key.group in ("fsdp", "dp_replicate")
        }
        return sum(seconds.values()), sum(s for key, s in seconds.items() if key.collective != "all-gather")
