"""Context parallelism: how rows are shared, and whole models on 2 and 4 gloo ranks against one process."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from toy_run import TOY

from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.config.schema import ActivationCheckpoint
from torchtitan_lite.data.collator import Batch, collate_rows, num_targets
from torchtitan_lite.distributed.context_parallel import (
    apply_context_parallel,
    attended_pairs_by_rank,
    context_parallel_problems,
    head_tail_chunks,
    shard_batch,
)
from torchtitan_lite.distributed.fsdp import shard_model
from torchtitan_lite.distributed.mesh import Degrees, Mesh, init_distributed, world_from_environment
from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer
from torchtitan_lite.models.llama3.rope import apply_rope, rope_cos_sin, rope_frequencies
from torchtitan_lite.observability.flops import attended_pairs
from torchtitan_lite.training.activation_checkpoint import apply_activation_checkpoint
from torchtitan_lite.training.compile import compile_blocks
from torchtitan_lite.training.loss import LinearCrossEntropy

SEQ = 64


def packed(rows: list[list[int]], seq: int = SEQ, seed: int = 0) -> Batch:
    """Rows of documents of random tokens, given their lengths."""
    generator = np.random.default_rng(seed)
    documents = [[generator.integers(0, TOY.vocab_size, length) for length in lengths] for lengths in rows]
    return collate_rows(documents, seq_len=seq, pad_id=0, max_documents_per_row=16)


# Two rows for each of two data-parallel ranks; documents across chunks, of one token, of a whole row; padding.
BATCH = packed([[37, 3, 1, 13, 9], [64], [1, 30, 7], [20, 44]])
SLIDING = {"sliding_window": 20, "sliding_window_pattern": (True, False)}
# Positions count for more the higher the frequencies are; the toy's documents are short.
ARGS = {
    "sdpa": replace(TOY, attention="sdpa", rope_theta=100.0),
    "varlen": replace(TOY, attention="sdpa_block_causal", rope_theta=100.0),
    "flex": replace(TOY, attention="flex_block_causal", rope_theta=100.0),
    "varlen, sliding": replace(TOY, attention="sdpa_block_causal", rope_theta=100.0, **SLIDING),
    "flex, sliding": replace(TOY, attention="flex_block_causal", rope_theta=100.0, **SLIDING),
}


def whole_model(args: ModelArgs) -> Transformer:
    model = Transformer(args)
    fill(model, args)
    return model


def fill(model: Transformer, args: ModelArgs) -> None:
    """Weights large enough for attention to matter."""
    init_weights(model, args, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and "norm" not in name:
                parameter.mul_(8)


def shared_model(args: ModelArgs, mesh: Mesh, mode: str = "none", backend=None) -> Transformer:
    """This rank's part, built as the trainer builds it."""
    with torch.device("meta"):
        model = Transformer(args)
    apply_context_parallel(model, mesh.cp)
    apply_activation_checkpoint(model, ActivationCheckpoint(mode))
    if backend is not None:
        compile_blocks(model, backend)
    shard_model(model, mesh.fsdp, torch.float32, torch.float32)
    model.to_empty(device="cpu")
    fill(model, args)
    return model


class Case(NamedTuple):
    attention: str
    mode: str = "none"
    compile_backend: str | None = None


def loss_and_gradients(cases: list[Case], degrees: Degrees) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Of each case: the loss over all ranks, and the gradients put together from the shards."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = Mesh("cpu", degrees, world.rank)
    rows = len(BATCH.tokens) // degrees.dp
    start = mesh.place.dp_shard * rows
    own = shard_batch(Batch(*(field[start : start + rows] for field in BATCH)), mesh.place.cp, degrees.cp)
    assert own.tokens.shape == (rows, SEQ // degrees.cp) and own.document_ids.shape == (rows, SEQ)
    results = []
    for case in cases:
        torch._dynamo.reset()
        model = shared_model(ARGS[case.attention], mesh, case.mode, case.compile_backend)
        loss = model(own.tokens, own.document_ids, own.positions, own.labels, LinearCrossEntropy(chunk_logits=1000))
        loss = loss / num_targets(BATCH)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        results.append((total, {name: p.grad.full_tensor() for name, p in model.named_parameters()}))
    return results


@pytest.fixture(scope="module")
def expected():
    """Of each attention, in one process and with none of it."""
    results = {}
    for name, args in ARGS.items():
        model = whole_model(args)
        loss = model(
            BATCH.tokens, BATCH.document_ids, BATCH.positions, BATCH.labels, LinearCrossEntropy(chunk_logits=1000)
        )
        loss = loss / num_targets(BATCH)
        loss.backward()
        results[name] = (loss.detach(), {name: p.grad for name, p in model.named_parameters()})
    return results


def assert_equals_one_process(rank_pool, expected, ranks: int, cases: list[Case], degrees: Degrees) -> None:
    for results in rank_pool.run(ranks, loss_and_gradients, cases, degrees):
        for case, (loss, gradients) in zip(cases, results, strict=True):
            wanted_loss, wanted = expected[case.attention]
            torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=0, msg=lambda m, case=case: f"{case}: {m}")
            assert gradients.keys() == wanted.keys()
            for name, gradient in gradients.items():
                error = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
                assert error < 1e-5, (case, name, error)


