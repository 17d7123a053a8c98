"""Pipelines of 2 and 4 gloo ranks against one process with the whole model, and the arithmetic behind them."""

import functools
import itertools
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from toy_run import TOY

from torchtitan_lite.config.schema import ActivationCheckpoint, Parallelism
from torchtitan_lite.data.collator import Batch, collate_rows, num_targets
from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.distributed.pipeline_plan import (
    SCHEDULES,
    deal_layers,
    number_of_stages,
    pipeline_problems,
    plan_stages,
    rank_of_loss,
    stages_of_rank,
    takes_microbatches,
)
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer

SEQ = 32
ARGS = replace(TOY, n_layers=4, attention="sdpa_block_causal")
# Other boundaries in every row; one row is a single document, one has padding only, and so nothing to predict.
DOCUMENTS = [[5, 11, 16], [32], [2, 29], [10, 9, 10], [3] * 8, [], [31, 1], [2, 20]]


def packed(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    documents = [
        [torch.randint(0, ARGS.vocab_size, (n,), generator=generator).numpy() for n in lengths] for lengths in DOCUMENTS
    ]
    return collate_rows(documents[:rows], SEQ, pad_id=0, max_documents_per_row=16)


def row_losses(model: Transformer, batch: Batch) -> torch.Tensor:
    """Sum of token losses of each row, from whole logits."""
    logits = model(batch.tokens, batch.document_ids, batch.positions)
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view(-1, SEQ).sum(1)


@functools.cache
def reference(rows: int, n_layers: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process: losses by row, and the gradients of their sum over all targets."""
    model = Transformer(replace(ARGS, n_layers=n_layers))
    init_weights(model, ARGS, seed=0)
    losses = row_losses(model, packed(rows))
    (losses.sum() / num_targets(packed(rows))).backward()
    return losses.tolist(), {name: p.grad for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Case:
    schedule: str = "1F1B"
    pp: int = 2
    dp_shard: int = 1
    dp_replicate: int = 1
    rows: int = 4
    n_layers: int = ARGS.n_layers
    microbatch_size: int = 1
    stages_per_rank: int | None = None
    ac: tuple[str, str] = ("none", "op")  # mode, selective_ac_option
    compile_backend: str | None = None
    reshard: bool = False
    dtype: torch.dtype = torch.float32


def built(case: Case, seed: int = 0):
    """This rank's part of the model, and its pipeline; the process group is there."""
    from torchtitan_lite.distributed.fsdp import shard_model
    from torchtitan_lite.distributed.pipeline import Pipeline, cut_stage
    from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
    from torchtitan_lite.training.compile import compile_blocks
    from torchtitan_lite.training.loss import LinearCrossEntropy

    mesh = Mesh("cpu", Degrees(case.pp, case.dp_replicate, case.dp_shard), dist.get_rank())
    per_rank = case.stages_per_rank or (1 if SCHEDULES[case.schedule].placement == "single" else 2)
    layers = deal_layers(case.n_layers, case.pp * per_rank, first_less=1, last_less=1)
    stages = {}
    for number in stages_of_rank(case.schedule, mesh.place.pp, case.pp, len(layers)):
        with torch.device("meta"):
            stage = Transformer(replace(ARGS, n_layers=case.n_layers))
        cut_stage(stage, layers[number], first=number == 0, last=number == len(layers) - 1)
        apply_activation_checkpoint(stage, ActivationCheckpoint(*case.ac))
        if case.compile_backend is not None:
            compile_blocks(stage, case.compile_backend)
        shard_model(stage, mesh.fsdp, case.dtype, torch.float32, reshard_after_forward=case.reshard)
        stage.to_empty(device="cpu")
        init_weights(stage, ARGS, seed)
        stages[number] = stage
    pipeline = Pipeline(
        stages,
        num_stages=len(layers),
        group=mesh.pp.get_group(),
        schedule=case.schedule,
        microbatch_size=case.microbatch_size,
        hidden_shape=(case.microbatch_size, SEQ, ARGS.dim),
        hidden_dtype=case.dtype,
        device=torch.device("cpu"),
        loss_fn=LinearCrossEntropy(chunk_logits=1000),
    )
    return mesh, stages, pipeline


def stepped(case: Case) -> dict:
    """Evaluations and two steps, the second of which counts, on this rank."""
    mesh, stages, pipeline = built(case, seed=1)
    replicas = case.dp_replicate * case.dp_shard
    replica = mesh.place.dp_replicate * case.dp_shard + mesh.place.dp_shard
    whole = packed(case.rows)
    mine = Batch(*(field[replica::replicas] for field in whole))
    few = Batch(*(field[: case.microbatch_size] for field in mine))

    evaluated_before = pipeline.evaluate(few)
    # Weights that change after an evaluation are those of the next step.
    for stage in stages.values():
        init_weights(stage, ARGS, seed=0)
    evaluated_few = pipeline.evaluate(few)
    pipeline.forward_backward(Batch(*(field.flip(0) for field in mine)), 7)
    for stage in stages.values():
        stage.zero_grad()
    loss = pipeline.forward_backward(mine, num_targets(whole))
    gradients = {
        name: p.grad.full_tensor().clone() for stage in stages.values() for name, p in stage.named_parameters()
    }
    return {
        "has_loss": pipeline.has_loss,
        "loss": loss.item(),
        "microbatch_losses": [loss.item() for loss in pipeline._losses],
        "gradients": gradients,
        "evaluated": pipeline.evaluate(mine).item(),
        "evaluated_few": evaluated_few.item(),
        "evaluated_before": evaluated_before.item(),
        "targets": num_targets(mine),
        "pp": mesh.place.pp,
    }


def all_stepped(cases: list[Case]) -> list[dict]:
    init_distributed(world_from_environment(), timeout_seconds=60)
    return [stepped(case) for case in cases]


TWO_RANKS = [Case(schedule) for schedule in SCHEDULES] + [
    Case("1F1B", rows=8, microbatch_size=2),
    Case("Interleaved1F1B", rows=6, n_layers=6, stages_per_rank=3),
    Case("1F1B", ac=("full", "op")),
    Case("Interleaved1F1B", ac=("selective", "op")),
    Case("Interleaved1F1B", ac=("selective", "2")),
    Case("1F1B", compile_backend="aot_eager"),
]
FOUR_RANKS = [
    *[Case(name, pp=4, n_layers=4) for name, schedule in SCHEDULES.items() if schedule.placement == "single"],
    *[Case(name, pp=4, n_layers=8) for name, schedule in SCHEDULES.items() if schedule.placement == "loop"],
    Case("ZBVZeroBubble", pp=4, n_layers=8),
    Case("DualPipeV", pp=4, n_layers=8, rows=8),
    Case("GPipe", pp=4, rows=2),
    Case("1F1B", dp_shard=2, rows=8, reshard=True),
    Case("1F1B", dp_replicate=2),
    Case("Interleaved1F1B", dp_shard=2, reshard=True),
    Case("InterleavedZeroBubble", dp_shard=2),
    Case("ZBVZeroBubble", dp_replicate=2, rows=8),
]


def name_of(case: Case) -> str:
    changed = [f"{k}={v}" for k, v in vars(case).items() if k != "schedule" and v != getattr(Case(), k)]
    return " ".join([case.schedule, *changed])


@pytest.fixture(scope="module")
def results(rank_pool):
    """Of every case, what each rank returned."""
    outcomes = {}
    for ranks, cases in (2, TWO_RANKS), (4, FOUR_RANKS):
        by_rank = rank_pool.run(ranks, all_stepped, cases)
        outcomes.update({case: [outputs[i] for outputs in by_rank] for i, case in enumerate(cases)})
    return outcomes


@pytest.mark.parametrize("case", TWO_RANKS + FOUR_RANKS, ids=name_of)
def test_a_pipeline_is_one_process(results, case):
    losses, gradients = reference(case.rows, case.n_layers)
    ranks = results[case]
    replicas = case.dp_shard * case.dp_replicate
    for replica in range(replicas):
        mine = [rank for rank in ranks if rank["targets"] == ranks[replica]["targets"]]
        assert len(mine) == case.pp  # so that replicas do hold different numbers of targets
        assert [rank["pp"] for rank in mine if rank["has_loss"]] == [rank_of_loss(case.schedule, case.pp)]
        (holder,) = (rank for rank in mine if rank["has_loss"])
        own = torch.tensor(losses[replica::replicas])
        microbatches = own.view(-1, case.microbatch_size).sum(1).tolist()
        assert holder["microbatch_losses"] == pytest.approx(microbatches, rel=1e-5)
        assert holder["loss"] == pytest.approx(own.sum().item(), rel=1e-5)
        assert all(rank["loss"] == 0 == len(rank["microbatch_losses"]) for rank in mine if rank is not holder)
    found = set()
    for rank in ranks:
        found |= rank["gradients"].keys()
        for name, gradient in rank["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-7, msg=name)
    assert found == gradients.keys()


@pytest.mark.parametrize("case", TWO_RANKS + FOUR_RANKS, ids=name_of)
def test_evaluation_takes_any_number_of_rows(results, case):
    losses, _ = reference(case.rows, case.n_layers)
    total = sum(rank["evaluated"] for rank in results[case])
    assert total == pytest.approx(sum(losses), rel=1e-5)
    replicas = case.dp_shard * case.dp_replicate
    first_rows = [loss for r in range(replicas) for loss in losses[r::replicas][: case.microbatch_size]]
    assert sum(rank["evaluated_few"] for rank in results[case]) == pytest.approx(sum(first_rows), rel=1e-5)
    assert abs(sum(rank["evaluated_before"] for rank in results[case]) / sum(first_rows) - 1) > 1e-4  # other weights


def test_in_bfloat16_a_pipeline_is_one_process(rank_pool, one_rank):
    case = Case("1F1B", dtype=torch.bfloat16)
    ranks = rank_pool.run(2, all_stepped, [case])
    got = {name: gradient for (rank,) in ranks for name, gradient in rank["gradients"].items()}
    alone = stepped(replace(case, schedule="GPipe", pp=1))
    assert alone["loss"] == ranks[1][0]["loss"]
    for name, gradient in alone["gradients"].items():
        assert torch.equal(got[name], gradient), name
    _, gradients = reference(case.rows, case.n_layers)
    differing = [name for name, gradient in gradients.items() if not torch.allclose(got[name], gradient, rtol=1e-4)]
    assert len(differing) > len(gradients) / 2  # it is not fp32 that ran


# -- documents -------------------------------------------------------------------------------------------------------


def watched(case: Case, swaps: list[int]) -> list[dict]:
    """A step for each row of ``swaps`` whose first document is replaced (-1: none). What each stage of this rank puts
    out, and the gradients that come back, by (stage, microbatch)."""
    init_distributed(world_from_environment(), timeout_seconds=60)
    _, stages, pipeline = built(case)
    seen: dict = {}

    def watch(number: int):
        microbatches = itertools.count()

        def hook(module, args, kwargs, output):
            key = number, next(microbatches) % case.rows
            seen[key] = [output.detach().clone()]
            output.register_hook(lambda gradient: seen[key].append(gradient.clone()))

        return hook

    for number, stage in stages.items():
        stage.register_forward_hook(watch(number), with_kwargs=True)
    steps = []
    for row in swaps:
        seen.clear()
        batch = packed(case.rows)
        if row >= 0:
            swap_first_document(batch, row)
        pipeline.forward_backward(batch, 100)
        steps.append({"seen": dict(seen), "losses": [loss.item() for loss in pipeline._losses]})
    return steps


def swap_first_document(batch: Batch, row: int) -> None:
    length = DOCUMENTS[row][0]
    batch.tokens[row, :length] = (batch.tokens[row, :length] + 1) % ARGS.vocab_size
    batch.labels[row, : length - 1] = batch.tokens[row, 1:length]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_no_document_reaches_another(rank_pool, schedule):
    rows = [0, 1, 2, 3]
    case = Case(schedule)
    ranks = rank_pool.run(2, watched, case, [-1, *rows])
    model = Transformer(ARGS)
    init_weights(model, ARGS, seed=0)
    for step, row in enumerate(rows, start=1):
        whole = packed(case.rows)
        before = row_losses(model, whole)
        swap_first_document(whole, row)
        change = (row_losses(model, whole) - before).tolist()
        length = DOCUMENTS[row][0]
        for plain, swapped in ((steps[0], steps[step]) for steps in ranks):
            assert plain["seen"].keys() == swapped["seen"].keys() != set()
            for (stage, microbatch), tensors in plain["seen"].items():
                for was, now in zip(tensors, swapped["seen"][stage, microbatch], strict=True):
                    if was.dim() == 0:  # the loss, and its gradient
                        continue
                    assert was.shape == (1, SEQ, ARGS.dim)
                    assert was[:, :length].equal(now[:, :length]) == (microbatch != row)
                    assert was[:, length:].equal(now[:, length:])
            for microbatch, (was, now) in enumerate(zip(plain["losses"], swapped["losses"], strict=True)):
                assert now == was if microbatch != row else now - was == pytest.approx(change[row], rel=1e-3, abs=1e-4)
                assert (now != was) == (microbatch == row)


# -- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_layers", "stages", "first", "last", "sizes"),
    [
        (32, 4, 1, 1, [8, 8, 8, 8]),  # 34 = 9 + 8 + 8 + 9
        (6, 4, 1, 1, [1, 2, 2, 1]),
        (4, 4, 1, 1, [1, 1, 1, 1]),
        (126, 16, 1, 1, [7, *[8] * 14, 7]),
        (80, 8, 1, 2, [10, 11, 10, 10, 10, 10, 10, 9]),  # 83 = 11 + 11 + 5 x 10 + 11
        (7, 3, 0, 0, [3, 2, 2]),
        (32, 2, 0, 4, [18, 14]),
    ],
)
def test_layers_are_dealt_out_evenly(n_layers, stages, first, last, sizes):
    layers = deal_layers(n_layers, stages, first, last)
    assert [len(stage) for stage in layers] == sizes
    assert list(itertools.chain(*layers)) == list(range(n_layers))


@pytest.mark.parametrize(("n_layers", "stages", "first", "last"), [(2, 4, 1, 1), (3, 4, 0, 0), (8, 4, 3, 1)])
def test_a_stage_without_layers_is_refused(n_layers, stages, first, last):
    with pytest.raises(ValueError, match=rf"{n_layers} layers \+ {first} .* \+ {last} .* = {n_layers + first + last}"):
        deal_layers(n_layers, stages, first, last)


def settings(schedule: str, ranks: int, per_stage: int | None = None, **other) -> Parallelism:
    return Parallelism(
        pipeline_parallel_degree=ranks,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_layers_per_stage=per_stage,
        **other,
    )


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_stage", "stages"),
    [
        ("1F1B", 4, None, 4),
        ("ZBVZeroBubble", 4, None, 8),
        ("LoopedBFS", 4, None, 8),
        ("GPipe", 4, 9, 4),  # 34 / 9
        ("Interleaved1F1B", 4, 3, 12),  # 34 / 3
        ("DualPipeV", 2, 9, 4),
    ],
)
def test_number_of_stages(schedule, ranks, per_stage, stages):
    assert number_of_stages(32, settings(schedule, ranks, per_stage)) == stages
    assert len(plan_stages(32, settings(schedule, ranks, per_stage))) == stages


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_stage", "remedy"),
    [
        ("1F1B", 4, 5, "34 make 7 stages, .* one stage on each of 4 ranks; 9, 10, 11 would do"),
        ("Interleaved1F1B", 4, 9, "34 make 4 stages, .* two or more stages on each of 4 ranks; 3 would do"),
        ("DualPipeV", 4, 3, "34 make 12 stages, .* two stages on each of 4 ranks; no value does; leave it unset"),
        ("1F1B", 4, 0, "must be at least 1"),
    ],
)
def test_layers_per_stage_that_fit_no_ranks_are_refused(schedule, ranks, per_stage, remedy):
    with pytest.raises(ValueError, match=f"layers_per_stage={per_stage}: .*{remedy}"):
        number_of_stages(32, settings(schedule, ranks, per_stage))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_hold_the_stages_that_torch_expects(schedule):
    from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

    style = "v" if SCHEDULES[schedule].placement == "v" else "loop"
    for ranks, per_rank in itertools.product([1, 2, 3, 8], [1, 2, 3]):
        if SCHEDULES[schedule].placement in ("single", "v"):
            per_rank = 1 if SCHEDULES[schedule].placement == "single" else 2
        expected = generate_rank_to_stage_mapping(ranks, ranks * per_rank, style)
        assert [list(stages_of_rank(schedule, r, ranks, ranks * per_rank)) for r in range(ranks)] == [
            expected[r] for r in range(ranks)
        ]
        assert ranks * per_rank - 1 in expected[rank_of_loss(schedule, ranks)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_are_taken_where_torch_takes_them(schedule):
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(schedule)
    per_ranks = {"single": [1], "loop": [2, 3], "v": [2]}[SCHEDULES[schedule].placement]
    for ranks, per_rank, microbatches in itertools.product([2, 3, 4], per_ranks, range(1, 14)):
        stages = [
            SimpleNamespace(stage_index=i, num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=None)
            for i in stages_of_rank(schedule, 0, ranks, ranks * per_rank)
        ]
        try:
            kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, microbatches, lambda *_: None)
            taken = True
        except ValueError:
            taken = False
        assert takes_microbatches(schedule, microbatches, ranks, ranks * per_rank) == taken, (ranks, microbatches)


