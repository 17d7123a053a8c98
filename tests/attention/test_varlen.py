"""The variable-length engines: the CPU operator as torch sees it, and what the CUDA engines hand to their kernels."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from naive import document_ids, naive_attention
from torch.nn.attention.varlen import varlen_attn

from torchtitan_lite.attention import varlen
from torchtitan_lite.attention.masks import MaskSpec, cumulative_lengths
from torchtitan_lite.attention.varlen import VarlenAttention, resolve_engine
from torchtitan_lite.attention.varlen_cpu import varlen_attention

ROWS = [[5, 1, 6], [2, 3, 4]]  # seq 12, with padding
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def flat_qkv(tokens: int = 24, *, requires_grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, 8, generator=generator, requires_grad=requires_grad) for heads in (4, 2, 2)]


def offsets(cap: int | None = 4) -> torch.Tensor:
    return cumulative_lengths(document_ids(ROWS, 12), MaskSpec(), cap)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(window, requires_grad):
    arguments = (*flat_qkv(requires_grad=requires_grad), offsets(), offsets(), window)
    results = torch.library.opcheck(varlen_attention, arguments, test_utils=OPCHECKS)
    assert results == dict.fromkeys(OPCHECKS, "SUCCESS")


def test_log_sum_exp_is_that_of_the_attended_scores():
    q, k, v = flat_qkv(6, requires_grad=False)
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    _, lse = varlen_attention(q, k, v, cu_seqlens, cu_seqlens, None)
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) / 8**0.5
    assert lse.shape == (6, 4) and lse.dtype == torch.float32
    torch.testing.assert_close(lse[1], scores[1, :, 0:2].logsumexp(-1))
    torch.testing.assert_close(lse[4], scores[4, :, 2:5].logsumexp(-1))


@pytest.mark.parametrize("window", [None, 3])
def test_any_strides(window):
    """Views whose head_dim is not adjacent, and the expanded gradient of a plain sum, are read right."""
    inputs = flat_qkv()
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    outs = [varlen_attention(*x, offsets(), offsets(), window)[0] for x in (inputs, strided)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out.sum(), x) for out, x in zip(outs, (inputs, strided), strict=True)]
    weighted = torch.autograd.grad(
        (varlen_attention(*inputs, offsets(), offsets(), window)[0] * torch.ones_like(outs[0])).sum(), inputs
    )
    for plain, from_views, from_weights in zip(*grads, weighted, strict=True):
        assert torch.equal(plain, from_views) and torch.equal(plain, from_weights)


def test_log_sum_exp_has_no_gradient():
    """It is what backward needs; a gradient towards it would be lost without a word."""
    out, lse = varlen_attention(*flat_qkv(), offsets(), offsets(), None)
    assert out.requires_grad and not lse.requires_grad


def test_unused_places_change_nothing():
    inputs = flat_qkv()
    tight, loose = offsets()[:8], offsets(cap=None)  # seven documents, the last of them padding
    assert tight[-1] == 24 and len(loose) > len(tight)
    results = []
    for cu_seqlens in (tight, loose):
        out, _ = varlen_attention(*inputs, cu_seqlens, cu_seqlens, None)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("window", [None, 3])
def test_autocast_joins_fp32_rotations_with_bf16_values(window):
    q, k, v = flat_qkv(requires_grad=False)
    inputs = [q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = varlen_attention(*inputs, offsets(), offsets(), window)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, torch.bfloat16]
    ids = document_ids(ROWS, 12)
    expected = naive_attention(*(x.detach().bfloat16().unflatten(0, (2, 12)) for x in inputs), ids, window)
    torch.testing.assert_close(out.double(), expected.flatten(0, 1), rtol=0, atol=0.03)  # a bf16 step at 2 is 0.016


@pytest.mark.parametrize(
    ("engine", "device", "dtype", "expected"),
    [
        ("auto", "cpu", torch.float32, "cpu"),
        ("auto", "cpu", torch.bfloat16, "cpu"),
        ("auto", "cuda", torch.bfloat16, "flash"),
        ("auto", "cuda", torch.float32, "nested"),
        ("nested", "cuda", torch.bfloat16, "nested"),
        ("flash", "cpu", torch.float32, "flash"),
    ],
)
def test_engine(engine, device, dtype, expected):
    assert resolve_engine(engine, device, dtype) == expected


@pytest.mark.parametrize(("window", "expected"), [(None, (-1, 0)), (1, (0, 0)), (128, (127, 0))])
def test_what_flash_is_called_with(monkeypatch, window, expected):
    """The kernel counts a window's tokens beside the query, and knows plain causal only by the tuple (-1, 0)."""
    calls = []

    def record(*args, **kwargs):
        calls.append(inspect.signature(varlen_attn).bind(*args, **kwargs).arguments)
        return args[0]

    monkeypatch.setattr(varlen, "varlen_attn", record)
    backend = VarlenAttention(max_documents_per_row=4, engine="flash")
    spec = MaskSpec(sliding_window=window)
    q, k, v = (x.unflatten(0, (2, 12)) for x in flat_qkv(requires_grad=False))
    state = backend.prepare(document_ids(ROWS, 12), spec)
    assert backend.forward(q, k, v, state, spec).shape == q.shape

    (call,) = calls
    assert call["query"].shape == (24, 4, 8) and call["key"].shape == call["value"].shape == (24, 2, 8)
    assert torch.equal(call["cu_seq_q"], offsets()) and torch.equal(call["cu_seq_k"], offsets())
    assert call["cu_seq_q"].dtype == torch.int32
    assert (call["max_q"], call["max_k"]) == (12, 12)  # static: the row's length, not the longest document's
    assert call["window_size"] == expected and type(call["window_size"]) is tuple
    # where the kernel wants to be told of grouped heads, it is told
    assert call.get("enable_gqa", False) == ("enable_gqa" in inspect.signature(varlen_attn).parameters)


def test_nested_engine_equals_naive(monkeypatch):
    """Causal SDPA over NestedTensor exists on CUDA alone: here each component goes through the dense kernel."""
    seen = []

    def by_component(q, k, v, is_causal):
        assert is_causal
        seen.extend((q, k, v))
        outs = [dense(*component) for component in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)]
        values = torch.cat([out.transpose(0, 1) for out in outs])
        return torch.nested.nested_tensor_from_jagged(values, q.offsets()).transpose(1, 2)

    original = F.scaled_dot_product_attention

    def dense(q, k, v):
        return original(q[None], k[None], v[None], is_causal=True)[0] if q.shape[1] else q

    monkeypatch.setattr(F, "scaled_dot_product_attention", by_component)
    ids = document_ids(ROWS, 12)
    q, k, v = (x.unflatten(0, (2, 12)) for x in flat_qkv(requires_grad=False))
    backend = VarlenAttention(max_documents_per_row=4, engine="nested")
    out = backend.forward(q, k, v, backend.prepare(ids, MaskSpec()), MaskSpec())
    torch.testing.assert_close(out.double(), naive_attention(q, k, v, ids), rtol=0, atol=1e-5)
    for nested in seen:
        assert nested.shape[1] == 4  # heads repeated: jagged SDPA has no grouped ones
        assert nested._get_max_seqlen() == 12
        # an empty document would, by its length, rule out every causal kernel there is
        assert nested._get_min_seqlen() > 0