def test_two_ranks_are_one_process(rank_pool, expected):
    cases = [Case(attention) for attention in ARGS]
    cases += [Case("varlen", "full"), Case("sdpa", "selective"), Case("flex, sliding", "selective")]
    cases += [Case("sdpa", "full", "aot_eager"), Case("flex", "none", "aot_eager")]
    cases += [Case("varlen, sliding", "selective", "aot_eager")]
    assert_equals_one_process(rank_pool, expected, 2, cases, Degrees(cp=2))


def test_four_ranks_are_one_process(rank_pool, expected):
    cases = [Case("sdpa"), Case("varlen, sliding", "full"), Case("flex", "selective")]
    assert_equals_one_process(rank_pool, expected, 4, cases, Degrees(cp=4))


def test_beside_data_parallel_ranks_with_rows_of_their_own(rank_pool, expected):
    assert_equals_one_process(rank_pool, expected, 4, [Case("varlen, sliding")], Degrees(dp_shard=2, cp=2))


def logits_and_graphs() -> tuple[list[torch.Tensor], int, list[str]]:
    """Logits of a row before and after its second document's tokens change, graphs compiled for six batches, and what
    is said of batches that were not cut."""
    world = world_from_environment()
    init_distributed(world, timeout_seconds=60)
    mesh = Mesh("cpu", Degrees(cp=world.size), world.rank)

    model = shared_model(ARGS["varlen"], mesh)
    before = packed([[9, 40, 15]])
    changed = torch.where(before.document_ids == 1, (before.tokens + 1) % TOY.vocab_size, before.tokens)
    logits = []
    for batch in (before, before._replace(tokens=changed)):
        own = shard_batch(batch, world.rank, world.size)
        logits.append(model(own.tokens, own.document_ids, own.positions).detach())

    counter = CompileCounterWithBackend("aot_eager")
    model = shared_model(replace(ARGS["varlen, sliding"], n_layers=4), mesh, backend=counter)
    for count in range(1, 7):
        own = shard_batch(packed([[count] * 5, [64 - count, count]], seed=count), world.rank, world.size)
        model(own.tokens, own.document_ids, own.positions).square().mean().backward()

    refusals = []
    for document_ids, positions in (
        (None, own.positions),
        (own.document_ids, None),
        (own.document_ids[:, :32], own.positions),
    ):
        with pytest.raises(ValueError) as error:
            model(own.tokens, document_ids, positions)
        refusals.append(str(error.value))
    return logits, counter.frame_count, refusals


def test_isolation_graphs_and_refusals(rank_pool):
    ids = packed([[9, 40, 15]]).document_ids
    for rank, ((before, after), graphs, refusals) in enumerate(rank_pool.run(2, logits_and_graphs)):
        # chunks of 16: both ranks hold tokens of the second document, rank 0 also of the two others
        own = torch.cat([ids[:, lo:hi] for lo, hi in head_tail_chunks(SEQ, rank, 2)], dim=1)
        assert torch.equal(before[own != 1], after[own != 1])
        assert (before - after)[own == 1].abs().max() > 0.1
        assert graphs == 2  # one for each distinct mask, whatever the documents
        need = (
            "; it needs the document_ids of whole rows and the positions of this rank's tokens: cut batches with "
            "shard_batch"
        )
        assert refusals == [
            f"context parallelism of degree 2 was given document_ids {ids}, positions {positions}{need}"
            for ids, positions in (("None", "[2, 32]"), ("[2, 64]", "None"), ("[2, 32]", "[2, 32]"))
        ]


def test_one_rank_changes_nothing(one_rank):
    model = Transformer(ARGS["varlen"])
    backend = model.backend
    apply_context_parallel(model, Mesh("cpu", Degrees(), 0).cp)
    assert model.backend is backend and not model._forward_pre_hooks