def problems(schedule: str, args=ARGS, rows: int = 8, mode: str = "none", option: str = "op", **other) -> list[str]:
    compile_model = other.pop("compile_model", False)
    return pipeline_problems(
        args,
        settings(schedule, 2, **other),
        rows_per_step=rows,
        compile_model=compile_model,
        ac_mode=mode,
        selective_ac_option=option,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_works_is_not_refused(schedule):
    assert problems(schedule) == []
    if not SCHEDULES[schedule].splits_backward:
        for mode in "full", "selective":
            assert problems(schedule, mode=mode, compile_model=True, fsdp_reshard_after_forward="always") == []


def test_without_a_pipeline_nothing_is_refused():
    off = Parallelism(pipeline_parallel_schedule="DualPipeV", pipeline_parallel_microbatch_size=3)
    tied = replace(ARGS, tie_embeddings=True)
    assert pipeline_problems(tied, off, rows_per_step=1, compile_model=True, ac_mode="selective") == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedule": "GPipe", "args": replace(ARGS, tie_embeddings=True)}, "tie_embeddings"),
        ({"schedule": "GPipe", "args": replace(ARGS, n_layers=1)}, r"1 layer \+ 1 .* leave stage\(s\) 1 without any"),
        (
            {"schedule": "GPipe", "rows": 7, "pipeline_parallel_microbatch_size": 2},
            "_size=2; 6 rows or 8 rows, or microbatches of 1 or 7 would do",
        ),
        ({"schedule": "1F1B", "rows": 2, "pipeline_parallel_microbatch_size": 2}, "make 1 for 2; 4 rows would do"),
        ({"schedule": "DualPipeV", "rows": 3}, "make 3 for 4; 4 rows would do"),
        (
            {"schedule": "Interleaved1F1B", "rows": 5},
            r"its 2 rounds \(microbatches // 2 .* make 5; 4 rows or 6 rows would do",
        ),
        ({"schedule": "ZBVZeroBubble", "compile_model": True}, "run twice.*1F1B, GPipe"),
        ({"schedule": "DualPipeV", "mode": "selective"}, "by operation can be used by one backward only"),
        ({"schedule": "DualPipeV", "mode": "selective", "option": "2"}, "mode=selective.* each of its nine weights"),
        ({"schedule": "ZBVZeroBubble", "mode": "full"}, "mode=full.* each of its nine weights"),
        ({"schedule": "DualPipeV", "fsdp_reshard_after_forward": "always"}, "gradients would be lost"),
    ],
)
def test_what_cannot_work_is_refused(given, said):
    (problem,) = problems(**given)
    assert problem.startswith("parallelism")
    assert re.search(said, problem), problem


