import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.distributed.mesh import init_distributed, world_from_environment
from torchtitan_lite.training.loss import LinearCrossEntropy, chunk_size

BATCH, SEQ, DIM, VOCAB = 3, 16, 8, 50


def inputs(labels: str = "some", dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(BATCH, SEQ, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    if labels == "some":
        targets[0, 3:9] = -100
        targets[1] = -100  # with small chunks, whole chunks have no label
    elif labels == "none":
        targets[:] = -100
    return h, weight, targets


def reference(h, weight, labels, scale=1.0):
    """Value and gradients from the logits of the whole batch in fp64."""
    h, weight = (x.detach().double().requires_grad_() for x in (h, weight))
    loss = F.cross_entropy((h @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (loss * scale).backward()
    return loss.detach(), h.grad, weight.grad


def loss_and_grads(loss_fn, h, weight, labels, scale=1.0):
    h, weight = (x.detach().clone().requires_grad_() for x in (h, weight))
    loss = loss_fn(h, weight, labels)
    (loss * scale).backward()
    return loss.detach(), h.grad, weight.grad


@pytest.mark.parametrize("labels", ["all", "some"])
@pytest.mark.parametrize("chunk_logits", [1, 5 * VOCAB, 16 * VOCAB, 47 * VOCAB, 1 << 26])
def test_value_and_gradients_are_those_of_full_logits(chunk_logits, labels):
    batch = inputs(labels)
    got = loss_and_grads(LinearCrossEntropy(chunk_logits=chunk_logits), *batch, scale=0.37)
    for actual, expected in zip(got, reference(*batch, scale=0.37), strict=True):
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    assert got[0].dtype == torch.float32


@pytest.mark.parametrize("chunk_logits", [1, 1 << 26])
def test_nothing_to_predict_is_zero_with_finite_gradients(chunk_logits):
    loss, *grads = loss_and_grads(LinearCrossEntropy(chunk_logits=chunk_logits), *inputs("none"))
    assert loss == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_sums_over_unequal_batches_give_the_mean_over_tokens():
    # Two batches of one and of three targets, with losses 4 and 1 each: (4 + 3 x 1) / 4, and not (4 + 1) / 2.
    def batch(targets, loss):
        # Two words: with logits (0, z) the loss of the first is log(1 + e^z).
        z = torch.tensor(loss).expm1().log()
        h = torch.ones(1, 4, 1)
        labels = torch.full((1, 4), -100)
        labels[0, :targets] = 0
        return h, torch.tensor([[0.0], [z]]), labels

    loss_fn = LinearCrossEntropy(chunk_logits=2)
    total = loss_fn(*batch(1, 4.0)) + loss_fn(*batch(3, 1.0))
    assert (total / 4).item() == pytest.approx(1.75, abs=1e-6)


@pytest.mark.parametrize("chunk_logits", [5 * VOCAB, 1 << 26])
def test_without_gradients_the_value_is_the_same(chunk_logits):
    batch = inputs()
    loss_fn = LinearCrossEntropy(chunk_logits=chunk_logits)
    with torch.no_grad():
        evaluated = loss_fn(*batch)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, loss_fn(*batch).detach())
    assert evaluated.item() == pytest.approx(reference(*batch)[0].item(), rel=1e-6)


def test_bf16_gives_an_fp32_loss_and_bf16_gradients():
    batch = inputs(dtype=torch.bfloat16)
    loss, *grads = loss_and_grads(LinearCrossEntropy(chunk_logits=5 * VOCAB), *batch)
    expected_loss, *expected_grads = reference(*batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_loss.item(), rel=5e-3)
    for actual, expected in zip(grads, expected_grads, strict=True):
        assert actual.dtype == torch.bfloat16
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 1e-2


def test_weight_gradients_of_chunks_add_up_in_fp32():
    # 512 chunks that each add 1/512 to a gradient: in bf16 the sum would stop growing at a half.
    tokens = 512
    h = torch.full((1, tokens, 1), 2.0 / tokens, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    LinearCrossEntropy(chunk_logits=2)(h, weight, torch.zeros(1, tokens, dtype=torch.int64)).backward()
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[-1.0], [1.0]]))


def test_a_tied_weight_gets_the_gradients_of_both_its_uses():
    _, weight, labels = inputs()
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))

    def gradient(loss_fn):
        tied = weight.detach().clone().requires_grad_()
        loss_fn(F.embedding(tokens, tied).tanh(), tied, labels).backward()
        return tied.grad

    def naive(h, w, labels):
        return F.cross_entropy((h @ w.T).flatten(0, 1), labels.flatten(), reduction="sum")

    torch.testing.assert_close(gradient(LinearCrossEntropy(chunk_logits=5 * VOCAB)), gradient(naive))


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("grad", [True, False])
def test_logits_exist_for_one_chunk_at_a_time(grad):
    batch = inputs()
    chunk_logits = 12 * VOCAB
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        loss = LinearCrossEntropy(chunk_logits=chunk_logits)(*batch)
        if grad:
            loss.backward()
    assert largest.elements == chunk_logits < BATCH * SEQ * VOCAB


