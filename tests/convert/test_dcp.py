"""Checkpoints of runs from and to other formats."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny_hf import LLAMA3_ROPE, saved

from torchtitan_lite.convert.dcp import StepWeights, write_step
from torchtitan_lite.convert.formats import format_of, open_weights, stored_dtype, write_weights
from torchtitan_lite.convert.hf import HFWeights
from torchtitan_lite.convert.weights import WeightsError, parameter_shapes
from torchtitan_lite.models.llama3.lora import LoraSpec, adapter_shapes

VARIANT = {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 20}


def equal_weights(a, b) -> bool:
    read = [each.read(list(each.tensors)) for each in (a, b)]
    return read[0].keys() == read[1].keys() and all(read[0][name].equal(read[1][name]) for name in read[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_through_a_step_and_back(tmp_path, dtype):
    source = HFWeights(saved(tmp_path / "hf", dtype=dtype, **VARIANT))
    seen = []
    write_step(source, tmp_path / "step-0", progress=seen.append)
    step = StepWeights(tmp_path / "step-0")
    assert step.args == source.args
    assert {stored.dtype for stored in step.tensors.values()} == {torch.float32}
    assert sum(seen) == source.args.parameters
    write_weights(step, tmp_path / "out", "hf", dtype=stored_dtype(source))
    assert equal_weights(HFWeights(tmp_path / "out"), source)


def test_weights_are_read_one_tensor_at_a_time(tmp_path, monkeypatch):
    source = HFWeights(saved(tmp_path / "hf"))
    asked = []
    read = HFWeights.read
    monkeypatch.setattr(HFWeights, "read", lambda self, names: asked.append(list(names)) or read(self, names))
    write_step(source, tmp_path / "step-0")
    assert sorted(asked) == sorted([name] for name in source.tensors)


def test_formats_are_told_apart(tmp_path):
    source = saved(tmp_path / "hf")
    write_weights(open_weights(source), tmp_path / "dcp", "dcp")
    write_weights(open_weights(source), tmp_path / "meta", "meta")
    assert [format_of(tmp_path / name) for name in ("hf", "dcp", "meta")] == ["hf", "dcp", "meta"]
    (source / "consolidated.00.pth").touch()
    with pytest.raises(WeightsError, match="formats hf and meta; say which by --from"):
        format_of(source)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"holds no weights that are read: .*; it has pytorch_model\.bin"):
        format_of(tmp_path)
    with pytest.raises(WeightsError, match="no such folder"):
        format_of(tmp_path / "nowhere")


def test_a_step_must_be_complete(tmp_path):
    write_step(HFWeights(saved(tmp_path / "hf")), tmp_path / "step-0")
    (tmp_path / "step-0" / "complete.json").unlink()
    with pytest.raises(WeightsError, match="no complete checkpoint"):
        StepWeights(tmp_path / "step-0")


def test_a_step_holds_no_other_type_than_fp32(tmp_path):
    with pytest.raises(WeightsError, match="float32 only"):
        write_weights(HFWeights(saved(tmp_path / "hf")), tmp_path / "step-0", "dcp", dtype="bfloat16")


def test_a_base_is_for_adapters_alone(tmp_path):
    hf = saved(tmp_path / "hf")
    write_step(HFWeights(hf), tmp_path / "step-0")
    for whole in (hf, tmp_path / "step-0"):
        with pytest.raises(WeightsError, match=f"--base=.*: {whole} holds whole weights"):
            open_weights(whole, base=hf)


def test_adapters_are_merged_in_the_type_of_what_they_are_beside(tmp_path):
    base = HFWeights(saved(tmp_path / "hf", dtype=torch.bfloat16))
    spec = LoraSpec(rank=2, alpha=4.0, targets=("wq",))
    shapes = adapter_shapes(parameter_shapes(base.args), spec)
    adapters = {name: torch.randn(shape) / 10 for name, shape in shapes.items()}
    train_state = {
        "model": base.args.as_json(),
        "lora": spec.as_json(),
        "base": {"path": str(base.place), "in_hf": True},
    }
    dcp.save(
        {"model": adapters, "train_state": json.dumps(train_state)}, checkpoint_id=tmp_path / "step-1", no_dist=True
    )
    (tmp_path / "step-1" / "complete.json").write_text("{}")
    write_weights(open_weights(tmp_path / "step-1"), tmp_path / "out", "hf")
    for name, tensor in HFWeights(tmp_path / "out").read(list(base.tensors)).items():
        expected = base.read([name])[name]
        if ".wq." in name:
            layer = name.removesuffix(".weight")
            expected = (expected.float() + 2 * adapters[f"{layer}.lora_b"] @ adapters[f"{layer}.lora_a"]).bfloat16()
        assert tensor.equal(expected), name