# -- one process -----------------------------------------------------------------------------------------------------


def test_stages_share_out_the_whole_model():
    from torchtitan_lite.distributed.pipeline import cut_stage

    whole = [name for name, _ in Transformer(ARGS).named_parameters()]
    names = []
    for number, layers in enumerate(deal_layers(ARGS.n_layers, 4, 1, 1)):
        stage = Transformer(ARGS)
        cut_stage(stage, layers, first=number == 0, last=number == 3)
        names += [name for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(whole)


@functorch_config.patch(donated_buffer=True)
def test_compiled_code_outlives_the_first_half_of_a_backward(one_rank):
    """As FlexAttention on CUDA must, which is compiled even where blocks are not."""
    _, stages, pipeline = built(Case("ZBVZeroBubble", pp=1, compile_backend="aot_eager"))
    batch = packed(2)
    # A whole backward comes first, as in DualPipeV, for torch compiles a backward for what it first meets.
    hidden = torch.randn(1, SEQ, ARGS.dim, requires_grad=True)
    stages[1](hidden, *(field[:1] for field in batch[2:]), labels=batch.labels[:1], loss_fn=pipeline.loss_fn).backward()
    stages[1].zero_grad()
    pipeline.forward_backward(batch, num_targets(batch))
    _, gradients = reference(2, ARGS.n_layers)
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=1e-4, atol=1e-7, msg=name)


