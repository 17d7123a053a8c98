"""FSDP2 as this project sets it up, on 1, 2 and 4 gloo ranks, against one process without any of it."""

import hashlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from plain_training import plain_training
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy_run import TOY, read_metrics, toy_config

from torchtitan_lite.config.schema import ActivationCheckpoint, Checkpoint, Config, Optimizer
from torchtitan_lite.distributed.fsdp import expect_backward, shard_model
from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
from torchtitan_lite.training.checkpoint import CheckpointManager
from torchtitan_lite.training.clipping import clip_grad_norm
from torchtitan_lite.training.compile import compile_blocks
from torchtitan_lite.training.loss import LinearCrossEntropy
from torchtitan_lite.training.optimizer import build_optimizer

ROWS, SEQ, STEPS = 8, 32, 3
MAX_NORM = 0.5  # below the norms met here, so that clipping is at work
# 7 and 51 do not divide by 2 or 4: ranks hold shards of different sizes, and of one norm weight nothing at all.
ARGS = replace(TOY, vocab_size=51, ffn_hidden_dim=7, attention="sdpa_block_causal")
OPTIMIZER = Optimizer(lr=1e-2)


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


class CountCollectives(TorchDispatchMode):
    """How often the process group was asked for each collective, by the names in COLLECTIVES."""

    NAMES = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("c10d::"):
            self.counts[self.NAMES[name.removeprefix("c10d::")]] += 1
        return func(*args, **(kwargs or {}))


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, labels, document_ids; row r has about r / 8 of its labels, and the last two have none."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, ARGS.vocab_size, (2, ROWS, SEQ), generator=generator)
    for row in range(ROWS):
        labels[row, row * SEQ // ROWS :] = -100
    labels[-2:] = -100
    document_ids = torch.randint(0, 3, (ROWS, SEQ), generator=generator, dtype=torch.int32).sort().values
    return tokens, labels, document_ids


def digests(values: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in values.items()}


def reference(args: ModelArgs) -> dict:
    return plain_training(args, global_batch, steps=STEPS, max_norm=MAX_NORM)


@dataclass(frozen=True)
class Setting:
    """How the same steps are run: copies of the model, rows of a microbatch, and the rest by its names elsewhere."""

    copies: int = 1
    compile_backend: str | None = None
    mode: str = "none"
    local_rows: int = 2
    reduce_each: bool = True
    reshard: bool = True
    cpu_offload: bool = False


def sharded(args: ModelArgs, setting: Setting = Setting()) -> dict:
    """The same steps on this rank of a group, through the project's parts and built as the trainer builds."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    degrees = Degrees(dp_replicate=setting.copies, dp_shard=world.size // setting.copies)
    mesh = Mesh("cpu", degrees, world.rank)
    with torch.device("meta"):
        model = Transformer(args)
    apply_activation_checkpoint(model, ActivationCheckpoint(setting.mode))
    if setting.compile_backend is not None:
        compile_blocks(model, setting.compile_backend)
    shard_model(
        model,
        mesh.fsdp,
        torch.float32,
        torch.float32,
        reshard_after_forward=setting.reshard,
        cpu_offload=setting.cpu_offload,
    )
    model.to_empty(device="cpu")
    init_weights(model, args, seed=0)
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    result = {"initial": digests(full), "losses": [], "norms": []}

    optimizer, loss_fn = build_optimizer(model, OPTIMIZER), LinearCrossEntropy(chunk_logits=1000)
    for step in range(STEPS):
        batch = global_batch(step)
        targets = int((batch[1] != -100).sum())
        total = torch.zeros(())
        starts = range(world.rank * setting.local_rows, ROWS, world.size * setting.local_rows)
        # Compiled code cannot be looked into in this way.
        with CountCollectives() if setting.compile_backend is None else nullcontext() as mode:
            for start in starts:
                tokens, labels, document_ids = (field[start : start + setting.local_rows] for field in batch)
                last = start == starts[-1]
                expect_backward(model, last=last, reduce_each=setting.reduce_each, reshard_each=setting.reshard)
                loss = model(tokens, document_ids, labels=labels, loss_fn=loss_fn) / targets
                loss.backward()
                total += loss.detach()
        result["collectives"] = dict(mode.counts) if mode is not None else {}  # of the last step
        torch.distributed.all_reduce(total)
        if step == 0:
            # On one rank the full tensor is the shard itself, which clipping is about to scale.
            result["gradients"] = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        result["losses"].append(total.item())
        result["norms"].append(clip_grad_norm(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return result


def assert_equal_runs(got: dict, expected: dict) -> None:
    assert got["initial"] == digests(expected["initial"])
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert min(expected["norms"]) > MAX_NORM
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(got["gradients"][name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.fixture(scope="module")
def expected():
    return reference(ARGS)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_is_one_process(rank_pool, expected, ranks):
    # On four ranks the last one has no target at all; on two, both accumulate two microbatches.
    assert int((global_batch(0)[1][6:] != -100).sum()) == 0
    for result in rank_pool.run(ranks, sharded, ARGS):
        assert_equal_runs(result, expected)


def test_tied_embeddings(rank_pool):
    args = replace(ARGS, tie_embeddings=True)
    expected = reference(args)
    for result in rank_pool.run(2, sharded, args):
        assert_equal_runs(result, expected)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_compiled_blocks(rank_pool, expected, mode):
    for result in rank_pool.run(2, sharded, ARGS, Setting(compile_backend="aot_eager", mode=mode)):
        assert_equal_runs(result, expected)


GROUPS = ARGS.n_layers + 2  # what is gathered and reduced by itself: each block, the embedding, the rest


@pytest.mark.parametrize(
    ("setting", "collectives"),
    [  # of a step of two microbatches, on 4 ranks
        (Setting(), {"all_gather": 2 * (2 * GROUPS - 1), "reduce_scatter": 2 * GROUPS}),  # the rest stays gathered
        (Setting(reduce_each=False), {"all_gather": 2 * (2 * GROUPS - 1), "reduce_scatter": GROUPS}),
        (Setting(reshard=False), {"all_gather": GROUPS, "reduce_scatter": 2 * GROUPS}),
        (Setting(reshard=False, reduce_each=False), {"all_gather": GROUPS, "reduce_scatter": GROUPS}),
        (
            Setting(copies=2),
            {"all_gather": 2 * (2 * GROUPS - 1), "reduce_scatter": 2 * GROUPS, "all_reduce": GROUPS},
        ),
        (Setting(copies=2, reshard=False, reduce_each=False), dict.fromkeys(COLLECTIVES, GROUPS)),
        (Setting(copies=4), {"all_reduce": GROUPS}),
        (
            Setting(cpu_offload=True),
            {"all_gather": 2 * (2 * GROUPS - 1), "reduce_scatter": 2 * GROUPS},
        ),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in vars(value).items()) if isinstance(value, Setting) else "",
)
def test_accumulation_communicates_no_more_than_it_must(rank_pool, expected, setting, collectives):
    for result in rank_pool.run(4, sharded, ARGS, replace(setting, local_rows=1)):
        assert_equal_runs(result, expected)
        assert result["collectives"] == collectives


def late_parameter() -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of two weights in bf16 over fp32 sums; the second is used in the last of two microbatches only."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2, bias=False), "1": torch.nn.Linear(2, 2, bias=False)})
    model.tok_embeddings = model.output = None
    model.forward = lambda x, both: model.layers["1"](model.layers["0"](x)) if both else model.layers["0"](x)
    for layer in model.layers.values():
        torch.nn.init.ones_(layer.weight)
    mesh = Mesh("cpu", Degrees(dp_shard=world.size), world.rank)
    shard_model(model, mesh.fsdp, torch.bfloat16, torch.float32)
    for last in (False, True):
        expect_backward(model, last=last, reduce_each=True, reshard_each=True)
        model(torch.ones(1, 2, dtype=torch.bfloat16) * (world.rank + 1), last).sum().backward()
    return tuple(layer.weight.grad.full_tensor() for layer in model.layers.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_first_used_in_the_last_microbatch(rank_pool, ranks):
    """No layer of a Llama goes unused; with reductions put off to the last microbatch torch itself would fail here.

    With x = r + 1 on rank r: d/dW0 is x alone, then 2 x with the second layer; d/dW1 is W0 x = 2 x."""
    for first, second in rank_pool.run(ranks, late_parameter):
        x = sum(range(1, ranks + 1))
        assert torch.equal(first, torch.full((2, 2), 3.0 * x))
        assert torch.equal(second, torch.full((2, 2), 2.0 * x))


def test_one_rank_is_bitwise_the_model_without_fsdp(one_rank):
    tokens, labels, document_ids = global_batch(0)
    gradients = []
    for shard in (False, True):
        model = Transformer(ARGS)
        if shard:
            shard_model(model, Mesh("cpu", Degrees(), 0).fsdp, torch.float32, torch.float32)
        init_weights(model, ARGS, seed=0)
        loss = model(tokens, document_ids, labels=labels, loss_fn=LinearCrossEntropy())
        loss.backward()
        full = {name: p.grad.full_tensor() if shard else p.grad for name, p in model.named_parameters()}
        gradients.append({"loss": loss.detach(), **full})
    plain, wrapped = gradients
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())


def test_bf16_computes_in_bf16_over_fp32_masters(one_rank):
    model = Transformer(replace(ARGS, n_layers=1))
    shard_model(model, Mesh("cpu", Degrees(), 0).fsdp, torch.bfloat16, torch.float32)
    init_weights(model, ARGS, seed=0)
    seen = {}

    def look(module, inputs):
        x, cos, _, _ = inputs
        seen.update(x=x.dtype, cos=cos.dtype, weight=module.wq.weight.dtype)

    model.layers["0"].attention_norm.register_forward_pre_hook(lambda m, i: seen.update(norm=m.weight.dtype))
    model.layers["0"].attention.register_forward_pre_hook(look)
    loss = model(
        *(x[:1, :8] for x in global_batch(0)[::2]), labels=global_batch(0)[1][5:6, :8], loss_fn=LinearCrossEntropy()
    )
    loss.backward()
    assert loss.dtype == torch.float32
    assert seen == {"x": torch.bfloat16, "norm": torch.bfloat16, "weight": torch.bfloat16, "cos": torch.float32}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


def mixed_norm() -> tuple[float, list[float]]:
    """A parameter sharded over the ranks, one replicated as a DTensor and a plain one: gradients [2, 4], 5 and 6."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = Mesh("cpu", Degrees(dp_shard=world.size), world.rank).fsdp
    gradients = [
        distribute_tensor(torch.tensor([2.0, 4.0]), mesh, [Shard(0)]),
        distribute_tensor(torch.tensor([5.0]), mesh, [Replicate()]),
        torch.tensor([6.0]),
    ]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = clip_grad_norm(parameters, max_norm=0.9).item()
    sharded, replicated, plain = (p.grad for p in parameters)
    return norm, [*sharded.full_tensor().tolist(), *replicated.full_tensor().tolist(), *plain.tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norm_counts_every_kind_of_parameter_once(rank_pool, ranks):
    for norm, clipped in rank_pool.run(ranks, mixed_norm):
        assert norm == pytest.approx(9.0)  # 4 + 16 + 25 + 36 = 81
        assert clipped == pytest.approx([0.2, 0.4, 0.5, 0.6])


def checkpointed(folder: Path, save: bool) -> dict[str, torch.Tensor]:
    """Save two steps of training, or load what was saved into weights of another seed; then one more step."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    model = Transformer(ARGS)
    shard_model(model, Mesh("cpu", Degrees(dp_shard=world.size), world.rank).fsdp, torch.float32, torch.float32)
    init_weights(model, ARGS, seed=0 if save else 1)
    optimizer = build_optimizer(model, OPTIMIZER)
    manager = CheckpointManager(Checkpoint(enable=True, async_mode="async"), folder, model, optimizer)

    def learn(amount: float) -> None:
        for p in model.parameters():
            p.grad = p.detach().clone() + amount
        optimizer.step()

    if save:
        learn(0.1), learn(0.2)
        manager.save(2, {"step": 2}, {world.rank: bytes([world.rank]) * 3})
        manager.wait()
    else:
        assert manager.load() == {"step": 2}
        assert manager.load_data_state(2, world.rank) == bytes([world.rank]) * 3  # its own, not that of rank 0
    learn(0.3)
    values = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            values[f"{name}.{key}"] = optimizer.state[p][key].full_tensor()
        values[f"{name}.step"] = optimizer.state[p]["step"].clone()
    return values


def test_a_checkpoint_of_four_ranks_loads_on_two_and_on_one(rank_pool, tmp_path):
    saved, *others = rank_pool.run(4, checkpointed, tmp_path, True)
    for ranks in (1, 2):
        others += rank_pool.run(ranks, checkpointed, tmp_path, False)
    for other in others:
        assert other.keys() == saved.keys()
        assert all(torch.equal(value, other[name]) for name, value in saved.items())


def trained(config: Config) -> tuple[int, dict]:
    from torchtitan_lite.training.trainer import Trainer  # seconds that the ranks of the other tests are spared

    trainer = Trainer(config)
    targets = [int((batch.labels != -100).sum()) for batch, _ in zip(trainer.loader, range(4), strict=False)]
    trainer.train()
    return trainer.tokens_seen, {"targets": targets, "data": trainer.loader.state_dict()}


def test_whole_runs_log_the_same_on_any_number_of_ranks(rank_pool, documents, tmp_path):
    logged = {}
    for ranks, local_rows in [(1, 4), (2, 2), (4, 1)]:
        folder = tmp_path / str(ranks)
        settings = {"training.local_batch_size": local_rows, "training.global_batch_size": 8, "training.steps": 3}
        results = rank_pool.run(ranks, trained, toy_config(folder, documents, **settings))
        logged[ranks] = read_metrics(folder)
        assert {tokens for tokens, _ in results} == {8 * 32 * 3}
        assert all(state["data"] == results[0][1]["data"] for _, state in results)
        targets = [state["targets"] for _, state in results]
        assert ranks == 1 or targets[0] != targets[1]  # they do hold different numbers of targets
    for ranks in (2, 4):
        for name in ("step", "loss", "grad_norm", "lr", "tokens_seen", "padding_fraction", "documents_per_row"):
            expected = [entry[name] for entry in logged[1]]
            assert [entry[name] for entry in logged[ranks]] == pytest.approx(expected, rel=1e-5), (ranks, name)
        # The largest mean of any rank, not the mean over them.
        assert all(entry["max_loss"] > entry["loss"] for entry in logged[ranks])
