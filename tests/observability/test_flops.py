import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_lite.attention.masks import MaskSpec
from torchtitan_lite.observability import flops
from torchtitan_lite.observability.flops import attended_pairs, peak_flops, step_flops


def naive_pairs(document_ids: torch.Tensor, spec: MaskSpec) -> int:
    """The definition, pair by pair."""
    count = 0
    for row in document_ids.tolist():
        for query in range(len(row)):
            for key in range(query + 1):
                same = row[query] == row[key] or not spec.document
                near = spec.sliding_window is None or query - key < spec.sliding_window
                count += row[query] >= 0 and same and near
    return count


@pytest.mark.parametrize(
    ("spec", "pairs"),
    [
        # documents of 3 and 2 tokens, one of padding; a row of 6: 6 + 3 and 21
        (MaskSpec(document=True), 9 + 21),
        # 5 tokens before the padding: 15
        (MaskSpec(document=False), 15 + 21),
        # window of 2: a document of L has 2 L - 1: 5 + 3 and 11
        (MaskSpec(document=True, sliding_window=2), 8 + 11),
        (MaskSpec(document=False, sliding_window=2), 9 + 11),
        # a token that attends itself only
        (MaskSpec(document=True, sliding_window=1), 5 + 6),
    ],
)
def test_pairs_by_hand(spec, pairs):
    ids = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    assert attended_pairs(ids, spec) == pairs


def test_padding_rows_have_no_pairs():
    assert attended_pairs(torch.full((2, 4), -1, dtype=torch.int32), MaskSpec(document=True)) == 0


@pytest.mark.parametrize("document", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_pairs_against_the_definition(document, window):
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(8, 37, generator=generator) < 0.2
    ids = starts.int().cumsum(1).int()
    ids -= ids[:, :1]
    for row, padding in enumerate([0, 1, 5, 36, 37, 0, 2, 9]):
        ids[row, 37 - padding :] = -1
    spec = MaskSpec(document=document, sliding_window=window)
    assert attended_pairs(ids, spec) == naive_pairs(ids, spec)


def test_pairs_of_a_long_row_are_exact():
    """More than 2^31 pairs, and more than fp32 could count."""
    seq = 100_003
    assert attended_pairs(torch.zeros(1, seq, dtype=torch.int32), MaskSpec(document=True)) == seq * (seq + 1) // 2


def test_step_flops_by_counting_matmuls():
    """One linear layer 3 -> 5 and one attended pair, in two heads of width 4, written out."""
    linear_forward = 2 * 3 * 5
    attention_forward = 2 * (2 * 4 + 2 * 4)  # heads x (score + weighted sum)
    assert step_flops(matmul_params=15, attention_width=8, tokens=1, pairs=0) == 3 * linear_forward
    assert step_flops(matmul_params=15, attention_width=8, tokens=0, pairs=1) == 3 * attention_forward


def test_step_flops_against_torchs_counter():
    """Q, K, V and output projections around attention without a mask: every query attends every key."""
    tokens, heads, head_dim, dim = 5, 2, 4, 6
    width = heads * head_dim
    x = torch.ones(tokens, dim, requires_grad=True)
    qkv, out = torch.ones(dim, 3 * width, requires_grad=True), torch.ones(width, dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (x @ qkv).view(tokens, 3, heads, head_dim).permute(1, 2, 0, 3)  # each [heads, tokens, head_dim]
        attention = (q @ k.transpose(1, 2)).softmax(-1) @ v
        (attention.transpose(0, 1).reshape(tokens, width) @ out).sum().backward()
    matmul_params = qkv.numel() + out.numel()
    expected = step_flops(matmul_params=matmul_params, attention_width=width, tokens=tokens, pairs=tokens**2)
    assert counter.get_total_flops() == expected


def test_worked_example_of_the_docs():
    """8B, one row of 8,192 tokens in 32 documents of 256, as docs/metrics.md works it out."""
    ids = torch.arange(32, dtype=torch.int32).repeat_interleave(256)[None]
    pairs = attended_pairs(ids, MaskSpec(document=True))
    assert pairs == 32 * 256 * 257 // 2 == 1_052_672
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    matmul_params = 32 * layer + 4096 * 128256
    assert matmul_params == 7_504_658_432
    total = step_flops(matmul_params=matmul_params, attention_width=4096, tokens=8192, pairs=32 * pairs)
    assert total == 368_868_971_249_664 + 1_655_709_892_608
    assert round(100 * total / 989.5e12, 1) == 37.4


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H200", torch.bfloat16, 989.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.5),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
    ],
)
def test_published_peaks(name, dtype, tflops):
    peak, source = flops.published_peak(name, dtype)
    assert peak == tflops * 1e12
    assert name in source and "published" in source


def test_fp32_peak_is_that_of_tf32_where_torch_may_use_it():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        peak, source = flops.published_peak("NVIDIA A100-SXM4-80GB", torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert peak == 156e12
    assert "tf32" in source


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A10G",
        "NVIDIA H20",
        "Tesla T4",
    ],
)
def test_unlike_gpus_are_not_given_a_published_peak(name):
    assert flops.published_peak(name, torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_peak_is_measured_in_the_dtype_and_said_so(dtype):
    state = torch.get_rng_state()
    began = time.perf_counter()
    peak, source = peak_flops(torch.device("cpu"), dtype)
    assert time.perf_counter() - began < 5  # normally 0.2, but tests share the machine
    assert 1e6 < peak < 1e15
    assert "measured here" in source and str(dtype).removeprefix("torch.") in source
    assert torch.equal(torch.get_rng_state(), state)