def test_a_step_that_fails_drops_what_others_wait_for(one_rank, monkeypatch):
    _, _, pipeline = built(Case("GPipe", pp=1))
    aborted = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append(True))
    pipeline.loss_fn = lambda h, weight, labels: 1 / 0
    with pytest.raises(RuntimeError) as raised:
        pipeline.forward_backward(packed(2), 1)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert aborted == [True]


def test_rows_that_make_no_microbatches_are_refused(one_rank):
    _, _, pipeline = built(Case("GPipe", pp=1, microbatch_size=2))
    with pytest.raises(ValueError, match=r"3 rows .*pipeline_parallel_microbatch_size=2"):
        pipeline.forward_backward(packed(3), 1)


def test_a_huge_microbatch_is_answered_at_once():
    (problem,) = problems("1F1B", pipeline_parallel_microbatch_size=10**12)
    assert (
        "must divide into microbatches" in problem
        and f"{2 * 10**12} rows, or microbatches of 1 or 2 or 4 would do" in problem
    )


def test_no_remedy_where_the_model_is_too_shallow():
    with pytest.raises(
        ValueError, match=r"3 make 2 stages, .* on each of 4 ranks; the model has too few layers for any"
    ):
        number_of_stages(
            3,
            Parallelism(
                pipeline_parallel_degree=4,
                pipeline_parallel_layers_per_stage=2,
                pipeline_parallel_first_stage_less_layers=0,
                pipeline_parallel_last_stage_less_layers=0,
            ),
        )


def test_a_remedy_leaves_no_stage_empty():
    """Of 4 layers and 2 more, stages of one would leave first and last without any."""
    with pytest.raises(ValueError, match="no value does; leave it unset"):
        number_of_stages(4, settings("Interleaved1F1B", 2, 2))
