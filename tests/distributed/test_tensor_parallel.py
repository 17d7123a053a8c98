"""Tensor parallelism, alone and inside FSDP and HSDP, on gloo ranks, against one process without any of it."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from plain_training import plain_training
from torch._inductor import config as inductor_config
from toy_run import TOY

from torchtitan_lite.config.schema import ActivationCheckpoint, Optimizer
from torchtitan_lite.distributed.fsdp import expect_backward, shard_model
from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.distributed.tensor_parallel import apply_tensor_parallel, tensor_parallel_problems
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.flavors import model_args
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
from torchtitan_lite.training.clipping import clip_grad_norm
from torchtitan_lite.training.compile import compile_blocks
from torchtitan_lite.training.loss import LinearCrossEntropy
from torchtitan_lite.training.optimizer import build_optimizer

ROWS, SEQ, STEPS = 4, 32, 3
MAX_NORM = 0.5  # below the norms met here, so that clipping is at work
CHUNK_LOGITS = 1000  # of the loss: several chunks a batch
# 51 words divide by neither 2 nor 4.
ARGS = replace(TOY, vocab_size=51, attention="sdpa_block_causal")
OPTIMIZER = Optimizer(lr=1e-2)


@dataclass(frozen=True)
class Case:
    """A way to run the model on several ranks."""

    degrees: Degrees
    args: ModelArgs = ARGS
    mode: str = "none"
    compile_backend: str | None = None
    microbatches: int = 1  # of which only the last has its gradients reduced, as in a pipeline


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, labels, document_ids; row r has r / 4 of its labels ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, ARGS.vocab_size, (2, ROWS, SEQ), generator=generator)
    for row in range(ROWS):
        labels[row, : row * SEQ // ROWS] = -100
    document_ids = torch.randint(0, 3, (ROWS, SEQ), generator=generator, dtype=torch.int32).sort().values
    return tokens, labels, document_ids


def reference(args: ModelArgs) -> dict:
    return plain_training(args, global_batch, steps=STEPS, max_norm=MAX_NORM)


def build(case: Case, world) -> tuple[Transformer, Mesh]:
    """In the order in which the trainer builds."""
    mesh = Mesh("cpu", case.degrees, world.rank)
    with torch.device("meta"):
        model = Transformer(case.args)
    apply_tensor_parallel(model, mesh.tp)
    apply_activation_checkpoint(model, ActivationCheckpoint(case.mode))
    if case.compile_backend is not None:
        compile_blocks(model, case.compile_backend)
    shard_model(model, mesh.fsdp, torch.float32, torch.float32)
    model.to_empty(device="cpu")
    init_weights(model, case.args, seed=0)
    return model, mesh


def trained(case: Case) -> dict:
    """The steps of :func:`reference` on this rank of a group, through the project's parts."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    model, mesh = build(case, world)
    result = {"initial": {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}}
    result |= {"losses": [], "norms": []}
    optimizer = build_optimizer(model, OPTIMIZER)
    with torch.no_grad():
        result["logits"] = model(global_batch(0)[0], global_batch(0)[2])
    loss_fn = LinearCrossEntropy(case.compile_backend, chunk_logits=CHUNK_LOGITS)
    rows = ROWS // case.degrees.dp
    first = (mesh.place.dp_replicate * case.degrees.dp_shard + mesh.place.dp_shard) * rows
    for step in range(STEPS):
        batch = global_batch(step)
        targets = int((batch[1] != -100).sum())
        total = torch.zeros(())
        microbatches = zip(*(field[first : first + rows].chunk(case.microbatches) for field in batch), strict=True)
        for i, (tokens, labels, document_ids) in enumerate(microbatches):
            expect_backward(model, last=i == case.microbatches - 1, reduce_each=False, reshard_each=False)
            loss = model(tokens, document_ids, labels=labels, loss_fn=loss_fn) / targets
            loss.backward()
            total += loss.detach()
        for mesh_dim in range(mesh.fsdp.ndim):
            dist.all_reduce(total, group=mesh.fsdp.get_group(mesh_dim))
        if step == 0:
            result["gradients"] = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        result["losses"].append(total.item())
        result["norms"].append(clip_grad_norm(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return result


def assert_equal_runs(got: dict, expected: dict) -> None:
    for name, weight in expected["initial"].items():
        assert torch.equal(got["initial"][name], weight), name
    torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-5, atol=1e-6)
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert min(expected["norms"]) > MAX_NORM
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(got["gradients"][name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.fixture(scope="module")
def expected():
    return reference(ARGS)


def test_two_ranks_are_one_process(rank_pool, expected):
    for result in rank_pool.run(2, trained, Case(Degrees(tp=2))):
        assert_equal_runs(result, expected)


TIED = replace(ARGS, tie_embeddings=True)
CASES = {
    # One query head a rank, each with its own key and value; tied.
    "tp4": Case(Degrees(tp=4), replace(TIED, n_kv_heads=4, attention="flex_block_causal"), mode="full"),
    "fsdp": Case(Degrees(dp_shard=2, tp=2), TIED),
    "hsdp": Case(Degrees(dp_replicate=2, tp=2), mode="selective", microbatches=2),
    "compiled": Case(Degrees(tp=2), replace(TIED, attention="sdpa"), compile_backend="aot_eager"),
    "compiled_selective": Case(Degrees(tp=2), mode="selective", compile_backend="aot_eager"),
}


@pytest.mark.parametrize("name", CASES)
def test_compositions_are_one_process(rank_pool, name):
    case = CASES[name]
    expected = reference(case.args)
    for result in rank_pool.run(case.degrees.world_size, trained, case):
        assert_equal_runs(result, expected)


def in_two_stages() -> dict:
    """One model cut by hand into two stages that both live on every rank, split over two ranks; the whole of their
    gradients. Looks at what is held and handed on meanwhile."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = Mesh("cpu", Degrees(tp=2), world.rank).tp
    first, last = Transformer(ARGS), Transformer(ARGS)
    del first.layers["1"], last.layers["0"]
    first.norm = first.output = last.tok_embeddings = None
    shapes = {}
    for stage in (first, last):
        apply_tensor_parallel(stage, mesh)
        init_weights(stage, ARGS, seed=0)
        attend = stage.backend.forward
        stage.backend.forward = lambda q, k, v, *rest, attend=attend: (
            shapes.update(q=tuple(q.shape), k=tuple(k.shape)) or attend(q, k, v, *rest)
        )
    tokens, labels, document_ids = global_batch(0)
    positions = torch.arange(SEQ).expand(ROWS, SEQ)
    hidden = first(tokens, document_ids, positions)
    shapes["hidden"] = tuple(hidden.shape)
    assert type(hidden) is torch.Tensor
    loss_fn = LinearCrossEntropy(chunk_logits=CHUNK_LOGITS)
    (last(hidden, document_ids, positions, labels=labels, loss_fn=loss_fn) / (labels != -100).sum()).backward()
    parameters = dict([*first.named_parameters(), *last.named_parameters()])
    return {
        "shapes": shapes,
        "held": {name: p.to_local().numel() / p.numel() for name, p in parameters.items()},
        "gradients": {name: p.grad.full_tensor() for name, p in parameters.items()},
    }


def test_stages_hand_on_their_part_of_the_tokens(rank_pool, expected):
    for rank, result in enumerate(rank_pool.run(2, in_two_stages)):
        assert result["shapes"] == {
            "hidden": (ROWS, SEQ // 2, 32),
            "q": (ROWS, SEQ, 2, 8),  # 2 of 4 heads
            "k": (ROWS, SEQ, 1, 8),  # 1 of 2
        }
        for name, share in result["held"].items():
            vocabulary = name in ("tok_embeddings.weight", "output.weight")
            assert share == (1 if "norm" in name else (26, 25)[rank] / 51 if vocabulary else 0.5), name
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def problems(args: ModelArgs = TOY, degree: int = 2, seq_len: int = SEQ, **settings) -> list[str]:
    settings = {"device_type": "cuda", "compile_model": True, "async_tp": False} | settings
    return tensor_parallel_problems(args, degree, seq_len, **settings)


def embedded(tokens: torch.Tensor) -> tuple:
    """Hidden states of this rank, and the bytes of the gradient that its rows keep."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    model = Transformer(replace(ARGS, vocab_size=52))
    torch.nn.init.normal_(model.tok_embeddings.weight, generator=torch.Generator().manual_seed(0))
    whole = model.tok_embeddings.weight.detach().clone()
    apply_tensor_parallel(model, Mesh("cpu", Degrees(tp=2), world.rank).tp)
    hidden = model.tok_embeddings(tokens)
    hidden.square().sum().backward()
    gradient = model.tok_embeddings.weight.grad
    return whole, hidden.detach(), gradient.to_local(), gradient.to_local().untyped_storage().nbytes()


def test_each_rank_looks_up_its_own_rows(rank_pool):
    tokens = torch.randint(0, 52, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    ranks = rank_pool.run(2, embedded, tokens)
    whole = ranks[0][0].requires_grad_()
    expected = whole[tokens]
    expected.square().sum().backward()
    torch.testing.assert_close(torch.cat([hidden for _, hidden, _, _ in ranks], 1), expected)
    torch.testing.assert_close(torch.cat([gradient for _, _, gradient, _ in ranks]), whole.grad)
    assert [size for *_, size in ranks] == [26 * ARGS.dim * 4] * 2


def test_what_can_be_split():
    assert problems() == []
    assert problems(async_tp=True) == []
    assert problems(model_args("405B"), 8, 8192, async_tp=True) == []


def test_what_cannot_be_split():
    (heads,) = problems(replace(TOY, n_heads=6, n_kv_heads=3, dim=36), 2)
    assert "parallelism.tensor_parallel_degree=2" in heads and "n_heads=6 and n_kv_heads=3" in heads
    assert heads.endswith("1 would do")  # 3 divides the heads and the 48 hidden units, but not the 32 tokens
    (kv_heads,) = problems(degree=4, args=replace(TOY, vocab_size=52))  # 4 query heads, but 2 of keys and values
    assert "n_heads=4 and n_kv_heads=2" in kv_heads and kv_heads.endswith("1 or 2 would do")
    (hidden,) = problems(replace(TOY, ffn_hidden_dim=47))
    assert "ffn_hidden_dim=47" in hidden and hidden.endswith("1 would do")
    (tokens,) = problems(seq_len=33)
    assert "the 33 of a row" in tokens
    (vocabulary,) = problems(replace(TOY, vocab_size=51))
    assert "vocab_size=51" in vocabulary and "model.args.vocab_size=52" in vocabulary


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({"device_type": "cpu"}, "a GPU"), ({"compile_model": False}, "compile.enable"), ({"degree": 1}, "at least 2")],
)
def test_asynchronous_communication_needs(settings, missing):
    (problem,) = problems(async_tp=True, **settings)
    assert "enable_async_tensor_parallel" in problem and missing in problem
    assert problems(**settings) == []


@inductor_config.patch(_micro_pipeline_tp=False)
def test_asynchronous_communication_is_asked_of_the_compiler(one_rank, recwarn):
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    mesh = Mesh("cpu", Degrees(), 0).tp
    group = mesh.get_group().group_name
    apply_tensor_parallel(Transformer(TOY), mesh)
    assert not inductor_config._micro_pipeline_tp and not is_symm_mem_enabled_for_group(group)
    apply_tensor_parallel(Transformer(TOY), mesh, async_tp=True)
    assert inductor_config._micro_pipeline_tp and is_symm_mem_enabled_for_group(group)
    assert not [w for w in recwarn if "symm_mem" in str(w.message)]
