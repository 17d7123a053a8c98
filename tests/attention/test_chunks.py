"""Attention of a part of the queries over the keys of whole rows, as one of several ranks computes it: every back-end,
the ranks one after another in this process, against attention written as loops."""

import functools
import inspect
import itertools

import pytest
import torch
from naive import brute_force_mask, document_ids, naive_attention, segments
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from torchtitan_lite.attention import varlen
from torchtitan_lite.attention.backends import ATTENTIONS, build_backend, masks_documents
from torchtitan_lite.attention.flex import FlexAttention, block_mask
from torchtitan_lite.attention.masks import MaskSpec, chunk_offsets, dense_mask
from torchtitan_lite.attention.varlen import VarlenAttention
from torchtitan_lite.attention.varlen_cpu import varlen_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
MASKING = [attention for attention in ATTENTIONS if masks_documents(attention)]

ROWS = {
    "one row": ([[5, 1, 1, 19, 4]], 32),  # with padding
    "three rows": ([[32], [1, 7, 1, 6, 17], [3, 2]], 32),  # a full row, 1-token documents, mostly padding
    "ids that continue over rows": ([[8], [8], [8]], 8),  # at degree 4, chunks of one token
    "documents end with chunks": ([[8, 8, 16], [4, 12, 16]], 32),
    "several tiles of a window": ([[50, 350]], 400),
}
CASES = [(name, degree, window) for name in list(ROWS)[:4] for degree in (2, 4) for window in (None, 1, 5, 100)]
CASES += [("several tiles of a window", 2, window) for window in (None, 3, 70, 170)]


