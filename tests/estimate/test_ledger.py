"""The books of a run on real tensors, against arithmetic and against torch's own hooks and profiler."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from toy_run import TOY

from torchtitan_lite.estimate.ledger import (
    ACTIVATIONS,
    LOSS,
    MATMUL_FLOPS,
    Ledger,
    Traffic,
    flash_backward_scratch,
)
from torchtitan_lite.estimate.rank import fake_ranks
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.training.loss import LinearCrossEntropy

BATCH, SEQ = 2, 64


def test_bytes_from_the_making_of_a_storage_to_its_end():
    with Ledger() as ledger:
        a = torch.ones(1000)
        with ledger.region(LOSS):
            b = (a * 2)[:10]  # a view keeps the whole storage
        both = ledger.snapshot()
        del a
        one = ledger.snapshot()
        del b
        none = ledger.snapshot()
    assert both.bytes() == {ACTIVATIONS: 4000, LOSS: 4000}
    assert +one.bytes() == {LOSS: 4000}
    assert not none.bytes().total()
    assert ledger.take_peak().bytes().total() == 8000


def test_a_label_holds_for_what_was_seen_before():
    with Ledger() as ledger:
        a = torch.ones(1000)
        before = ledger.snapshot()
        ledger.label([a], LOSS)
    assert before.bytes() == {LOSS: 4000}


def test_storages_that_are_resized():
    with Ledger() as ledger:
        a = torch.ones(1000)
        a.untyped_storage().resize_(0)
        assert ledger.snapshot().bytes().total() == 0
        a.untyped_storage().resize_(400)
        assert ledger.snapshot().bytes().total() == 400
    assert torch.ones(10).untyped_storage().resize_(80).nbytes() == 80  # the patch is gone
    assert ledger.snapshot().bytes().total() == 400


def test_what_dtensor_tries_out_is_not_there():
    """Shards of 11 numbers on each of 8 ranks, and not 88 on one."""
    with fake_ranks(8, 0):
        mesh = init_device_mesh("cpu", (8,))
        with FakeTensorMode(), Ledger() as ledger:
            shard = DTensor.from_local(torch.ones(11), mesh, [Shard(0)])
            whole = (shard * 3.5).sum()
            peak = ledger.take_peak().bytes().total()
    assert whole.shape == () and peak <= 2 * 44 + 4


def toy_model() -> Transformer:
    model = Transformer(TOY)
    init_weights(model, TOY, seed=0)
    return model


def forward(model: Transformer) -> torch.Tensor:
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % TOY.vocab_size
    return model(tokens, labels=tokens, loss_fn=LinearCrossEntropy(chunk_logits=1000))


def test_matrix_products_of_a_step():
    """6 FLOPs for each weight and token (observability/flops.py)."""
    model = toy_model()
    with Ledger() as ledger:
        forward(model).backward()
    assert ledger.done[MATMUL_FLOPS] == 6 * TOY.matmul_params * BATCH * SEQ


def test_what_the_forward_leaves_is_what_autograd_saved():
    """Storages that autograd's hooks are shown, without parameters; plus the few that live on unasked."""
    model = toy_model()
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Ledger() as ledger:
        ledger.label(model.parameters(), "parameters")
        loss = forward(model)
        alive = ledger.snapshot().bytes()[ACTIVATIONS]
    assert loss.requires_grad
    assert alive == pytest.approx(sum(saved.values()), rel=0.01)


def test_the_peak_is_what_torchs_profiler_sees():
    """The sum of all allocations of the CPU's allocator, minus what was freed, at its highest. Operators' own scratch
    is in it, and not in ours."""
    model = toy_model()
    forward(model).backward()
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True) as profile:
        forward(model).backward()
    now = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)

    model.zero_grad()
    with Ledger() as ledger:
        ledger.label(model.parameters(), "parameters")
        ledger.take_peak()
        forward(model).backward()
        peak = ledger.take_peak().bytes()
    assert peak.total() - peak["parameters"] == pytest.approx(highest, rel=0.05)


def test_bytes_sent_by_ring_algorithms():
    """Of 1,024 fp32 numbers over 8 ranks: 7/8 gathered or scattered, twice that reduced."""
    with fake_ranks(8, 0), Ledger() as ledger:
        whole, shard = torch.zeros(1024), torch.zeros(128)
        torch.ops.c10d._allgather_base_(whole, shard, dist.group.WORLD.boxed(), False, -1)
        dist.all_reduce(whole)
        name = dist.group.WORLD.group_name
        functional = torch.ops._c10d_functional
        functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", 8, name))
    sent = Counter({key: n for key, n in ledger.done.items() if isinstance(key, Traffic)})
    assert sent == {
        Traffic("all-gather", name): 4096 * 7 // 8,
        Traffic("all-reduce", name): 2 * 4096 * 7 // 8,
        Traffic("reduce-scatter", name): 4096 * 7 // 8,
    }


def test_an_unknown_collective_is_not_passed_over():
    with fake_ranks(2, 0), Ledger(), pytest.raises(NotImplementedError, match="broadcast"):
        dist.broadcast(torch.zeros(2), 0)


def test_scratch_of_the_flash_kernel():
    """32 heads of 128 over 8,192 tokens in at most 257 documents: (8,192 + 128 x 257) x 32 x 128 fp32."""
    assert flash_backward_scratch((8192, 32, 128), 257) == 41_088 * 4096 * 4