def test_head_and_tail_chunks():
    assert [head_tail_chunks(8, rank, 2) for rank in range(2)] == [((0, 2), (6, 8)), ((2, 4), (4, 6))]
    assert [head_tail_chunks(16, rank, 4) for rank in (0, 3)] == [((0, 2), (14, 16)), ((6, 8), (8, 10))]
    assert head_tail_chunks(7, 0, 1) == ((0, 7),)
    with pytest.raises(ValueError, match="of degree 3 cuts rows into 6 chunks, not 16 tokens"):
        head_tail_chunks(16, 0, 3)


def test_a_rank_takes_the_first_and_last_of_each_row():
    """Two rows of four tokens, numbered through: the first of two ranks has 0, 3, 4 and 7."""
    numbers = torch.arange(8).view(2, 4)
    ids, positions = torch.zeros(2, 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32).repeat(2, 1)
    first, second = (shard_batch(Batch(numbers, numbers + 100, ids, positions), rank, 2) for rank in range(2))
    assert first.tokens.flatten().tolist() == [0, 3, 4, 7]
    assert first.labels.flatten().tolist() == [100, 103, 104, 107]
    assert first.positions.flatten().tolist() == [0, 3, 0, 3] and first.positions.dtype == torch.int32
    assert second.tokens.flatten().tolist() == [1, 2, 5, 6]
    assert first.document_ids is ids and second.document_ids is ids
    assert shard_batch(BATCH, 0, 1) is BATCH


def test_positions_restart_with_documents_and_not_with_chunks():
    batch = packed([[3, 5]], seq=8)  # positions 0 1 2 0 1 2 3 4
    first, second = (shard_batch(batch, rank, 2).positions.tolist() for rank in range(2))
    assert first == [[0, 1, 3, 4]] and second == [[2, 0, 1, 2]]


def test_rotating_the_row_and_cutting_it_is_cutting_and_rotating():
    frequencies = rope_frequencies(8, 500000.0, None)
    x = torch.randn(len(BATCH.tokens), SEQ, 4, 8, generator=torch.Generator().manual_seed(0))
    rotated = apply_rope(x, *rope_cos_sin(BATCH.positions, frequencies))
    for degree in (2, 4):
        for rank in range(degree):
            own = shard_batch(BATCH, rank, degree)
            chunks = head_tail_chunks(SEQ, rank, degree)
            mine, wanted = (torch.cat([y[:, lo:hi] for lo, hi in chunks], dim=1) for y in (x, rotated))
            assert torch.equal(apply_rope(mine, *rope_cos_sin(own.positions, frequencies)), wanted)


@pytest.mark.parametrize("spec", [MaskSpec(), MaskSpec(sliding_window=6), MaskSpec(document=False)])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_attended_pairs_of_each_rank(degree, spec):
    ids = BATCH.document_ids
    counts = [0] * degree
    for row in ids.tolist():
        for query, document in enumerate(row):
            keys = [
                key
                for key in range(query + 1)
                if (row[key] == document or not spec.document)
                and (spec.sliding_window is None or query - key < spec.sliding_window)
            ]
            chunk = query * 2 * degree // len(row)
            counts[min(chunk, 2 * degree - 1 - chunk)] += len(keys) if document >= 0 else 0
    assert attended_pairs_by_rank(ids, spec, degree) == counts
    assert sum(counts) == attended_pairs(ids, spec)


def test_one_document_is_shared_evenly():
    ids = torch.zeros(1, 64, dtype=torch.int32)
    assert attended_pairs_by_rank(ids, MaskSpec(), 4) == [64 * 65 // 2 // 4] * 4


def test_rows_that_cannot_be_shared_are_refused():
    flex = replace(TOY, attention="flex_block_causal")
    assert context_parallel_problems(TOY, 4, 64) == context_parallel_problems(flex, 4, 1024) == []
    assert context_parallel_problems(TOY, 1, 63) == context_parallel_problems(flex, 1, 128) == []
    assert context_parallel_problems(TOY, 4, 100) == [
        "training.seq_len=100: parallelism.context_parallel_degree=4 cuts each row into 8 equal chunks, so it must be "
        "a multiple of 8; 96 or 104 would do"
    ]
    assert context_parallel_problems(TOY, 2, 3) == [
        "training.seq_len=3: parallelism.context_parallel_degree=2 cuts each row into 4 equal chunks, so it must be a "
        "multiple of 4; 4 would do"
    ]
    assert context_parallel_problems(flex, 2, 640) == [
        "training.seq_len=640: parallelism.context_parallel_degree=2 cuts each row into 4 equal chunks, each of whole "
        "blocks of 128 tokens for flex_block_causal, so it must be a multiple of 512; 512 or 1024 would do"
    ]