def test_only_gradients_are_kept_for_backward():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        LinearCrossEntropy(chunk_logits=12 * VOCAB)(*inputs())
    assert saved.count((BATCH * SEQ, DIM)) == saved.count((VOCAB, DIM)) == 1
    assert max(shape.numel() for shape in saved) < 12 * VOCAB


@pytest.mark.parametrize(
    ("tokens", "vocab", "chunk_logits", "expected"),
    [
        (48, 50, 1 << 26, 48),  # all at once
        (48, 50, 600, 12),
        (48, 50, 650, 12),  # 13 would fit, but then the last chunk would have a shape of its own
        (48, 50, 1, 1),  # never less than a token
        (47, 50, 600, 12),  # a prime: one short chunk at the end
    ],
)
def test_chunks_are_equal_where_they_can_be(tokens, vocab, chunk_logits, expected):
    assert chunk_size(tokens, vocab, chunk_logits) == expected


def test_compiled_work_on_a_chunk_is_one_graph_for_all_batches():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    loss_fn = LinearCrossEntropy(compile_backend=counter, chunk_logits=12 * VOCAB)
    eager = LinearCrossEntropy(chunk_logits=12 * VOCAB)
    for labels in ("all", "some", "none"):
        batch = inputs(labels)
        for actual, expected in zip(loss_and_grads(loss_fn, *batch), loss_and_grads(eager, *batch), strict=True):
            torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 1
    with torch.no_grad():
        for labels in ("all", "some"):
            torch.testing.assert_close(loss_fn(*inputs(labels)), eager(*inputs(labels)))
    assert counter.frame_count == 2


# 50 words over four ranks are 13, 13, 13 and 11: with this budget of logits a rank that went by its own shard alone
# would cut 48 tokens into 6 chunks on the first three ranks and into 4 on the last.
UNEVEN_BUDGET = 144


def vocabulary_parallel() -> dict:
    """Loss and whole gradients on this rank, by (labels, budget of logits, how h comes)."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = init_device_mesh("cpu", (world.size,))
    results = {}
    for labels, chunk_logits, kind in (
        ("all", 1 << 26, "sequence"),
        ("some", UNEVEN_BUDGET, "sequence"),
        ("some", UNEVEN_BUDGET, "replicated"),
        ("some", UNEVEN_BUDGET, "plain"),
        ("none", UNEVEN_BUDGET, "sequence"),
    ):
        h, weight, targets = inputs(labels)
        h = h.detach()
        if kind != "plain":
            h = distribute_tensor(h, mesh, [Shard(1) if kind == "sequence" else Replicate()])
        h.requires_grad_()
        weight = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
        assert weight.to_local().shape[0] == (11 if world.rank == 3 else 13)
        loss_fn = LinearCrossEntropy(chunk_logits=chunk_logits)
        loss = loss_fn(h, weight, targets)
        (loss * 0.37).backward()
        with torch.no_grad():
            evaluated = loss_fn(h, weight, targets)
        assert kind == "plain" or h.grad.placements == h.placements
        assert weight.grad.placements == weight.placements
        gradients = [g.full_tensor() if isinstance(g, DTensor) else g for g in (h.grad, weight.grad)]
        results[labels, chunk_logits, kind] = [loss.detach(), *gradients], evaluated
    return results


def test_shards_of_the_vocabulary_give_the_value_and_gradients_of_full_logits(rank_pool):
    # Compiled, they are part of what tests/distributed/test_tensor_parallel.py compiles.
    for results in rank_pool.run(4, vocabulary_parallel):
        for (labels, _, kind), (got, evaluated) in results.items():
            expected = reference(*inputs(labels), scale=0.37)
            for actual, right in zip(got, expected, strict=True):
                torch.testing.assert_close(actual, right.float(), rtol=1e-5, atol=1e-5, msg=f"{labels} {kind}")
            torch.testing.assert_close(evaluated, expected[0].float(), rtol=1e-6, atol=0)


def test_a_weight_sharded_in_another_way_is_refused(one_rank):
    mesh = init_device_mesh("cpu", (1,))
    h, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"\(Shard\(dim=1\),\): the loss wants"):
        LinearCrossEntropy()(h, distribute_tensor(weight.detach(), mesh, [Shard(1)]), labels)
