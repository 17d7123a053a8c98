"""Runs on paper against runs: four gloo ranks on real tensors, kept book of by the same ledger, and whole parts."""

import pytest
import torch
import torch.distributed as dist

import torchtitan_lite.estimate.parts as parts_module
from torchtitan_lite.config.schema import ActivationCheckpoint, Config
from torchtitan_lite.data.collator import Batch
from torchtitan_lite.distributed.context_parallel import shard_batch
from torchtitan_lite.distributed.fsdp import expect_backward
from torchtitan_lite.distributed.mesh import Mesh, init_distributed, world_from_environment
from torchtitan_lite.distributed.pipeline import Pipeline
from torchtitan_lite.estimate.ledger import ACTIVATIONS, GATHERED, MATMUL_FLOPS, OPTIMIZER, PARAMETERS, Ledger, Traffic
from torchtitan_lite.estimate.memory import fullest_moment
from torchtitan_lite.estimate.plan import Plan, paper_args, paper_config
from torchtitan_lite.estimate.rank import _dimensions, fake_ranks, measure_rank
from torchtitan_lite.estimate.schedule import schedule_order
from torchtitan_lite.estimate.timing import over_step, step_traffic
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.nf4 import quantized_layers
from torchtitan_lite.training.adamw8bit import stored_parts
from torchtitan_lite.training.loss import LinearCrossEntropy
from torchtitan_lite.training.optimizer import build_optimizer
from torchtitan_lite.training.parallelize import as_one, build_parts, reshards


