"""Tensor parallelism, alone and inside FSDP and HSDP, on gloo ranks, against one process without any of it."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from toy_run import TOY

from torchtitan_lite.config.schema import ActivationCheckpoint, Optimizer
from torchtitan_lite.distributed.fsdp import shard_model
from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.distributed.tensor_parallel import apply_tensor_parallel
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
from torchtitan_lite.training.compile import compile_blocks
from torchtitan_lite.training.loss import LinearCrossEntropy
from torchtitan_lite.training.optimizer import build_optimizer, clip_grad_norm

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


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, labels, document_ids; row r has r / 4 of its labels ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, ARGS.vocab_size, (2, ROWS, SEQ), generator=generator)
    for row in range(ROWS):
        labels[row, : row * SEQ // ROWS] = -100
    document_ids = torch.randint(0, 3, (ROWS, SEQ), generator=generator, dtype=torch.int32).sort().values
    return tokens, labels, document_ids


def reference(args: ModelArgs) -> dict:
    """One process, no sharding, whole logits, torch's own cross-entropy and clipping."""
    model = Transformer(args)
    init_weights(model, args, seed=0)
    result = {"initial": {n: p.detach().clone() for n, p in model.named_parameters()}, "losses": [], "norms": []}
    with torch.no_grad():
        result["logits"] = model(global_batch(0)[0], global_batch(0)[2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        tokens, labels, document_ids = global_batch(step)
        loss = F.cross_entropy(model(tokens, document_ids).flatten(0, 1), labels.flatten())
        loss.backward()
        if step == 0:
            result["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        result["losses"].append(loss.item())
        result["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return result


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
        tokens, labels, document_ids = (field[first : first + rows] for field in batch)
        loss = model(tokens, document_ids, labels=labels, loss_fn=loss_fn) / targets
        loss.backward()
        total = loss.detach().clone()
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
