"""Model FLOPs of a step, counting only what was attended, and the peak they are held against.

The convention is that of PaLM (Chowdhery et al. 2022, appendix B): a multiply-add is 2 FLOPs, the backward pass costs
twice the forward pass, and recomputation (activation checkpointing) does not count. Unlike there, attention is counted
by the (query, key) pairs that the mask lets through, so causal, packed and sliding-window runs are not flattered.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lite.attention.masks import MaskSpec, first_keys


def attended_pairs(document_ids: Tensor, spec: MaskSpec) -> int:
    """Number of (query, key) pairs that ``spec`` lets the non-padding tokens attend, in one head of one layer.

    A document of L tokens has sum over i < L of min(i + 1, sliding_window) pairs. Without ``spec.document``, what a row
    holds before its padding counts as one document.

    Args:
        document_ids: [batch, seq] integers on the CPU, -1 = padding, which lies at the end of the row.
        spec: the layer's mask.
    """
    query = torch.arange(document_ids.shape[1])
    attended = query - first_keys(document_ids, spec) + 1  # [batch, seq] keys of each query
    return int(attended[document_ids >= 0].sum())


def step_flops(*, matmul_params: int, attention_width: int, tokens: int, pairs: int, frozen_params: int = 0) -> int:
    """Model FLOPs of one forward and backward pass: ``6 * matmul_params * tokens + 12 * attention_width * pairs``.

    Each weight of a matrix product costs a token 2 FLOPs forward and 4 backward, 2 of these for its own gradient, which
    a frozen one does not get. Each attended pair costs a head
    2 * head_dim for the score and 2 * head_dim for the weighted sum, and twice that backward.

    Args:
        matmul_params: weights that take part in a matrix product with every token: all linear layers and the output
            projection (also when tied to the embedding); not the embedding look-up, not the norms.
        attention_width: n_heads * head_dim (query heads).
        tokens: non-padding tokens.
        pairs: :func:`attended_pairs`, summed over the layers.
        frozen_params: how many of ``matmul_params`` are not trained.
    """
    return (6 * matmul_params - 2 * frozen_params) * tokens + 12 * attention_width * pairs


class _Peaks(NamedTuple):
    """Dense peaks in TFLOP/s from the vendor's data sheet. fp32 means without tensor cores."""

    bf16: float
    tf32: float
    fp32: float


# Searched in the device name in this order. Where NVIDIA prints numbers with sparsity, half of them is entered.
_PUBLISHED = {
    r"\bGB200\b": _Peaks(2500, 1250, 80),
    r"\bB200\b": _Peaks(2250, 1125, 75),
    r"\bH200 NVL\b": _Peaks(835.5, 417.5, 60),
    r"\bG?H200\b": _Peaks(989.5, 494.5, 67),
    r"\bH100 NVL\b": _Peaks(835.5, 417.5, 60),
    r"\bH100 PCIe\b": _Peaks(756.5, 378, 51),
    r"\bH100\b": _Peaks(989.5, 494.5, 67),
    r"\bA100\b": _Peaks(312, 156, 19.5),
    r"\bA40\b": _Peaks(149.7, 74.8, 37.4),
    r"\bA30\b": _Peaks(165, 82, 10.3),
    r"\bA10\b": _Peaks(125, 62.5, 31.2),
    r"\bL40S\b": _Peaks(362, 183, 91.6),
    r"\bL40\b": _Peaks(181, 90.5, 90.5),
    r"\bL4\b": _Peaks(121, 60, 30.3),
    r"\bRTX A6000$": _Peaks(154.8, 77.4, 38.7),
    r"\bRTX 5090$": _Peaks(209.5, 104.8, 104.8),  # bf16 with fp32 accumulation, as torch uses it
    r"\bRTX 4090$": _Peaks(165.2, 82.6, 82.6),
    r"\bRTX 3090$": _Peaks(71, 35.6, 35.6),
}


def published_peak(name: str, dtype: torch.dtype) -> tuple[float, str] | None:
    """FLOP/s of the GPU of this name, as torch names it, for dense products in bf16 or fp32 (TF32 where torch is set to
    use it), and the words for where they come from. None for what is not known."""
    if "MIG" in name.split():  # a slice of the GPU carries the GPU's name
        return None
    peaks = next((peaks for pattern, peaks in _PUBLISHED.items() if re.search(pattern, name)), None)
    if peaks is None or dtype not in (torch.bfloat16, torch.float32):
        return None
    if dtype == torch.bfloat16:
        tflops, kind = peaks.bf16, "bf16"
    elif torch.get_float32_matmul_precision() == "highest":
        tflops, kind = peaks.fp32, "fp32"
    else:
        tflops, kind = peaks.tf32, "tf32"
    return tflops * 1e12, f"the published dense {kind} peak of {name}"


def _measured_peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Best rate of square matrix products from 256 on, each size tried for a tenth of a second. Ends before a size
    that would take long.

    On CPU one thread is measured and multiplied: where a machine is shared, some tries of one thread go undisturbed,
    while threads that wait for each other hardly ever do.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1

    def seconds(size: int) -> float:
        # Not random numbers: measuring must leave the run's generators alone. Not ones: they draw less power on a GPU.
        a = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    best_rate, best_size, fastest = 0.0, 0, 0.0
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
        seconds(256)  # loads libraries
        for size in (256, 512, 1024, 2048, 4096):
            if 8 * fastest > 0.1:
                break
            tries = [seconds(size)]
            while sum(tries) < 0.1:
                tries.append(seconds(size))
            fastest = min(tries)
            best_rate, best_size = max((best_rate, best_size), (2 * size**3 / fastest, size))
    finally:
        if device.type == "cpu":
            torch.set_num_threads(threads)
    kind = str(dtype).removeprefix("torch.")
    text = f"measured here by a {best_size} x {best_size} {kind} matmul"
    return best_rate * threads, text + (f" on one thread, times {threads} threads" if threads > 1 else "")


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s that one device can reach in ``dtype``, and where the number comes from, in words for the log.

    A known GPU has its published dense peak; for fp32 that of TF32 if torch is allowed to use it. Any other GPU, and
    every CPU, is measured by matrix products for a fraction of a second with the threads this process has.
    """
    published = published_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return published or _measured_peak(device, dtype)