def toy(**settings) -> Config:
    """fp32, rows of 32. 2,049 words and 50 hidden units make shards of different sizes."""
    config = Config()
    config.model.flavor = "debugmodel_sdpa_block_causal"
    shape = {"dim": 32, "n_layers": 5, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden_dim": 50, "vocab_size": 2049}
    values = {
        **{f"model.args.{name}": value for name, value in shape.items()},
        "training.seq_len": 32,
        "training.local_batch_size": 1,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
        **settings,
    }
    for name, value in values.items():
        *sections, field = name.split(".")
        section = config
        for part in sections:
            section = getattr(section, part)
        assert hasattr(section, field), name
        setattr(section, field, value)
    return config


LAYOUTS = {
    "uneven shards, accumulation": toy(**{"training.global_batch_size": 12}),
    "HSDP, reduced once a step": toy(
        **{
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.fsdp_gradient_reduction": "step",
            "training.global_batch_size": 12,
        }
    ),
    "tensor and context parallel": toy(
        **{
            "model.args.ffn_hidden_dim": 48,
            "model.args.vocab_size": 2052,
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.context_parallel_degree": 2,
            "activation_checkpoint.mode": "full",
        }
    ),
    "pipeline of two": toy(
        **{
            "parallelism.pipeline_parallel_degree": 2,
            "training.local_batch_size": 4,
            "activation_checkpoint.mode": "selective",
        }
    ),
    "Muon": toy(**{"optimizer.name": "Muon"}),
    "moments of 8 bits": toy(**{"optimizer.name": "AdamW8bit", "optimizer.implementation": "for-loop"}),
    "adapters": toy(**{"lora.rank": 3, "training.global_batch_size": 12}),
    "adapters of quantised weights": toy(
        **{"lora.rank": 3, "lora.quantize_base": "nf4", "model.args.ffn_hidden_dim": 48}
    ),
}


def real_step(plan: Plan) -> dict:
    """The second step of a run on this rank, as the trainer takes it: bytes at its fullest, sent, and kept."""
    config, args = paper_config(plan), paper_args(plan)
    config.activation_checkpoint = plan.config.activation_checkpoint
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = Mesh("cpu", plan.degrees, world.rank)
    parts = build_parts(config, args, mesh)
    for part in parts.values():
        part.to_empty(device="cpu")
    model = as_one(parts)
    init_weights(model, args, seed=0)
    optimizer, loss_fn = build_optimizer(model, config.optimizer), LinearCrossEntropy()
    pipeline = None
    if plan.schedule:
        pipeline = Pipeline(
            parts,
            num_stages=len(plan.stages),
            group=mesh.pp.get_group(),
            schedule=plan.schedule,
            microbatch_size=plan.rows,
            hidden_shape=plan.hidden,
            hidden_dtype=torch.float32,
            device=torch.device("cpu"),
            loss_fn=loss_fn,
        )
    ids = plan.document_ids
    whole = Batch(ids.long(), ids.long(), ids, torch.zeros_like(ids))
    batch = shard_batch(whole, mesh.place.cp, plan.degrees.cp)

    def forward_backward() -> None:
        if pipeline is not None:
            pipeline.forward_backward(Batch(*(f.repeat(plan.microbatches, 1) for f in batch)), 1)
            return
        for i in range(plan.microbatches):
            last = i == plan.microbatches - 1
            reduce_each = config.parallelism.fsdp_gradient_reduction == "microbatch"
            expect_backward(model, last=last, reduce_each=reduce_each, reshard_each=reshards(config))
            model(batch.tokens, batch.document_ids, batch.positions, labels=batch.labels, loss_fn=loss_fn).backward()

    forward_backward()
    optimizer.step()
    optimizer.zero_grad()
    with Ledger() as ledger:
        moments = [parts_module._local(value) for state in optimizer.state.values() for value in state.values()]
        states = [part for moment in moments for part in stored_parts(moment)]
        quantized = [part for _, layer in quantized_layers(model) for part in stored_parts(layer.weight)]
        ledger.label([*map(parts_module._local, model.parameters()), *quantized], PARAMETERS)
        ledger.label(states, OPTIMIZER)
        ledger.take_peak()
        forward_backward()
        gradients = [parts_module._local(p.grad) for p in model.parameters() if p.requires_grad]
        fullest = ledger.take_peak().bytes()
    dimensions = _dimensions(mesh)
    result = {
        "fullest": fullest.total(),
        "sent": {
            (key.collective, dimensions[key.group]): n
            for key, n in ledger.done.items()
            if isinstance(key, Traffic) and key.group in dimensions and n
        },
        "flops": ledger.done[MATMUL_FLOPS],
        "parameters": sum(t.nbytes for t in [*map(parts_module._local, model.parameters()), *quantized]),
        "gradients": sum(g.nbytes for g in gradients),
        "optimizer": sum(t.nbytes for t in states),
    }
    dist.destroy_process_group()
    return result


def on_paper(plan: Plan, rank: int) -> dict:
    with fake_ranks(plan.degrees.pp, 0):
        orders = schedule_order(plan.schedule, plan.degrees.pp, len(plan.stages), plan.microbatches)
    own = plan.own_setting
    costs = measure_rank(plan, rank, {own: plan.config.activation_checkpoint})
    sent = {tuple(key): n for key, n in step_traffic(plan, costs, own).items()}
    flops = sum(
        times * (m.forward_done[MATMUL_FLOPS] + m.backward_done[MATMUL_FLOPS])
        for each in costs.microbatches[own]
        for m, times in over_step(each, plan.microbatches)
    )
    state = {name: getattr(costs.state, name) for name in ("parameters", "gradients", "optimizer")}
    fullest = fullest_moment(plan, costs, own, orders[plan.degrees.place(rank).pp])
    return {"fullest": fullest.total(), "sent": sent, "flops": flops, **state}


def real_and_on_paper(plan: Plan, on_paper_too: list[int]) -> tuple[dict, dict | None]:
    rank = world_from_environment().rank
    return real_step(plan), on_paper(plan, rank) if rank in on_paper_too else None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_on_paper_is_the_rank(rank_pool, layout):
    if layout == "moments of 8 bits":
        pytest.importorskip("torchao")
    plan = Plan.of(LAYOUTS[layout], 4, device_type="cpu", document_length=10)
    runs = rank_pool.run(4, real_and_on_paper, plan, [0, 3])  # the fullest and the emptiest
    for real, paper in runs:
        if paper is None:
            continue
        assert {key: real["sent"][key] for key in paper["sent"]} == paper["sent"]
        for name in ("parameters", "gradients", "optimizer", "flops"):
            assert paper[name] == real[name], name
        # gloo copies what it reduce-scatters, at most the words and a norm: NCCL does not.
        copied = 4 * 32 * (-(-plan.args.vocab_size // plan.degrees.tp) + 4)
        if layout == "moments of 8 bits":
            continue  # operator by operator, the update is the fullest moment, and that is not in these books
        assert 0.99 * paper["fullest"] < real["fullest"] < 1.01 * paper["fullest"] + copied
    if layout == "uneven shards, accumulation":
        assert len({real["parameters"] for real, _ in runs}) > 1
        # 4 B of weight and 8 B of moments for each parameter; a step count of 4 B for each tensor of each rank.
        parameters = 2 * 2049 * 32 + 5 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 50 + 2 * 32) + 32
        assert sum(real["parameters"] for real, _ in runs) == 4 * parameters
        assert sum(real["optimizer"] for real, _ in runs) == 8 * parameters + 4 * 4 * (2 + 5 * 9 + 1)
    if layout == "adapters of quantised weights":
        # On every rank, of n numbers: n / 2 B, n / 64 scales of 1 B, a factor of 4 B for each gcd(256, n / 64) of them,
        # a mean of 4 B and the 16 values of 4 B; wq, wo of 1,024, wk, wv of 512, w1, w2, w3 of 1,536 numbers.
        quantized = 2 * (512 + 16 + 4) + 2 * (256 + 8 + 4) + 3 * (768 + 24 + 12) + 7 * 68
        adapters = 3 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
        sharded = 2 * 2049 * 32 + 32 + 5 * (2 * 32 + adapters)
        assert sum(real["parameters"] for real, _ in runs) == 4 * 5 * quantized + 4 * sharded
    if layout == "Muon":  # 4 B for each parameter of a layer's matrices, and 8 B, with a step count, for the others
        matrices, others = 5 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 50), 2 * 2049 * 32 + 5 * 2 * 32 + 32
        assert sum(real["optimizer"] for real, _ in runs) == 4 * matrices + 8 * others + 4 * 4 * (2 + 5 * 2 + 1)


SETTINGS = {
    "none": ActivationCheckpoint("none"),
    "3": ActivationCheckpoint("selective", "3"),
}


def test_a_thinned_part_costs_what_the_whole_one_does(monkeypatch):
    config = toy(**{"model.args.n_layers": 7, "training.global_batch_size": 12})
    plan = Plan.of(config, 4, device_type="cpu")
    thinned = measure_rank(plan, 0, SETTINGS).microbatches
    monkeypatch.setattr(parts_module, "_layers_to_run", lambda kinds: set(kinds))
    whole = measure_rank(plan, 0, SETTINGS).microbatches
    assert [len(thinned[name][0]) for name in SETTINGS] == [3, 1]
    for name in SETTINGS:
        for a, b in zip(thinned[name][0], whole[name][0], strict=True):
            assert vars(a) == vars(b), name
    kept = {name: whole[name][0][0].saved[ACTIVATIONS] for name in SETTINGS}
    assert kept["none"] > kept["3"]


def test_one_rank_keeps_no_second_copy_of_frozen_weights():
    plan = Plan.of(toy(**{"lora.rank": 3}), 1, device_type="cpu")
    costs = measure_rank(plan, 0, {plan.own_setting: plan.config.activation_checkpoint})
    adapters = 5 * 3 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 50))
    for passage in costs.microbatches[plan.own_setting][0]:
        assert max(passage.forward[GATHERED], passage.backward[GATHERED]) <= 4 * adapters
