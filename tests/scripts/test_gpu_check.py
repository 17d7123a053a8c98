"""The GPU check's own logic, as far as a CPU can run it."""

import pytest
import torch

import scripts.gpu_check as gpu_check
from torchtitan_lite.attention.masks import MaskSpec


@pytest.mark.parametrize("case", list(gpu_check.cases("cpu")), ids=str)
def test_cases_pass_on_cpu(case, monkeypatch):
    monkeypatch.setattr(gpu_check, "SEQ", 128)
    monkeypatch.setattr(gpu_check, "HEAD_DIM", 16)
    assert gpu_check.check_against_naive(case, "cpu").startswith("errors of out")
    assert gpu_check.check_context_parallel(case, "cpu").startswith("errors of out")
    assert gpu_check.check_isolation(case, "cpu") == (
        "differ, as they must" if case.attention == "sdpa" else "equal bit for bit"
    )


def test_a_leak_is_caught(monkeypatch):
    """A back-end that ignores documents fails both checks."""
    monkeypatch.setattr(gpu_check, "SEQ", 128)
    leaky = gpu_check.Case("sdpa", "auto", None, torch.float32)
    monkeypatch.setattr(gpu_check.Case, "spec", property(lambda self: MaskSpec(document=True)))
    monkeypatch.setattr(
        "torchtitan_lite.attention.sdpa.SdpaAttention.prepare", lambda self, ids, spec, chunks=None: None
    )
    with pytest.raises(AssertionError, match="errors of out"):
        gpu_check.check_against_naive(leaky, "cpu")
    with pytest.raises(AssertionError, match="equal: False"):
        gpu_check.check_isolation(leaky, "cpu")


def test_every_cuda_engine_is_covered():
    covered = {(c.attention, c.engine, c.dtype) for c in gpu_check.cases("cuda")}
    assert ("sdpa_block_causal", "flash", torch.bfloat16) in covered
    assert ("sdpa_block_causal", "nested", torch.float32) in covered
    assert ("flex_block_causal", "auto", torch.bfloat16) in covered
    assert ("sdpa_block_causal", "flash", torch.float32) not in covered
    windows = {c.window for c in gpu_check.cases("cuda") if c.engine == "flash"}
    assert windows == {None, 1, 100, 4096}


def test_random_documents_hold_what_they_promise():
    ids = gpu_check.random_documents(3, 7, "cpu")
    assert (ids[0] == 0).all()
    for row in ids[1:]:
        used = row[row >= 0]
        assert (used.diff() >= 0).all() and (used.diff() <= 1).all() and used[0] == 0
        assert (row[len(used) :] == -1).all() and len(used) < len(row)
    assert ids.max() < gpu_check.MAX_DOCUMENTS
