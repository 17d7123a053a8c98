import pytest
import torch

from torchtitan_lite.distributed.precision import resolve_param_dtype


@pytest.mark.parametrize(
    ("name", "device", "has_bf16", "expected"),
    [
        ("auto", "cuda", False, torch.bfloat16),
        ("auto", "cpu", True, torch.bfloat16),
        ("auto", "cpu", False, torch.float32),
        ("bfloat16", "cpu", False, torch.bfloat16),
        ("float32", "cuda", True, torch.float32),
    ],
)
def test_compute_type(monkeypatch, name, device, has_bf16, expected):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert resolve_param_dtype(name, device) == expected


def test_a_torch_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)  # such a build lacks the operators
    assert resolve_param_dtype("auto", "cpu") == torch.float32