def places(seq: int, rank: int, degree: int) -> list[int]:
    """Places in the row that a rank holds: those of its chunk from the head and of its chunk from the tail."""
    return [place for place in range(seq) if place * 2 * degree // seq in (rank, 2 * degree - 1 - rank)]


def chunks_of(seq: int, rank: int, degree: int) -> tuple[tuple[int, int], ...]:
    own, half = places(seq, rank, degree), seq // degree // 2
    return ((own[0], own[half - 1] + 1), (own[half], own[-1] + 1))


def qkv(batch: int, seq: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, seq, heads, HEAD_DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@functools.cache
def expected(rows: str, documents: bool, window: int | None) -> tuple[torch.Tensor, ...]:
    """Output, upstream gradient, and gradients of q, k and v."""
    lengths, seq = ROWS[rows]
    ids = document_ids(lengths if documents else [[seq]] * len(lengths), seq)
    inputs = qkv(*ids.shape)
    out = naive_attention(*inputs, ids, window)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return out.detach(), upstream, *torch.autograd.grad((out * upstream).sum(), inputs)


def assert_ranks_equal_naive(backend, rows: str, degree: int, spec: MaskSpec) -> None:
    ids = document_ids(*ROWS[rows])
    inputs = qkv(*ids.shape)
    q, k, v = inputs
    out, upstream, *gradients = expected(rows, spec.document, spec.sliding_window)
    total = 0
    for rank in range(degree):
        own = places(ids.shape[1], rank, degree)
        state = backend.prepare(ids, spec, chunks_of(ids.shape[1], rank, degree))
        part = backend.forward(q[:, own], k, v, state, spec)
        torch.testing.assert_close(part.double(), out[:, own], rtol=0, atol=1e-5)
        total = total + (part * upstream[:, own]).sum()
    for got, wanted in zip(torch.autograd.grad(total, inputs), gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def build(attention: str):
    return build_backend(attention, max_documents_per_row=None, varlen_engine="auto")


@pytest.mark.parametrize(("rows", "degree", "window"), CASES)
@pytest.mark.parametrize("attention", MASKING)
def test_block_causal_equals_naive(attention, rows, degree, window):
    assert_ranks_equal_naive(build(attention), rows, degree, MaskSpec(sliding_window=window))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("rows", ["one row", "three rows"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_without_documents_equals_naive_over_whole_rows(attention, rows, degree):
    assert_ranks_equal_naive(build(attention), rows, degree, MaskSpec(document=False))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", MASKING)
def test_other_documents_change_nothing_by_a_bit(attention, window):
    ids, spec = document_ids([[5, 20, 7]], 32), MaskSpec(sliding_window=window)
    q, k, v = (x.detach() for x in qkv(1, 32))
    changed = (ids == 1)[0]
    for rank in range(2):
        own = torch.tensor(places(32, rank, 2))
        state = build(attention).prepare(ids, spec, chunks_of(32, rank, 2))
        outs = []
        for other in (0.0, 1.0):
            q2, k2, v2 = (x + other * changed[:, None, None] for x in (q, k, v))
            outs.append(build(attention).forward(q2[:, own], k2, v2, state, spec)[0])
        assert torch.equal(*(out[~changed[own]] for out in outs))
        assert (outs[0] - outs[1])[changed[own]].abs().max() > 0.1


def test_offsets_by_hand():
    # documents of 5, 7 and 4, and of 16; chunk [4, 8) holds the last token of the first and the first 3 of the second
    ids = document_ids([[5, 7, 4], [16]], 16)
    cu_q, cu_k = chunk_offsets(ids, MaskSpec(), 3, (4, 8))
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_k.tolist() == [0, 5, 8, 12, 16, 24, 32, 32, 32, 32, 32]  # 2 x (3 documents + padding + the cut) + 1
    assert cu_q.tolist() == [0, 1, 4, 4, 4, 8, 8, 8, 8, 8, 8]
    # the last chunk ends with the row: no cut, and no place for one
    cu_q, cu_k = chunk_offsets(ids, MaskSpec(), 3, (12, 16))
    assert cu_k.tolist() == [0, 5, 12, 16, 32, 32, 32, 32, 32]
    assert cu_q.tolist() == [0, 0, 0, 4, 8, 8, 8, 8, 8]


def test_the_cap_leaves_room_for_the_cut():
    """A full cap of documents and padding, cut inside a document and inside the padding."""
    ids = document_ids([[3, 9]] * 2, 16)
    for chunk in ((4, 8), (8, 14)):
        cu_q, cu_k = chunk_offsets(ids, MaskSpec(), 2, chunk)
        assert cu_k[-1] == 32 and cu_q[-1] == 2 * (chunk[1] - chunk[0])


def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    """What the flash kernel makes of offsets, as loops: a document's last query is aligned with its last key. A key
    that lies in no document has no gradient, which autograd would take for zero: such a call is refused."""
    assert cu_q[0] == cu_k[0] == 0 and cu_q[-1] == len(q) and cu_k[-1] == len(k)
    left = max_k if window_size[0] == -1 else window_size[0]
    outs = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        assert 0 <= q1 - q0 <= max_q and 0 <= k1 - k0 <= max_k
        keys, values = (x[k0:k1].repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) / q.shape[-1] ** 0.5
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        scores = scores.masked_fill((distance < 0) | (distance > left), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("rows", list(ROWS)[:4])
def test_what_flash_is_called_with(monkeypatch, rows, degree, window):
    calls = []

    def record(*args, **kwargs):
        calls.append(inspect.signature(varlen_attn).bind(*args, **kwargs).arguments)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", record)
    backend = VarlenAttention(max_documents_per_row=5, engine="flash")
    assert_ranks_equal_naive(backend, rows, degree, MaskSpec(sliding_window=window))
    batch, seq = len(ROWS[rows][0]), ROWS[rows][1]
    # static: no longest document is looked for
    assert [(call["max_q"], call["max_k"]) for call in calls] == [(seq // (2 * degree), seq)] * (2 * degree)
    # one size each for chunks that end before the row does, and for the one that ends with it
    assert {len(call["cu_seq_q"]) for call in calls} == {batch * 6 + 1, batch * 7 + 1}


def test_nested_engine_refuses_fewer_queries_than_keys():
    backend = VarlenAttention(engine="nested")
    q, k, v = qkv(1, 8)
    state = backend.prepare(document_ids([[8]], 8), MaskSpec(), ((0, 2), (6, 8)))
    with pytest.raises(ValueError, match="engine nested: 2 queries over rows of 8 keys"):
        backend.forward(q[:, [0, 1, 6, 7]], k, v, state, MaskSpec())


@pytest.mark.parametrize("window", [None, 3])
def test_operator_as_torch_sees_it(window):
    q, k, v = (x.detach().flatten(0, 1) for x in qkv(1, 16))
    offsets = chunk_offsets(document_ids([[5, 11]], 16), MaskSpec(), 3, (4, 8))
    arguments = (q[4:8].clone().requires_grad_(), k.requires_grad_(), v.requires_grad_(), *offsets, window)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    assert torch.library.opcheck(varlen_attention, arguments, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")


def test_log_sum_exp_is_that_of_keys_before_the_chunk_too():
    q, k, v = (x.detach().flatten(0, 1) for x in qkv(1, 16))
    offsets = chunk_offsets(document_ids([[2, 14]], 16), MaskSpec(), None, (8, 12))
    _, lse = varlen_attention(q[8:12], k, v, *offsets, None)
    for query in range(8, 12):
        keys = k[2 : query + 1].repeat_interleave(2, dim=1)
        scores = torch.einsum("hd,khd->hk", q[query], keys) / HEAD_DIM**0.5
        torch.testing.assert_close(lse[query - 8], scores.logsumexp(-1))


BLOCK_FIELDS = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]


@pytest.mark.parametrize("window", [None, 1, 17, 40])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("rows", [[[5, 1, 60, 30]], [[128], [1, 63, 64], [40, 41, 42]]])
def test_block_mask_is_what_torch_finds(rows, degree, window):
    ids, spec, block = document_ids(rows, 128), MaskSpec(sliding_window=window), 16
    for rank in range(degree):
        own = torch.tensor(places(128, rank, degree))

        def mask_mod(b, h, query, key, own=own):
            allowed = (key <= own[query]) & (ids[b, own[query]] == ids[b, key])
            return allowed if window is None else allowed & (own[query] - key < window)

        found = create_block_mask(mask_mod, len(ids), None, len(own), 128, device="cpu", BLOCK_SIZE=block)
        computed = block_mask(ids, spec, block, chunks_of(128, rank, degree))
        assert computed.BLOCK_SIZE == found.BLOCK_SIZE and computed.seq_lengths == found.seq_lengths
        for field in BLOCK_FIELDS:
            ours, theirs = getattr(computed, field), getattr(found, field)
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field


def test_mask_of_a_chunk_is_its_rows_of_the_whole_mask():
    ids = document_ids([[5, 11, 10], [32]], 32)
    for window, rank in itertools.product((None, 4), range(2)):
        spec, own = MaskSpec(sliding_window=window), places(32, rank, 2)
        wanted = brute_force_mask(ids, documents=True, window=window)[:, own]
        assert torch.equal(dense_mask(ids, spec, chunks_of(32, rank, 2))[:, 0], wanted)
        mask_mod = block_mask(ids, spec, 8, chunks_of(32, rank, 2)).mask_mod
        row, query, key = torch.meshgrid(torch.arange(2), torch.arange(16), torch.arange(32), indexing="ij")
        assert torch.equal(mask_mod(row, 0, query, key), wanted)


def test_chunks_of_broken_blocks_are_refused():
    with pytest.raises(ValueError, match=r"chunks \(\(0, 24\), \(40, 64\)\) do not consist of blocks of 16"):
        block_mask(document_ids([[64]], 64), MaskSpec(), 16, ((0, 24), (40, 64)))


def test_flex_attention_under_a_block_mask_of_chunks(monkeypatch):
    """The CUDA path, its kernel replaced by the uncompiled one."""
    monkeypatch.setattr("torchtitan_lite.attention.flex._flex_attention", flex_attention)
    ids, spec = document_ids([[5, 100, 20], [128], [3, 125]], 128), MaskSpec(sliding_window=50)
    q, k, v = (x.detach() for x in qkv(3, 128))
    wanted = naive_attention(q, k, v, ids, 50)
    for rank in range(2):
        own = places(128, rank, 2)
        state = block_mask(ids, spec, 32, chunks_of(128, rank, 2))
        out = FlexAttention().forward(q[:, own], k, v, state, spec)
        torch.testing.assert_close(out.double(), wanted[:, own], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_one_graph_whatever_the_documents(attention):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    backend, spec = build(attention), MaskSpec(document=masks_documents(attention))

    @torch.compile(backend=counter, fullgraph=True)
    def block(q, k, v, state):
        return backend.forward(q * 1.0, k, v, state, spec)

    q, k, v = qkv(2, 24)
    own = places(24, 1, 2)
    for count in range(1, 7):
        ids = document_ids([[count] * (24 // count), [24 - count, count]], 24)
        out = block(q[:, own], k, v, backend.prepare(ids, spec, chunks_of(24, 1, 2)))
        whole = ids if spec.document else torch.zeros_like(ids)
        torch.testing.assert_close(out.double(), naive_attention(q, k, v, whole)[:, own], rtol=0, atol=1e-5)
        out.square().sum().backward()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_helper_by_hand():
    assert [places(8, rank, 2) for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [chunks_of(8, rank, 2) for rank in range(2)] == [((0, 2), (6, 8)), ((2, 4), (4, 6))]
    assert segments([0, 0, 1, -1, -1]) == [(0, 2), (2, 3), (3, 5)]
