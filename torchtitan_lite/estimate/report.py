"""An estimate as lines to read, and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchtitan_lite.estimate.estimate import Estimate, RankEstimate
from torchtitan_lite.estimate.ledger import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    KEYS_VALUES,
    LOSS,
    OPTIMIZER,
    PARAMETERS,
    PIPELINE,
    UNREDUCED,
)

GIB = 2**30
_KINDS = (PARAMETERS, OPTIMIZER, GRADIENTS, UNREDUCED, GATHERED, ACTIVATIONS, KEYS_VALUES, LOSS, PIPELINE)
_WHAT_TO_TURN = (
    (ACTIVATIONS, "activation_checkpoint.mode=full, a smaller batch, or more context or tensor parallelism"),
    (LOSS, "a smaller local batch, or more tensor parallelism"),
    (PARAMETERS, "more ranks to shard over, or training.enable_cpu_offload"),
    (
        UNREDUCED,
        "more tensor parallelism or pipeline stages, training.mixed_precision_reduce=bfloat16, or, without a "
        "pipeline, parallelism.fsdp_gradient_reduction=microbatch",
    ),
    (GATHERED, "parallelism.fsdp_reshard_after_forward=always"),
)


def lines(estimate: Estimate) -> list[str]:
    """The report, about 100 columns wide."""
    return [
        *_head(estimate),
        "",
        *_memory(estimate),
        "",
        *_settings(estimate),
        "",
        *_traffic(estimate),
        "",
        *_time(estimate),
    ]


def _head(estimate: Estimate) -> list[str]:
    plan = estimate.plan
    mesh = " x ".join(f"{name} {n}" for name, n in asdict(plan.degrees).items() if n > 1) or "one rank"
    steps = f"{plan.microbatches} microbatches" if plan.microbatches > 1 else "one microbatch"
    schedule = f"{plan.schedule} over {len(plan.stages)} stages, " if plan.schedule else ""
    nodes = -(-plan.world_size // estimate.per_node)
    documents = ""
    if plan.document_length < plan.config.training.seq_len:
        documents = f", of documents of {plan.document_length:,}"
    return [
        f"{plan.config.model.name} {plan.config.model.flavor}: {plan.args.parameters:,} parameters, computing in "
        f"{str(plan.param_dtype).removeprefix('torch.')}",
        f"{plan.world_size:,} x {estimate.gpu.device_name}, {nodes:,} {'node' if nodes == 1 else 'nodes'}: {mesh}",
        f"A step: {plan.tokens_per_step:,} tokens; on each rank {schedule}{steps} of {plan.rows} x "
        f"{plan.config.training.seq_len:,} tokens{documents}",
        f"Activation checkpointing: {estimate.plan.own_setting}",
    ]


def _memory(estimate: Estimate) -> list[str]:
    columns = [f"rank {r.costs.rank}" for r in estimate.ranks]
    rows = [("Memory of a rank at its fullest moment, GiB", columns)]
    if estimate.plan.schedule:
        rows.append(("  stages", [", ".join(map(str, r.costs.stages)) for r in estimate.ranks]))
        rows.append(("  layers", [_layers(estimate, r) for r in estimate.ranks]))
        rows.append(("  microbatches in flight", [str(r.in_flight) for r in estimate.ranks]))
    fullest = [r.fullest[estimate.plan.own_setting] for r in estimate.ranks]
    rows += [
        (f"  {kind}", [_gib(moment[kind]) for moment in fullest])
        for kind in _KINDS
        if any(moment[kind] >= 0.005 * GIB for moment in fullest)
    ]
    rows.append(("  together", [_gib(moment.total()) for moment in fullest]))
    rows.append(
        (
            f"  of {_gib(estimate.budget)} ({estimate.gpu.memory_gb:g} GB)",
            [_verdict(estimate, m.total()) for m in fullest],
        )
    )
    text = _table(rows)
    state = estimate.ranks[0].costs.state
    text += [
        f"  Rank {estimate.ranks[0].costs.rank} keeps, exactly: {state.parameters:,} B of parameters, "
        f"{state.optimizer:,} B of optimizer state; gradients {state.gradients:,} B",
    ]
    if estimate.plan.config.training.enable_cpu_offload:
        text.append("  training.enable_cpu_offload: these three are in CPU memory and not counted above")
    return text + _advice(estimate)


def _layers(estimate: Estimate, rank: RankEstimate) -> str:
    return str(sum(len(estimate.plan.stages[stage]) for stage in rank.costs.stages))


def _verdict(estimate: Estimate, total: int) -> str:
    spare = estimate.budget - total
    return f"{_gib(spare)} to spare" if spare >= 0 else f"{_gib(-spare)} too much"


def _advice(estimate: Estimate) -> list[str]:
    worst = max((r.fullest[estimate.plan.own_setting] for r in estimate.ranks), key=lambda moment: moment.total())
    if worst.total() <= estimate.budget:
        return [f"  Fits in {estimate.gpu.memory_gb:g} GB."]
    heaviest = sorted(_WHAT_TO_TURN, key=lambda advice: -_weight(worst, advice[0]))[:2]
    return [f"  Does not fit in {estimate.gpu.memory_gb:g} GB. What would help:"] + [
        f"    {kind} ({_gib(_weight(worst, kind))}): {what}" for kind, what in heaviest if _weight(worst, kind)
    ]


def _weight(moment: dict[str, int], kind: str) -> int:
    """Of a kind in advice: with parameters go all that is sharded as they are."""
    return sum(moment[k] for k in ((PARAMETERS, OPTIMIZER, GRADIENTS) if kind == PARAMETERS else (kind,)))


def _settings(estimate: Estimate) -> list[str]:
    settings = list(estimate.ranks[0].fullest)
    own = estimate.plan.own_setting
    rows = [("Activation checkpointing, GiB", [f"[{s}]" if s == own else s for s in settings])]
    for rank in estimate.ranks:
        name = f"rank {rank.costs.rank}"
        rows.append((f"  kept of a microbatch, {name}", [_gib(rank.saved[s]) for s in settings]))
        rows.append((f"  fullest moment, {name}", [_gib(rank.fullest[s].total()) for s in settings]))
    worst = [max(rank.fullest[s].total() for rank in estimate.ranks) for s in settings]
    rows.append(("  fits", ["yes" if total <= estimate.budget else "no" for total in worst]))
    return _table(rows)


def _traffic(estimate: Estimate) -> list[str]:
    kinds = sorted({key for rank in estimate.ranks for key in rank.sent}, key=lambda key: (key.group, key.collective))
    if not kinds:
        return ["Sent by a rank in a step: nothing"]
    rows = [("Sent by a rank in a step, GB", [f"rank {r.costs.rank}" for r in estimate.ranks])]
    rows += [
        (f"  {key.group:12} {key.collective}", [f"{rank.sent[key] / 1e9:,.3f}" for rank in estimate.ranks])
        for key in kinds
    ]
    return _table(rows)


def _time(estimate: Estimate) -> list[str]:
    plan, time = estimate.plan, estimate.time
    if time is None:
        return ["Time: looked at for the whole pipeline only; leave out --rank"]
    per_gpu = plan.tokens_per_step / time.seconds / plan.world_size
    mfu = estimate.model_flops / (time.seconds * plan.world_size * estimate.peak)
    digits = 3 if time.seconds >= 1 else 6
    rows = [
        ("Best case of a step", ["seconds"]),
        (f"  products, at {estimate.peak / 1e12:,.1f} TFLOP/s", [f"{time.compute:.{digits}f}"]),
        ("  between them: tp and cp", [f"{time.in_the_way:.{digits}f}"]),
        ("  waiting for other stages", [f"{time.bubble:.{digits}f}"]),
        ("  fsdp and dp_replicate, not hidden", [f"{time.exposed:.{digits}f}"]),
        ("  together", [f"{time.seconds:.{digits}f}"]),
    ]
    return [
        *_table(rows),
        f"  fsdp and dp_replicate: {time.behind:.{digits}f} s in all; the bubble is {time.bubble / time.seconds:.1%}",
        f"  model FLOPs {estimate.model_flops:.3e}; with recomputation {time.hardware_flops:.3e}",
        f"  at most {per_gpu:,.0f} tokens/s per GPU, {per_gpu * plan.world_size:,.0f} in all, MFU {mfu:.1%}",
        f"  ({estimate.peak_words})",
    ]


def _table(rows: list[tuple[str, list[str]]]) -> list[str]:
    """Labels to the left, columns to the right."""
    label = max(len(name) for name, _ in rows)
    widths = [max(len(row[i]) for _, row in rows) for i in range(len(rows[0][1]))]
    return [
        "  ".join([name.ljust(label), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, cells in rows
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def as_data(estimate: Estimate) -> dict[str, Any]:
    """For machines: bytes, seconds and FLOPs, under the names of the report."""
    plan = estimate.plan
    return {
        "flavor": plan.config.model.flavor,
        "parameters": plan.args.parameters,
        "world_size": plan.world_size,
        "degrees": asdict(plan.degrees),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "tokens_per_step": plan.tokens_per_step,
        "gpu": {**asdict(estimate.gpu), "per_node": estimate.per_node, "peak_flops": estimate.peak},
        "memory_budget": estimate.budget,
        "activation_checkpoint": estimate.plan.own_setting,
        "ranks": [
            {
                "rank": rank.costs.rank,
                "stages": list(rank.costs.stages),
                "parameters": rank.costs.state.parameters,
                "gradients": rank.costs.state.gradients,
                "optimizer": rank.costs.state.optimizer,
                "in_flight": rank.in_flight,
                "saved_per_microbatch": rank.saved,
                "fullest_moment": {setting: dict(moment) for setting, moment in rank.fullest.items()},
                "fits": {setting: moment.total() <= estimate.budget for setting, moment in rank.fullest.items()},
                "sent": [
                    {"collective": key.collective, "dimension": key.group, "bytes": n} for key, n in rank.sent.items()
                ],
            }
            for rank in estimate.ranks
        ],
        "model_flops": estimate.model_flops,
        "time": None if estimate.time is None else asdict(estimate.time),
    }
