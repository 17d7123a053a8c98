"""How a model is cut into the stages of a pipeline, and what each schedule asks for: arithmetic on plain numbers.

The schedules are those of torch.distributed.pipelining, which takes seconds to import; nothing here does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.models.llama3.args import ModelArgs


@dataclass(frozen=True)
class Schedule:
    """What there is to know of a schedule.

    placement: single: one stage a rank. loop: rank r of n holds stages r, r + n, r + 2n, ... v: r and 2n - 1 - r.
    microbatches: how many it takes. any; stages: as many as there are stages, or more; rounds: a multiple of
        max(1, microbatches // ranks), its number of rounds.
    splits_backward: the gradients of a stage's weights are computed later than that of its input ("zero bubble").
    for_evaluation: the schedule of the same placement whose forwards work for any number of microbatches.
    """

    placement: Literal["single", "loop", "v"]
    microbatches: Literal["any", "stages", "rounds"]
    splits_backward: bool
    for_evaluation: str


SCHEDULES: dict[str, Schedule] = {
    "1F1B": Schedule("single", "stages", splits_backward=False, for_evaluation="GPipe"),
    "GPipe": Schedule("single", "any", splits_backward=False, for_evaluation="GPipe"),
    "Interleaved1F1B": Schedule("loop", "rounds", splits_backward=False, for_evaluation="LoopedBFS"),
    "LoopedBFS": Schedule("loop", "any", splits_backward=False, for_evaluation="LoopedBFS"),
    "InterleavedZeroBubble": Schedule("loop", "rounds", splits_backward=True, for_evaluation="LoopedBFS"),
    "ZBVZeroBubble": Schedule("v", "any", splits_backward=True, for_evaluation="ZBVZeroBubble"),
    "DualPipeV": Schedule("v", "stages", splits_backward=True, for_evaluation="ZBVZeroBubble"),
}


def plan_stages(n_layers: int, parallelism: Parallelism) -> list[range]:
    """The layers of every stage of the pipeline. Raises ValueError, with the arithmetic, if no such cut exists."""
    return deal_layers(
        n_layers,
        number_of_stages(n_layers, parallelism),
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )


def number_of_stages(n_layers: int, parallelism: Parallelism) -> int:
    """Stages of the whole pipeline. Raises ValueError if pipeline_parallel_layers_per_stage does not fit the ranks."""
    ranks = parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    placement = SCHEDULES[schedule].placement
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    if per_stage is None:
        return ranks if placement == "single" else 2 * ranks

    layers = n_layers + first + last

    def fits(per_stage: int) -> bool:
        per_rank, rest = divmod(-(-layers // per_stage), ranks)
        return rest == 0 and (per_rank >= 2 if placement == "loop" else per_rank == (1 if placement == "single" else 2))

    def leaves_none_empty(stages: int) -> bool:
        try:
            return bool(deal_layers(n_layers, stages, first, last))
        except ValueError:
            return False

    if per_stage < 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_layers_per_stage={per_stage}: must be at least 1; or leave it unset, for "
            "as many stages as the schedule needs"
        )
    stages = -(-layers // per_stage)
    if not fits(per_stage):
        wanted = {"single": "one stage", "loop": "two or more stages", "v": "two stages"}[placement]
        able = [n for n in range(1, n_layers + 1) if fits(n) and leaves_none_empty(-(-layers // n))]
        remedy = f"{', '.join(map(str, able))} would do, or leave it unset" if able else "no value does; leave it unset"
        if not able and not leaves_none_empty(ranks if placement == "single" else 2 * ranks):
            remedy = "the model has too few layers for any; use fewer ranks"
        raise ValueError(
            f"parallelism.pipeline_parallel_layers_per_stage={per_stage}: {_counted(n_layers, first, last)} make "
            f"{_plural(stages, 'stage')}, but {schedule} needs {wanted} on each of {ranks} ranks; {remedy}"
        )
    return stages


def deal_layers(n_layers: int, stages: int, first_less: int, last_less: int) -> list[range]:
    """The layers of each stage, as even as can be when the embedding counts as ``first_less`` layers and the output as
    ``last_less``. What does not divide goes to the first stage, then to the last, as neither embedding nor output need
    weigh whole layers, then to those between, from the front.

    Raises ValueError if a stage is left without any layer.
    """
    each, extra = divmod(n_layers + first_less + last_less, stages)
    order = [0, stages - 1, *range(1, stages - 1)]
    sizes = [each + (order.index(stage) < extra) for stage in range(stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    if empty := [stage for stage, size in enumerate(sizes) if size < 1]:
        lower = ", or lower the two settings named" if first_less + last_less else ""
        raise ValueError(
            f"parallelism: {_counted(n_layers, first_less, last_less)} over {_plural(stages, 'pipeline stage')} leave "
            f"stage(s) {', '.join(map(str, empty))} without any; use fewer stages{lower}"
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _counted(n_layers: int, first_less: int, last_less: int) -> str:
    return (
        f"{_plural(n_layers, 'layer')} + {first_less} (pipeline_parallel_first_stage_less_layers) + {last_less} "
        f"(pipeline_parallel_last_stage_less_layers) = {n_layers + first_less + last_less}"
    )


def stages_of_rank(schedule: str, rank: int, ranks: int, stages: int) -> tuple[int, ...]:
    """The stages that a rank of the pipeline holds, rising."""
    if SCHEDULES[schedule].placement == "v":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, stages, ranks))


def rank_of_loss(schedule: str, ranks: int) -> int:
    """The rank of the pipeline that holds the last stage, and so the loss."""
    return 0 if SCHEDULES[schedule].placement == "v" else ranks - 1


def takes_microbatches(schedule: str, microbatches: int, ranks: int, stages: int) -> bool:
    """Whether a schedule works for this number of microbatches (at least 1)."""
    rule = SCHEDULES[schedule].microbatches
    if rule == "stages":
        return microbatches >= stages
    return rule == "any" or microbatches % max(1, microbatches // ranks) == 0


def pipeline_problems(
    args: ModelArgs,
    parallelism: Parallelism,
    *,
    rows_per_step: int,
    compile_model: bool,
    ac_mode: str,
    selective_ac_option: str = "op",
) -> list[str]:
    """Why this pipeline cannot run, one message a reason; empty if it can, or if there is no pipeline.

    rows_per_step: rows of an optimizer step that each pipeline gets: the global batch over the data-parallel ranks.
    compile_model: whether blocks are compiled.
    ac_mode, selective_ac_option: of the section activation_checkpoint.
    """
    if parallelism.pipeline_parallel_degree == 1:
        return []
    problems = []
    if args.tie_embeddings:
        problems.append(
            f"parallelism.pipeline_parallel_degree={parallelism.pipeline_parallel_degree}: the model ties output and "
            "embedding (tie_embeddings), one weight that a pipeline would hold in two stages, to drift apart; use "
            "data, tensor or context parallelism"
        )
    try:
        stages = len(plan_stages(args.n_layers, parallelism))
    except ValueError as error:
        problems.append(str(error))
    else:
        problems.extend(_microbatch_problems(parallelism, stages, rows_per_step))
    if SCHEDULES[parallelism.pipeline_parallel_schedule].splits_backward:
        problems.extend(_split_backward_problems(parallelism, compile_model, ac_mode, selective_ac_option))
    return problems


def _microbatch_problems(parallelism: Parallelism, stages: int, rows: int) -> Iterator[str]:
    schedule, ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    if size < 1 or rows < 1:
        return  # said elsewhere

    def fits(rows: int) -> bool:
        return rows % size == 0 and takes_microbatches(schedule, rows // size, ranks, stages)

    if fits(rows):
        return
    below = next((n for n in range((rows - 1) // size * size, 0, -size) if fits(n)), None)
    above = next(n for n in range((rows // size + 1) * size, rows + 2 * size * (stages + ranks), size) if fits(n))
    able = " or ".join(_plural(n, "row") for n in (below, above) if n is not None)
    if rows % size:
        rule = f"they must divide into microbatches of parallelism.pipeline_parallel_microbatch_size={size}"
        divisors = (n for n in range(1, rows + 1) if rows % n == 0)
        sizes = [n for n in divisors if takes_microbatches(schedule, rows // n, ranks, stages)]
        if sizes:
            able += f", or microbatches of {' or '.join(map(str, sizes))}"
    elif SCHEDULES[schedule].microbatches == "stages":
        rule = f"{schedule} needs at least as many microbatches as stages, and they make {rows // size} for {stages}"
    else:
        rounds = rows // size // ranks
        rule = (
            f"{schedule} needs a multiple of its {rounds} rounds (microbatches // {ranks} ranks) of microbatches, and "
            f"they make {rows // size}"
        )
    yield (
        f"parallelism.pipeline_parallel_schedule={schedule}: a step has {_plural(rows, 'row')} for each pipeline "
        f"(training.global_batch_size, or training.local_batch_size without it, over the data-parallel ranks); {rule}; "
        f"{able} would do"
    )


def _split_backward_problems(
    parallelism: Parallelism, compile_model: bool, ac_mode: str, selective_ac_option: str
) -> Iterator[str]:
    setting = f"parallelism.pipeline_parallel_schedule={parallelism.pipeline_parallel_schedule}"
    whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)
    if compile_model:
        yield (
            f"{setting} with compile.enable: the schedule computes gradients of inputs and of weights apart, but the "
            "backward of a compiled block is one piece and would run twice; leave model out of compile.components, or "
            f"use {whole}"
        )
    if ac_mode != "none":
        # Measured: 2 + 20 runs of the attention of two blocks.
        reason = (
            "what it saves by operation can be used by one backward only"
            if (ac_mode, selective_ac_option) == ("selective", "op")
            else "it would run a block again for the input and for each of its nine weights"
        )
        yield (
            f"{setting} with activation_checkpoint.mode={ac_mode}: the schedule computes gradients of inputs and of "
            f"weights apart, and {reason}; set activation_checkpoint.mode to none, or use {whole}"
        )
    if parallelism.fsdp_reshard_after_forward == "always":
        yield (
            f"{setting} with parallelism.fsdp_reshard_after_forward=always: the schedule looks for gathered weights "
            "before its backward gathers them again, and their gradients would be lost; set it to default or never, or "
            f"use {whole}"
        )
